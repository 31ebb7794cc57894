// SPDX-License-Identifier: Apache-2.0
#include "cli/launch_job.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <utility>

#include "cli/launch_channel.h"
#include "cli/verbs.h"
#include "halfstep/core/error.h"
#include "halfstep/core/text.h"

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::size_t kMostKeptOutput = 1 << 16;
// From SIGTERM to SIGKILL, and for MPI's launcher to end when its ranks have.
constexpr auto kTimeToEnd = std::chrono::seconds(5);
// For the next rank to begin on another machine. MPICH's launcher waits for ever where its agent fails.
constexpr auto kTimeToBegin = std::chrono::seconds(60);
// For MPI's launcher to end when it has ended a rank.
constexpr auto kTimeOfLauncher = std::chrono::seconds(3);
// After a rank has ended with an error, for one that was ended by one of these signals, which is why the first did.
constexpr auto kTimeOfCause = std::chrono::milliseconds(500);
constexpr std::array kCauses{SIGKILL, SIGSEGV, SIGBUS, SIGILL, SIGFPE};

[[noreturn]] void system_failed(const std::string& what) {
  throw Error(fmt::format("launch: {}: {}", what, std::strerror(errno)));
}

// A folder that only this user can look into.
class PrivateFolder {
 public:
  PrivateFolder() {
    // The path of a socket has to be short.
    constexpr std::size_t kLongest = 60;
    const char* given = std::getenv("TMPDIR");
    const std::string top = given && *given == '/' && std::strlen(given) <= kLongest ? given : "/tmp";
    path_ = top + "/halfstep-launch-XXXXXX";
    if (!::mkdtemp(path_.data())) system_failed(shown_path(path_));
  }
  ~PrivateFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  PrivateFolder(const PrivateFolder&) = delete;
  PrivateFolder& operator=(const PrivateFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string make_token() {
  std::random_device source;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", source(), source(), source(), source());
}

std::vector<std::string> machine_addresses() {
  std::vector<std::string> result;
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return result;
  for (const ifaddrs* i = all; i; i = i->ifa_next) {
    if (!i->ifa_addr || !(i->ifa_flags & IFF_UP) || (i->ifa_flags & IFF_LOOPBACK)) continue;
    if (i->ifa_addr->sa_family != AF_INET) continue;
    std::array<char, INET_ADDRSTRLEN> text{};
    const auto* address = reinterpret_cast<const sockaddr_in*>(i->ifa_addr);
    if (::inet_ntop(AF_INET, &address->sin_addr, text.data(), text.size())) result.emplace_back(text.data());
  }
  ::freeifaddrs(all);
  return result;
}

// A rank that is gone, and hasn't said how it ended.
struct Lost {
  int rank;
  Clock::time_point since;
};

struct RankProcess {
  File socket;
  LineReader lines;
  std::string host;
  long pid = 0;
  bool ended = false;
};

// One that has connected, but not said who it is.
struct Newcomer {
  File socket;
  LineReader lines;
  bool local;
};

class Job {
 public:
  explicit Job(const LaunchJob& job) : job_(job), ranks_(static_cast<std::size_t>(job.ranks)) {}

  LaunchResult run() {
    sigset_t watched, before;
    sigemptyset(&watched);
    for (const int s : {SIGCHLD, SIGTERM, SIGINT, SIGHUP}) sigaddset(&watched, s);
    ::sigprocmask(SIG_BLOCK, &watched, &before);
    signals_ = File(::signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!signals_) system_failed("signalfd");
    struct Restore {
      sigset_t& mask;
      ~Restore() { ::sigprocmask(SIG_SETMASK, &mask, nullptr); }
    } restore{before};
    listen();
    start(before);
    while (mpirun_ > 0) turn();
    conclude();
    return result_;
  }

 private:
  void listen() {
    address_.token = make_token();
    address_.socket = folder_.path() + "/s";
    sockaddr_un local{};
    local.sun_family = AF_UNIX;
    address_.socket.copy(local.sun_path, sizeof(local.sun_path) - 1);
    local_ = File(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (::bind(local_.get(), reinterpret_cast<const sockaddr*>(&local), sizeof(local)) != 0 ||
        ::listen(local_.get(), SOMAXCONN) != 0) {
      system_failed("a socket in " + shown_path(folder_.path()));
    }
    if (!job_.other_machines) return;
    sockaddr_in any{};
    any.sin_family = AF_INET;
    socklen_t size = sizeof(any);
    remote_ = File(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (::bind(remote_.get(), reinterpret_cast<const sockaddr*>(&any), sizeof(any)) != 0 ||
        ::listen(remote_.get(), SOMAXCONN) != 0 ||
        ::getsockname(remote_.get(), reinterpret_cast<sockaddr*>(&any), &size) != 0) {
      system_failed("a port for ranks on other machines");
    }
    address_.port = ntohs(any.sin_port);
    address_.addresses = machine_addresses();
  }

  void start(const sigset_t& mask) {
    std::array<int, 2> ends{-1, -1};
    if (!job_.other_machines && ::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) system_failed("pipe");
    output_ = File(ends[0]);
    const File written(ends[1]);
    std::vector<std::string> words = job_.launcher;
    words.insert(words.end(), job_.program.begin(), job_.program.end());
    const std::string variable = address_.text();
    const pid_t own = ::getpid();
    mpirun_ = ::fork();
    if (mpirun_ < 0) system_failed("fork");
    if (mpirun_ > 0) return;
    // Signals of the terminal are for this process, which passes them on.
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != own) ::_exit(kFailed);
    ::setenv(kLaunchVariable, variable.c_str(), 1);
    ::dup2(::open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
    if (written) {
      ::fcntl(written.get(), F_SETFL, 0);
      ::dup2(written.get(), STDOUT_FILENO);
      ::dup2(written.get(), STDERR_FILENO);
    }
    for (const int s : {SIGPIPE, SIGXFSZ}) ::signal(s, SIG_DFL);
    ::sigprocmask(SIG_SETMASK, &mask, nullptr);
    std::vector<char*> arguments;
    for (std::string& w : words) arguments.push_back(w.data());
    arguments.push_back(nullptr);
    ::execvp(arguments[0], arguments.data());
    std::fprintf(stderr, "%s: %s\n", arguments[0], std::strerror(errno));
    ::_exit(127);
  }

  void turn() {
    std::vector<pollfd> files;
    const auto watch = [&](int file) { files.push_back({.fd = file, .events = POLLIN, .revents = 0}); };
    watch(signals_.get());
    watch(output_.get());
    watch(local_.get());
    watch(remote_.get());
    for (const auto& n : newcomers_) watch(n->socket.get());
    const std::size_t first_rank = files.size();
    for (const RankProcess& r : ranks_) watch(r.socket.get());
    ::poll(files.data(), files.size(), 100);
    if (files[1].revents) read_output();
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (files[first_rank + r].revents) read_rank(static_cast<int>(r));
    }
    for (std::size_t i = first_rank; i-- > 4;) {
      if (files[i].revents) read_newcomer(i - 4);
    }
    if (files[2].revents) accept(local_.get(), true);
    if (files[3].revents) accept(remote_.get(), false);
    if (files[0].revents) read_signals();
    if (mpirun_ > 0) watch_time();
  }

  void accept(int from, bool local) {
    File socket(::accept4(from, nullptr, nullptr, SOCK_CLOEXEC));
    constexpr std::size_t kMost = 4096;
    if (!socket || newcomers_.size() > kMost) return;
    if (!local) end_when_cut(socket.get());
    newcomers_.push_back(std::make_unique<Newcomer>(Newcomer{std::move(socket), {}, local}));
  }

  void read_newcomer(std::size_t i) {
    const std::unique_ptr<Newcomer>& n = newcomers_[i];
    const bool more = n->lines.read_from(n->socket.get());
    std::string line;
    if (n->lines.next(line)) {
      welcome(*n, line);
    } else if (more) {
      return;
    }
    newcomers_.erase(newcomers_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  void welcome(Newcomer& n, const std::string& line) {
    const std::string greeting = "hello " + address_.token + " ";
    if (!line.starts_with(greeting)) return;
    char* end = nullptr;
    const long rank = std::strtol(line.c_str() + greeting.size(), &end, 10);
    if (rank < 0 || rank >= job_.ranks) {
      return refuse(fmt::format("MPI's launcher started rank {}, and {} were asked for", rank, job_.ranks));
    }
    RankProcess& r = ranks_[static_cast<std::size_t>(rank)];
    if (r.socket || r.ended) {
      return refuse(
          fmt::format("MPI's launcher started rank {} twice: is it of the implementation that --mpi names?", rank));
    }
    // The standard files of this process go to rank 0 as they are, so that a progress bar finds its terminal; standard
    // error goes to all ranks.
    std::vector<int> files;
    if (n.local) files = {STDOUT_FILENO, STDERR_FILENO};
    if (!send_line(n.socket.get(), "go", files)) return;
    r.socket = std::move(n.socket);
    r.host = *end == ' ' ? end + 1 : "";
    newest_ = Clock::now();
    if (killing_) send_line(r.socket.get(), fmt::format("signal {}", SIGKILL));
  }

  void refuse(const std::string& why) {
    if (!first_failed_) fail(kFailed, why);
    kill_all();
  }

  void read_rank(int number) {
    RankProcess& r = ranks_[static_cast<std::size_t>(number)];
    const bool more = r.lines.read_from(r.socket.get());
    std::string line;
    while (r.lines.next(line)) {
      if (line.starts_with("started ")) r.pid = std::atol(line.c_str() + 8);
      int status = 0, signal = 0, ours = 0;
      if (std::sscanf(line.c_str(), "ended %d %d %d", &status, &signal, &ours) >= 2) {
        rank_ended(number, status, signal, ours != 0);
      }
    }
    if (more) return;
    r.socket.close();
    if (r.ended) return;
    // Its machine is lost, or MPI's launcher ends the job, as for MPI_Abort: then that one knows the status.
    r.ended = true;
    if (!lost_) lost_ = Lost{number, Clock::now()};
    dismiss_when_all_ended();
  }

  // `ours`: the process beside it sent the signal.
  void rank_ended(int number, int status, int signal, bool ours) {
    RankProcess& r = ranks_[static_cast<std::size_t>(number)];
    r.ended = true;
    if (status != 0 || signal != 0) {
      const std::string who = fmt::format("rank {} (host {}, pid {})", number, printable(r.host), r.pid);
      // Others may notice it, and end with an error, before the process beside the rank is woken up.
      const bool cause = signal != 0 && std::find(kCauses.begin(), kCauses.end(), signal) != kCauses.end() && !ours &&
                         !killing_ && !asked_;
      if (!first_failed_ || (cause && !said_)) {
        signal != 0
            ? fail(128 + signal, fmt::format("{} was ended by signal {} ({})", who, signal, ::strsignal(signal)))
            : fail(status, fmt::format("{} ended with status {}", who, status));
      }
      if (cause) say();
    }
    dismiss_when_all_ended();
  }

  void fail(int status, const std::string& text) {
    if (!first_failed_) first_failed_ = Clock::now();
    result_.status = status;
    failure_ = text;
    // One that is stopped has nothing to say, and doesn't hear SIGTERM.
    for (const RankProcess& r : ranks_) {
      if (r.socket && !r.ended) send_line(r.socket.get(), "end-if-stopped");
    }
  }

  void say() {
    if (!first_failed_ || std::exchange(said_, true)) return;
    // Of what the user asked for nothing needs to be said.
    if (!result_.interrupted) complain("launch: " + failure_);
  }

  void dismiss_when_all_ended() {
    if (dismissed_ || std::any_of(ranks_.begin(), ranks_.end(), [](const RankProcess& r) { return !r.ended; })) return;
    dismissed_ = Clock::now();
    for (const RankProcess& r : ranks_) {
      if (r.socket) send_line(r.socket.get(), "leave");
    }
  }

  void send_signal(int number) {
    for (const RankProcess& r : ranks_) {
      if (r.socket && !r.ended) send_line(r.socket.get(), fmt::format("signal {}", number));
    }
  }

  void kill_all() {
    killing_ = true;
    send_signal(SIGKILL);
    if (!killed_) killed_ = Clock::now();
  }

  void read_signals() {
    signalfd_siginfo info{};
    while (::read(signals_.get(), &info, sizeof(info)) == sizeof(info)) {
      const int number = static_cast<int>(info.ssi_signo);
      if (number == SIGCHLD) {
        int status = 0;
        if (mpirun_ > 0 && ::waitpid(mpirun_, &status, WNOHANG) == mpirun_) {
          mpirun_ = -1;
          mpirun_status_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
        }
      } else if (std::exchange(result_.interrupted, true)) {
        kill_all();
      } else {
        result_.signal = number;
        send_signal(number);
        // Ranks that haven't begun yet don't hear it.
        const bool all_here = std::all_of(ranks_.begin(), ranks_.end(), [](const RankProcess& r) { return r.pid > 0; });
        if (!all_here) kill_all();
      }
    }
  }

  void watch_time() {
    const Clock::time_point now = Clock::now();
    if (job_.other_machines && !first_failed_ && !lost_ && !result_.interrupted && now - newest_ > kTimeToBegin) {
      const auto missing =
          std::find_if(ranks_.begin(), ranks_.end(), [](const auto& r) { return !r.socket && !r.ended; });
      if (missing != ranks_.end()) {
        fail(kFailed, fmt::format("rank {} hasn't begun {} s after the others: can its machine be reached?",
                                  missing - ranks_.begin(), kTimeToBegin.count()));
        kill_all();
      }
    }
    if (lost_ && !first_failed_ && now - lost_->since > kTimeOfLauncher) {
      fail(128 + SIGKILL, fmt::format("rank {} (host {}) was lost", lost_->rank,
                                      printable(ranks_[static_cast<std::size_t>(lost_->rank)].host)));
    }
    if (first_failed_ && now - *first_failed_ > kTimeOfCause) say();
    if (first_failed_ && !dismissed_ && !result_.interrupted) {
      if (!asked_ && now - *first_failed_ > job_.grace) {
        complain(fmt::format("launch: {} s later other ranks still run; they are ended", job_.grace.count()));
        asked_ = now;
        send_signal(SIGTERM);
      } else if (asked_ && !killing_ && now - *asked_ > kTimeToEnd) {
        kill_all();
      }
    }
    // Without a rank that could end it, MPI's launcher is ended by hand.
    const auto& since = dismissed_ ? dismissed_ : killed_;
    if (!since) return;
    if (now - *since > 2 * kTimeToEnd) {
      end_launcher(-mpirun_, SIGKILL);
    } else if (now - *since > (dismissed_ ? kTimeToEnd : milliseconds(500)) && !ended_launcher_) {
      ended_launcher_ = true;
      end_launcher(mpirun_, SIGTERM);
    }
  }

  // Only ever the launcher or its group: -1 would be for all processes.
  void end_launcher(pid_t which, int number) const {
    if (mpirun_ > 1) ::kill(which, number);
  }

  void read_output() {
    std::array<char, 4096> piece;
    const ssize_t n = ::read(output_.get(), piece.data(), piece.size());
    if (n > 0 && kept_.size() < kMostKeptOutput) kept_.append(piece.data(), static_cast<std::size_t>(n));
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) output_.close();
  }

  // What is left to say when MPI's launcher has ended.
  void conclude() {
    for (int r = 0; r < job_.ranks; ++r) {
      // What ranks said last may still be there.
      while (ranks_[static_cast<std::size_t>(r)].socket && !ranks_[static_cast<std::size_t>(r)].ended) {
        pollfd wait{.fd = ranks_[static_cast<std::size_t>(r)].socket.get(), .events = POLLIN, .revents = 0};
        if (::poll(&wait, 1, static_cast<int>(milliseconds(kTimeToEnd).count())) != 1) break;
        read_rank(r);
      }
    }
    while (output_) {
      pollfd wait{.fd = output_.get(), .events = POLLIN, .revents = 0};
      if (::poll(&wait, 1, 100) != 1) break;
      read_output();
    }
    say();
    const bool all_ended = std::all_of(ranks_.begin(), ranks_.end(), [](const RankProcess& r) { return r.ended; });
    if (result_.interrupted) {
      if ((!all_ended || lost_) && result_.status == 0) result_.status = 128 + result_.signal;
      return;
    }
    if (first_failed_ || (all_ended && !lost_)) return;
    if (result_.status == 0) result_.status = mpirun_status_ != 0 ? mpirun_status_ : kFailed;
    // MPI's launcher failed, and has said why.
    write_whole(STDERR_FILENO, printable_lines(kept_));
    complain(fmt::format("launch: {} ended with status {} {}", shown_path(job_.launcher[0]), mpirun_status_,
                         lost_ ? "and ended all ranks" : "before all ranks had begun"));
  }

  const LaunchJob& job_;
  PrivateFolder folder_;
  LaunchAddress address_;
  File signals_, local_, remote_, output_;
  std::vector<std::unique_ptr<Newcomer>> newcomers_;
  std::vector<RankProcess> ranks_;
  std::string kept_;
  pid_t mpirun_ = -1;
  int mpirun_status_ = 0;
  std::optional<Clock::time_point> first_failed_, asked_, killed_, dismissed_;
  Clock::time_point newest_ = Clock::now();  // when the last rank has begun
  std::optional<Lost> lost_;
  bool killing_ = false, ended_launcher_ = false;
  std::string failure_;  // the first
  bool said_ = false;
  LaunchResult result_;
};

}  // namespace

LaunchResult run_job(const LaunchJob& job) { return Job(job).run(); }

}  // namespace halfstep::cli
