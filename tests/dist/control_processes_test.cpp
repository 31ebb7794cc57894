// SPDX-License-Identifier: Apache-2.0
// Ranks as processes, which exchange texts through this one: kill -9, SIGSTOP, and an end without a goodbye.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "halfstep/dist/control.h"

namespace halfstep::dist {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

const ControlOptions kQuick{.heartbeat = milliseconds(100), .lost = milliseconds(2000), .out_of_step = milliseconds(0)};
// What a loaded machine may add to it.
constexpr milliseconds kMargin{5000};
// Of a process of a job.
std::atomic<bool> g_asked_to_stop{false};

void write_all(int file, std::string_view text) {
  const auto size = static_cast<std::uint32_t>(text.size());
  std::string bytes(reinterpret_cast<const char*>(&size), sizeof(size));
  bytes += text;
  for (std::string_view rest = bytes; !rest.empty();) {
    const ssize_t n = ::send(file, rest.data(), rest.size(), MSG_NOSIGNAL);
    if (n <= 0) return;
    rest.remove_prefix(static_cast<std::size_t>(n));
  }
}

bool read_exactly(int file, void* to, std::size_t size) {
  for (std::size_t done = 0; done < size;) {
    const ssize_t n = ::read(file, static_cast<char*>(to) + done, size - done);
    if (n <= 0) return false;
    done += static_cast<std::size_t>(n);
  }
  return true;
}

// Empty where the other side is gone.
std::string read_text(int file) {
  std::uint32_t size = 0;
  if (!read_exactly(file, &size, sizeof(size))) return {};
  std::string text(size, '\0');
  return read_exactly(file, text.data(), size) ? text : std::string();
}

double seconds_now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

// A job of processes. Each enters the collective #41 and waits for a failure, or until it is told to finish.
class Job {
 public:
  // `before` is called in each process.
  Job(int size, const ControlOptions& options, const std::function<void(int rank)>& before = {}) {
    for (int r = 0; r < size; ++r) {
      int pair[2];
      if (::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) throw std::runtime_error("socketpair");
      const pid_t pid = ::fork();
      if (pid < 0) throw std::runtime_error("fork");
      if (pid == 0) {
        for (const int other : files) ::close(other);
        ::close(pair[0]);
        if (before) before(r);
        run_rank(r, size, pair[1], options);
      }
      ::close(pair[1]);
      files.push_back(pair[0]);
      pids.push_back(pid);
    }
    for (int round = 0; round < 2; ++round) {
      nlohmann::json all = nlohmann::json::array();
      for (const int f : files) all.push_back(read_text(f));
      for (const int f : files) write_all(f, all.dump());
    }
    for (const int f : files) {
      if (read_text(f) != "ready") throw std::runtime_error("a rank did not begin");
    }
  }
  ~Job() {
    for (const int f : files) ::close(f);
    for (const pid_t pid : pids) {
      if (pid <= 0) continue;  // ended; kill(-1) would be for all processes of the user
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  void signal(int rank, int number) const {
    const pid_t pid = pids[static_cast<std::size_t>(rank)];
    if (pid > 0) ::kill(pid, number);
  }
  void tell(int rank, const std::string& what) const { write_all(files[static_cast<std::size_t>(rank)], what); }
  // What a rank learnt and when; null where it has ended without having learnt anything.
  nlohmann::json result(int rank) const {
    const std::string text = read_text(files[static_cast<std::size_t>(rank)]);
    return text.empty() ? nlohmann::json() : nlohmann::json::parse(text);
  }
  // Waits until its process has ended, and returns its status.
  int ended(int rank) {
    int status = 0;
    const pid_t pid = std::exchange(pids[static_cast<std::size_t>(rank)], -1);
    ::waitpid(pid, &status, 0);
    return status;
  }

  std::vector<int> files;
  std::vector<pid_t> pids;

 private:
  [[noreturn]] static void run_rank(int rank, int size, int file, const ControlOptions& options) {
    try {
      const auto exchange = [file](std::string_view text) {
        write_all(file, text);
        return nlohmann::json::parse(read_text(file)).get<std::vector<std::string>>();
      };
      std::vector<std::string> hosts;
      for (int r = 0; r < size; ++r) hosts.push_back("host" + std::to_string(r));
      Control control(rank, size, hosts, exchange, options);
      control.doing({.sequence = 41, .name = "all_reduce", .label = "bucket 3", .bytes = 4 << 20});
      // One heartbeat later rank 0 knows of it.
      std::this_thread::sleep_for(2 * options.heartbeat);
      write_all(file, "ready");
      for (;;) {
        if (const auto f = control.failure()) {
          write_all(
              file,
              nlohmann::json{
                  {"rank", f->rank}, {"what", static_cast<int>(f->what)}, {"text", f->text}, {"time", seconds_now()}}
                  .dump());
          break;
        }
        pollfd wait{.fd = file, .events = POLLIN, .revents = 0};
        if (::poll(&wait, 1, 2) != 1) continue;
        const std::string told = read_text(file);
        if (told == "vanish") ::_exit(3);
        if (told == "fail") control.report_failure("out of memory");
        if (told == "stop") g_asked_to_stop = true;
        if (told.empty() || told == "finish") break;
      }
    } catch (...) {
      ::_exit(9);
    }
    ::_exit(0);
  }
};

struct Case {
  const char* name;
  int rank;
  int signal;
  Failure::What what;
  milliseconds silence;
};

// What happens to one rank is known to all others, soon, and they come to their ends.
void expect_named(const Case& c, const ControlOptions& options, milliseconds margin) {
  SCOPED_TRACE(c.name);
  constexpr int kSize = 4;
  Job job(kSize, options);
  const double begin = seconds_now();
  c.signal == 0 ? job.tell(c.rank, "vanish") : job.signal(c.rank, c.signal);
  const double limit = std::chrono::duration<double>(c.silence + margin).count();
  double last = 0;
  std::string text;
  for (int r = 0; r < kSize; ++r) {
    if (r == c.rank) continue;
    const auto told = job.result(r);
    ASSERT_TRUE(told.is_object()) << r;
    EXPECT_EQ(told["rank"], c.rank);
    EXPECT_EQ(told["what"], static_cast<int>(c.what));
    text = told["text"];
    const std::string number = std::to_string(c.rank);
    EXPECT_EQ(text.rfind("rank " + number + " (host host" + number + ", pid ", 0), 0u) << text;
    EXPECT_NE(text.find("it was in all_reduce #41 (bucket 3, 4.0 MiB)"), std::string::npos) << text;
    // Rank 0 knows what all do; without it each knows of itself.
    const std::string others = c.rank == 0 ? "; rank " + std::to_string(r) + " waits in the same" : " wait in the same";
    EXPECT_NE(text.find(others), std::string::npos) << text;
    last = std::max(last, told["time"].get<double>() - begin);
    EXPECT_EQ(job.ended(r), 0);
  }
  EXPECT_LT(last, limit);
  EXPECT_GE(last,
            0.001 * static_cast<double>(c.silence.count()) - 0.001 * static_cast<double>(options.heartbeat.count()));
  std::printf("%s: known to all after %.3f s, ended after %.3f s: %s\n", c.name, last, seconds_now() - begin,
              text.c_str());
  if (c.signal != SIGSTOP) return;
  // It learns what was decided when it comes back.
  job.signal(c.rank, SIGCONT);
  const auto told = job.result(c.rank);
  ASSERT_TRUE(told.is_object());
  EXPECT_EQ(told["rank"], c.rank) << told;
  EXPECT_EQ(job.ended(c.rank), 0);
}

TEST(ControlProcesses, AKilledRankIsNamedAtOnce) {
  for (const int rank : {2, 0}) {
    expect_named({rank == 0 ? "kill -9 of rank 0" : "kill -9", rank, SIGKILL, Failure::What::ended, milliseconds(0)},
                 kQuick, kQuick.lost - kQuick.heartbeat);
  }
}

TEST(ControlProcesses, ARankThatEndsWithoutAGoodbyeIsNamedAtOnce) {
  expect_named({"exit", 1, 0, Failure::What::ended, milliseconds(0)}, kQuick, kQuick.lost - kQuick.heartbeat);
}

TEST(ControlProcesses, AStoppedRankIsNamed) {
  for (const int rank : {1, 0}) {
    expect_named({rank == 0 ? "SIGSTOP of rank 0" : "SIGSTOP", rank, SIGSTOP, Failure::What::silent, kQuick.lost},
                 kQuick, kMargin);
  }
}

TEST(ControlProcesses, AShortStopIsNoFailure) {
  Job job(3, kQuick);
  for (int rank = 0; rank < 3; ++rank) {
    job.signal(rank, SIGSTOP);
    std::this_thread::sleep_for(kQuick.lost / 4);
    job.signal(rank, SIGCONT);
  }
  for (int rank = 0; rank < 3; ++rank) job.tell(rank, "finish");
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(job.result(rank).is_null());
    EXPECT_EQ(job.ended(rank), 0);
  }
}

TEST(ControlProcesses, AFailureIsToldThoughTheProcessEndsRightAfterIt) {
  for (const int rank : {0, 2}) {
    Job job(3, kQuick);
    job.tell(rank, "fail");
    for (int r = 0; r < 3; ++r) {
      const auto told = job.result(r);
      ASSERT_TRUE(told.is_object()) << r;
      EXPECT_EQ(told["rank"], rank);
      EXPECT_EQ(told["what"], static_cast<int>(Failure::What::error)) << told;
      EXPECT_EQ(job.ended(r), 0);
    }
  }
}

// Long before the silence is one of a rank that is lost.
TEST(ControlProcesses, AJobThatIsAskedToStopDoesNotWaitForAStoppedRank) {
  ControlOptions options = kQuick;
  options.lost = milliseconds(60'000);
  options.answer = milliseconds(1000);
  options.stop = [] { return g_asked_to_stop.load(); };
  for (const auto& [asked, stopped] : {std::pair(2, 1), std::pair(0, 1), std::pair(2, 0)}) {
    SCOPED_TRACE(fmt::format("rank {} is asked, rank {} is stopped", asked, stopped));
    Job job(3, options);
    job.signal(stopped, SIGSTOP);
    const double begin = seconds_now();
    job.tell(asked, "stop");
    for (int r = 0; r < 3; ++r) {
      // Without rank 0 nobody tells those that weren't asked.
      if (r == stopped || (stopped == 0 && r != asked)) continue;
      const auto told = job.result(r);
      ASSERT_TRUE(told.is_object()) << r;
      EXPECT_EQ(told["rank"], stopped) << told;
      EXPECT_EQ(told["what"], static_cast<int>(Failure::What::silent));
      EXPECT_NE(told["text"].get<std::string>().find(" since the job was asked to stop"), std::string::npos) << told;
      EXPECT_GE(told["time"].get<double>() - begin, 1);
      EXPECT_LT(told["time"].get<double>() - begin, 1 + 0.001 * static_cast<double>(kMargin.count()));
    }
  }
}

TEST(ControlProcesses, AJobWhoseRanksAllAnswerStopsInPeace) {
  ControlOptions options = kQuick;
  options.answer = milliseconds(500);
  options.stop = [] { return g_asked_to_stop.load(); };
  for (const int asked : {0, 2}) {
    Job job(3, options);
    job.tell(asked, "stop");
    std::this_thread::sleep_for(4 * options.answer);  // the steps that they still do
    for (int r = 0; r < 3; ++r) job.tell(r, "finish");
    for (int r = 0; r < 3; ++r) {
      EXPECT_TRUE(job.result(r).is_null());
      EXPECT_EQ(job.ended(r), 0);
    }
  }
}

TEST(ControlProcesses, NobodyWaitsForAStoppedRankAtTheEnd) {
  Job job(3, kQuick);
  job.signal(1, SIGSTOP);
  const double begin = seconds_now();
  job.tell(0, "finish");
  job.tell(2, "finish");
  for (const int r : {0, 2}) EXPECT_EQ(job.ended(r), 0);
  EXPECT_LT(seconds_now() - begin, 1 + 0.001 * static_cast<double>(kMargin.count()));
}

// Two networks, each of a process that does nothing else, with a cable between them.
class TwoMachines {
 public:
  TwoMachines() {
    for (int& holder : holders_) {
      int ready[2];
      if (::pipe(ready) != 0) return;
      holder = ::fork();
      if (holder == 0) {
        const char good = ::unshare(CLONE_NEWNET) == 0 ? 'y' : 'n';
        (void)!::write(ready[1], &good, 1);
        for (;;) ::pause();
      }
      char good = 'n';
      (void)!::read(ready[0], &good, 1);
      ::close(ready[0]);
      ::close(ready[1]);
      if (holder < 0 || good != 'y') return;
    }
    const std::string a = std::to_string(holders_[0]), b = std::to_string(holders_[1]);
    if (std::system(("ip link add cable netns " + a + " type veth peer name cable netns " + b + " 2>&1").c_str()) !=
        0) {
      return;
    }
    made = inside(0, "ip addr add 10.77.0.1/24 dev cable") && inside(1, "ip addr add 10.77.0.2/24 dev cable");
    for (int i = 0; i < 2; ++i) made = made && inside(i, "ip link set cable up") && inside(i, "ip link set lo up");
  }
  ~TwoMachines() {
    for (const int holder : holders_) {
      if (holder <= 0) continue;
      ::kill(holder, SIGKILL);
      ::waitpid(holder, nullptr, 0);
    }
  }
  TwoMachines(const TwoMachines&) = delete;
  TwoMachines& operator=(const TwoMachines&) = delete;

  void enter(int machine) const {
    const int network =
        ::open(("/proc/" + std::to_string(holders_[machine]) + "/ns/net").c_str(), O_RDONLY | O_CLOEXEC);
    if (::setns(network, CLONE_NEWNET) != 0) ::_exit(8);
    ::close(network);
  }
  bool cut() const { return inside(0, "ip link set cable down"); }

  bool made = false;

 private:
  bool inside(int machine, const std::string& command) const {
    return std::system(("nsenter -t " + std::to_string(holders_[machine]) + " -n " + command + " 2>&1").c_str()) == 0;
  }
  int holders_[2] = {-1, -1};
};

// Ranks 0 and 1 on one machine, 2 and 3 on the other: each side names what it lost.
void expect_a_cut_is_named(const ControlOptions& options, milliseconds margin) {
  const TwoMachines machines;
  if (!machines.made) GTEST_SKIP() << "no two networks can be made here: that needs root, ip and nsenter";
  Job job(4, options, [&](int rank) { machines.enter(rank / 2); });
  const double begin = seconds_now();
  ASSERT_TRUE(machines.cut());
  double last = 0;
  for (int r = 0; r < 4; ++r) {
    const auto told = job.result(r);
    ASSERT_TRUE(told.is_object()) << r;
    EXPECT_EQ(told["what"], static_cast<int>(Failure::What::silent)) << told;
    EXPECT_EQ(told["rank"], r < 2 ? 2 : 0) << told;
    const std::string text = told["text"];
    if (r < 2) {
      EXPECT_EQ(text.rfind("rank 2 (host host2, pid ", 0), 0u) << text;
      EXPECT_NE(text.find(" and rank 3 (host host3, pid "), std::string::npos) << text;
      EXPECT_NE(text.find("haven't answered for "), std::string::npos) << text;
    } else {
      EXPECT_EQ(text.rfind("rank 0 (host host0, pid ", 0), 0u) << text;
    }
    last = std::max(last, told["time"].get<double>() - begin);
    if (r == 0 || r == 2) std::printf("cut: known to rank %d after %.3f s: %s\n", r, last, text.c_str());
    EXPECT_EQ(job.ended(r), 0);
  }
  EXPECT_LT(last, 0.001 * static_cast<double>((options.lost + margin).count()));
}

TEST(ControlProcesses, ACutNetworkIsNamedOnBothSides) { expect_a_cut_is_named(kQuick, kMargin); }

TEST(ControlProcessesSlow, ACutNetworkIsKnownWithin15Seconds) {
  const ControlOptions usual;
  expect_a_cut_is_named(usual, milliseconds(15'000) - usual.lost);
}

// With the intervals that programs use: all know within 15 seconds.
TEST(ControlProcessesSlow, AllKnowWithin15Seconds) {
  const ControlOptions usual;
  const milliseconds limit(15'000);
  for (const int rank : {2, 0}) {
    expect_named({"kill -9, usual intervals", rank, SIGKILL, Failure::What::ended, milliseconds(0)}, usual, limit);
    expect_named({"SIGSTOP, usual intervals", rank, SIGSTOP, Failure::What::silent, usual.lost}, usual,
                 limit - usual.lost);
  }
}

}  // namespace
}  // namespace halfstep::dist
