// SPDX-License-Identifier: Apache-2.0
// What ranks tell each other, and what strangers at the port get.
#include "halfstep/dist/control.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "halfstep/dist/control_messages_internal.h"
#include "halfstep/dist/process_group.h"
#include "tests/dist/control_ranks.h"

namespace halfstep::dist {
namespace {

TEST(Control, RanksFinishInAnyOrder) {
  for (const bool first_is_last : {false, true}) {
    std::atomic<int> failures{0};
    run_ranks(4, kQuick, [&](int rank, Control& control) {
      std::this_thread::sleep_for((first_is_last ? 3 - rank : rank) * 3 * kBeat);
      failures += control.failed();
    });
    EXPECT_EQ(failures, 0);
  }
}

TEST(Control, OneRankHasNobodyToTell) {
  int exchanges = 0;
  Control control(
      0, 1, {"a"},
      [&](std::string_view) {
        ++exchanges;
        return std::vector<std::string>{};
      },
      kQuick);
  EXPECT_EQ(exchanges, 0);
  EXPECT_FALSE(control.failed());
  control.report_failure("the disk is full");
  ASSERT_TRUE(control.failure());
  EXPECT_EQ(control.failure()->text, "the disk is full");
}

TEST(Control, AllRanksLearnOfAnError) {
  for (const int failing : {0, 2}) {
    std::mutex mutex;
    std::vector<Failure> told;
    std::atomic<int> calls{0};
    ControlOptions options = kQuick;
    options.on_failure = [&](const Failure&) { ++calls; };
    run_ranks(3, options, [&](int rank, Control& control) {
      if (rank == failing) control.report_failure("the disk\nis full");
      const auto failure = wait_for_failure(control);
      ASSERT_TRUE(failure);
      const std::lock_guard lock(mutex);
      told.push_back(*failure);
    });
    ASSERT_EQ(told.size(), 3u);
    for (const Failure& f : told) {
      EXPECT_EQ(f.rank, failing);
      EXPECT_EQ(f.what, Failure::What::error);
      EXPECT_EQ(f.host, failing == 0 ? "a" : "b");
      EXPECT_EQ(f.pid, ::getpid());
      EXPECT_EQ(f.text, "rank " + std::to_string(failing) + " (host " + f.host + ", pid " + std::to_string(f.pid) +
                            ") failed: the disk\\nis full");
    }
    EXPECT_EQ(calls, 3);
  }
}

TEST(Control, TheFirstFailureIsTheSameOnAllRanks) {
  for (int repeat = 0; repeat < 5; ++repeat) {
    std::mutex mutex;
    std::vector<std::string> told;
    run_ranks(4, kQuick, [&](int rank, Control& control) {
      control.report_failure("error of " + std::to_string(rank));  // all at once
      const auto failure = control.failure();
      ASSERT_TRUE(failure);
      const std::lock_guard lock(mutex);
      told.push_back(failure->text);
    });
    ASSERT_EQ(told.size(), 4u);
    for (const std::string& text : told) EXPECT_EQ(text, told[0]);
  }
}

TEST(Control, NamesTheRankThatOthersWaitFor) {
  attempt([] {
    std::mutex mutex;
    std::vector<Failure> told;
    Pace pace;
    run_ranks(4, kQuick, [&](int rank, Control& control) {
      const std::string label = "bucket 3, fc1.weight … conv2.bias";
      Pace::Runner runner(pace);
      control.doing({.sequence = 40, .name = "broadcast", .bytes = 1000});
      control.done();
      if (rank != 2) control.doing({.sequence = 41, .name = "all_reduce", .label = label, .bytes = 4 << 20});
      runner.runs();
      const auto failure = wait_for_failure(control);
      const std::lock_guard lock(mutex);
      if (failure) told.push_back(*failure);
    });
    if (!pace.kept()) return false;
    EXPECT_EQ(told.size(), 4u);
    for (const Failure& f : told) {
      EXPECT_EQ(f.rank, 2);
      EXPECT_EQ(f.what, Failure::What::out_of_step);
      EXPECT_EQ(f.text, told[0].text);
      for (const char* part :
           {"rank 2 (host b, pid ", "is out of step", "in no collective, after broadcast #40 (1000 bytes)",
            "while ranks 0, 1, 3 have waited for ", "all_reduce #41 (bucket 3, fc1.weight … conv2.bias, 4.0 MiB)"}) {
        EXPECT_NE(f.text.find(part), std::string::npos) << part << " in " << f.text;
      }
    }
    return true;
  });
}

TEST(Control, NamesTheRankThatHasFinishedWhileOthersWait) {
  std::mutex mutex;
  std::vector<Failure> told;
  run_ranks(3, kQuick, [&](int rank, Control& control) {
    if (rank == 1) return;
    control.doing({.sequence = 1, .name = "barrier"});
    const auto failure = wait_for_failure(control);
    ASSERT_TRUE(failure);
    const std::lock_guard lock(mutex);
    told.push_back(*failure);
  });
  ASSERT_EQ(told.size(), 2u);
  for (const Failure& f : told) {
    EXPECT_EQ(f.rank, 1);
    EXPECT_NE(f.text.find("it has finished, while ranks 0, 2 have waited for "), std::string::npos) << f.text;
  }
}

// Ranks that are slow, but not stuck: one goes through collectives that others have left behind, one says that it is
// busy, and some wait in a group of their own, whose numbers are others.
TEST(Control, SlowRanksAreNotOutOfStep) {
  attempt([] {
    std::atomic<int> failures{0};
    Pace pace;
    run_ranks(4, kQuick, [&](int rank, Control& control) {
      Pace::Runner runner(pace);
      const auto end = Clock::now() + 2 * kStep;
      if (rank == 0) control.doing({.sequence = 1000, .name = "all_reduce"});
      if (rank == 1) control.working("evaluation");
      if (rank == 3) control.doing({.sequence = 2000, .name = "all_reduce", .of_all = false});
      for (std::uint64_t i = 1; Clock::now() < end; ++i) {
        if (rank == 2) control.doing({.sequence = i, .name = "all_reduce"});
        if (rank == 2) control.done();
        // What is waited for in a group says nothing about those who aren't of it; but it did enter all that all enter.
        if (rank == 3 && i == 1) control.doing({.sequence = 1000, .name = "all_reduce"});
        if (rank == 3 && i == 2) control.doing({.sequence = 2000, .name = "all_reduce", .of_all = false});
        runner.runs();
        std::this_thread::sleep_for(kBeat / 2);
      }
      runner.runs();
      failures += control.failed();
    });
    if (!pace.kept()) return false;
    EXPECT_EQ(failures, 0);
    return true;
  });
}

TEST(Control, WorkIsOverWhenTheNextCollectiveBegins) {
  std::atomic<int> found{0};
  run_ranks(2, kQuick, [&](int rank, Control& control) {
    control.doing({.sequence = 7, .name = "all_reduce"});
    control.done();
    if (rank == 1) control.working("a checkpoint");
    if (rank == 1) control.done();
    if (rank == 0) control.doing({.sequence = 8, .name = "all_reduce"});
    const auto failure = wait_for_failure(control);
    ASSERT_TRUE(failure);
    EXPECT_NE(failure->text.find("it is in no collective, after all_reduce #7 for"), std::string::npos)
        << failure->text;
    found += failure->rank == 1;
  });
  EXPECT_EQ(found, 2);
}

TEST(Control, ARankThatDoesNotConnectIsNamed) {
  ControlOptions options = kQuick;
  options.connect = milliseconds(500);
  Meeting meeting(3);
  std::vector<std::thread> threads;
  std::atomic<int> thrown{0};
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      if (r == 1) {
        meeting.exchange(r, "{}");
        meeting.exchange(r, "{}");
        return;
      }
      try {
        const Control control(r, 3, hosts(3), meeting.of(r), options);
      } catch (const DistError& e) {
        ++thrown;
        EXPECT_NE(std::string(e.what()).find("rank 1 (host a, pid 0) has not connected to rank 0 within 0.5 s"),
                  std::string::npos)
            << e.what();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(thrown, 2);
}

TEST(Control, ARankThatCannotReachRank0SaysSo) {
  ControlOptions options = kQuick;
  options.connect = milliseconds(500);
  const auto exchange = [round = 0](std::string_view own) mutable {
    // Nobody listens on port 1.
    const std::string first =
        ++round == 1 ? std::string(own)
                     : R"({"token": "x", "answer": "y", "port": 1, "addresses": ["127.0.0.1", "no address"]})";
    return std::vector<std::string>{first, std::string(own)};
  };
  try {
    const Control control(1, 2, {"a", "b"}, exchange, options);
    FAIL();
  } catch (const DistError& e) {
    const std::string text = e.what();
    EXPECT_NE(text.find("rank 1 (host b, pid "), std::string::npos) << text;
    EXPECT_NE(text.find(" can't reach rank 0 (host a, pid "), std::string::npos) << text;
    EXPECT_NE(text.find("127.0.0.1 port 1: Connection refused"), std::string::npos) << text;
  }
}

TEST(Control, WrongArgumentsAreRefused) {
  Meeting meeting(1);
  EXPECT_THROW(Control(2, 2, {"a", "a"}, meeting.of(0), kQuick), DistError);
  EXPECT_THROW(Control(0, 2, {"a"}, meeting.of(0), kQuick), DistError);
  EXPECT_THROW(Control(0, 2, {"a", "a"}, meeting.of(0), {.heartbeat = milliseconds(0)}), DistError);
  EXPECT_THROW(Control(0, 2, {"a", "a"}, meeting.of(0), {.heartbeat = kBeat, .lost = 2 * kBeat}), DistError);
  EXPECT_THROW(Control(0, 2, {"a", "a"}, meeting.of(0), {.heartbeat = kBeat, .hang = 2 * kBeat}), DistError);
  EXPECT_THROW(Control(
                   0, 2, {"a", "a"}, [](std::string_view) { return std::vector<std::string>{"{}"}; }, kQuick),
               DistError);
  EXPECT_THROW(Control(
                   0, 2, {"a", "a"},
                   [](std::string_view) {
                     return std::vector<std::string>{"{", "}"};
                   },
                   kQuick),
               DistError);
}

// A connection of somebody who has no business there.
class Stranger {
 public:
  explicit Stranger(int port) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<std::uint16_t>(port));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected = ::connect(socket_, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) == 0;
  }
  ~Stranger() { ::close(socket_); }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;
  void send(const std::string& bytes) const { (void)!::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL); }
  // Whether the other side hangs up, without a byte.
  bool is_hung_up_on() const {
    pollfd wait{.fd = socket_, .events = POLLIN, .revents = 0};
    char byte = 0;
    return ::poll(&wait, 1, static_cast<int>(kLongEnough.count())) == 1 && ::recv(socket_, &byte, 1, 0) <= 0;
  }
  bool connected = false;

 private:
  int socket_;
};

TEST(Control, StrangersAtThePortAreHungUpOn) {
  using detail::ControlMessage;
  using detail::encode;
  using Kind = ControlMessage::Kind;
  constexpr int kSize = 3;
  Meeting meeting(kSize);
  std::atomic<int> port{0};
  std::atomic<bool> may_go_on{false};
  std::atomic<int> failures{0};
  std::mutex mutex;
  std::string token;
  std::vector<std::thread> threads;
  for (int r = 0; r < kSize; ++r) {
    threads.emplace_back([&, r] {
      int round = 0;
      const auto exchange = [&](std::string_view own) {
        auto texts = meeting.exchange(r, own);
        if (++round == 2 && r == 2) {
          const auto first = nlohmann::json::parse(texts[0]);
          {
            const std::lock_guard lock(mutex);
            token = first["token"];
          }
          port = first["port"];
          // The port is open until all have connected.
          while (!may_go_on) std::this_thread::sleep_for(milliseconds(5));
        }
        return texts;
      };
      Control control(r, kSize, hosts(kSize), exchange, kQuick);
      std::this_thread::sleep_for(3 * kBeat);
      failures += control.failed();
    });
  }
  while (port == 0) std::this_thread::sleep_for(milliseconds(5));
  {
    const std::lock_guard lock(mutex);
    const std::vector<std::string> refused{
        "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        std::string(100'000, '\xff'),
        std::string(8, '\0'),
        std::string("\x81\0\0\0", 4),  // a byte longer than a greeting may be
        encode({.kind = Kind::hello, .token = std::string(token.size(), '0'), .rank = 2}),
        encode({.kind = Kind::hello, .token = "", .rank = 2}),
        encode({.kind = Kind::hello, .token = token, .rank = 0}),
        encode({.kind = Kind::hello, .token = token, .rank = kSize}),
        encode({.kind = Kind::failure, .failure = {.rank = 1, .text = "not true"}}),
    };
    for (std::size_t i = 0; i < refused.size(); ++i) {
      const Stranger stranger(port);
      ASSERT_TRUE(stranger.connected);
      stranger.send(refused[i]);
      EXPECT_TRUE(stranger.is_hung_up_on()) << i;
    }
    // More of them than are kept, who say nothing.
    std::vector<std::unique_ptr<Stranger>> silent;
    for (int i = 0; i < 100; ++i) silent.push_back(std::make_unique<Stranger>(port));
    EXPECT_TRUE(silent.back()->is_hung_up_on());
  }
  may_go_on = true;
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(failures, 0);
  EXPECT_FALSE(Stranger(port).connected);
}

}  // namespace
}  // namespace halfstep::dist
