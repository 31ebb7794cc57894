// SPDX-License-Identifier: Apache-2.0
// This process is what is looked at, by the thread of the test: what its other threads wait for.
#include "halfstep/dist/thread_watch_internal.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace halfstep::dist::detail {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kLongEnough{30'000};

// What several looks in a row say, once they all say the same: a thread may have to come to its wait first.
std::string steady(ThreadWatch& watch, int looks = 5, milliseconds between = milliseconds(20)) {
  const auto end = Clock::now() + kLongEnough;
  std::string last;
  for (int same = 0; same < looks && Clock::now() < end;) {
    std::this_thread::sleep_for(between);
    const std::string now = watch.look();
    same = now == last ? same + 1 : 1;
    last = now;
  }
  return last;
}

class ThreadWatchTest : public testing::Test {
 protected:
  void SetUp() override {
#if !defined(__linux__)
    GTEST_SKIP() << "only Linux tells what threads wait for";
#endif
#if defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "the thread sanitizer has a thread of its own, which wakes by itself";
#endif
    if (::access("/proc/self/syscall", R_OK) != 0) GTEST_SKIP() << "this kernel doesn't tell what threads wait for";
  }
};

// A thread that waits, and how it is let go.
class Waiter {
 public:
  Waiter(const std::function<void()>& wait, std::function<void()> let_go)
      : let_go_(std::move(let_go)), thread_([wait] { wait(); }) {}
  ~Waiter() {
    let_go_();
    thread_.join();
  }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

 private:
  std::function<void()> let_go_;
  std::thread thread_;
};

struct Pair {
  explicit Pair(bool socket) { made = (socket ? ::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) : ::pipe(ends)) == 0; }
  ~Pair() {
    ::close(ends[0]);
    ::close(ends[1]);
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;
  void read() const {
    char byte = 0;
    (void)!::read(ends[0], &byte, 1);
  }
  void write() const { (void)!::write(ends[1], "x", 1); }
  int ends[2] = {-1, -1};
  bool made = false;
};

class Gate {
 public:
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return open_; });
  }
  void wait_for(milliseconds time) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, time, [&] { return open_; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  std::mutex& mutex() { return mutex_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

TEST_F(ThreadWatchTest, AWaitForALockAConditionOrAPipeHangs) {
  ThreadWatch watch;
  Gate gate;
  const Pair pipe(false);
  ASSERT_TRUE(pipe.made);
  {
    const Waiter waiter([&] { gate.wait(); }, [&] { gate.open(); });
    EXPECT_EQ(steady(watch), "all its threads wait for locks or each other");
    EXPECT_NE(watch.look(), "");
  }
  {
    std::mutex mutex;
    mutex.lock();
    const Waiter waiter([&] { const std::lock_guard lock(mutex); }, [&] { mutex.unlock(); });
    EXPECT_EQ(steady(watch), "all its threads wait for locks or each other");
  }
  {
    const Waiter waiter([&] { pipe.read(); }, [&] { pipe.write(); });
    EXPECT_EQ(steady(watch).rfind("a thread of it waits for somebody to write to pipe:[", 0), 0u) << watch.look();
  }
}

TEST_F(ThreadWatchTest, AThreadThatRunsNowAndThenDoesNot) {
  ThreadWatch watch;
  std::atomic<bool> over{false};
  const auto runs = [&](const std::function<void()>& pause) {
    over = false;
    const Waiter waiter(
        [&] {
          while (!over) pause();
        },
        [&] { over = true; });
    // Longer between looks than the thread ever pauses.
    return steady(watch, 4, milliseconds(250));
  };
  EXPECT_EQ(runs([] {}), "");
  EXPECT_EQ(runs([] { std::this_thread::sleep_for(milliseconds(1)); }), "");
  EXPECT_EQ(runs([] { std::this_thread::sleep_for(milliseconds(50)); }), "");
  Gate gate;
  EXPECT_EQ(runs([&] { gate.wait_for(milliseconds(50)); }), "");
}

TEST_F(ThreadWatchTest, AWaitThatEndsByItselfOrFromOutsideDoesNot) {
  ThreadWatch watch;
  Gate gate, other;
  const Pair socket(true), pipe(false);
  ASSERT_TRUE(socket.made && pipe.made);
  {
    const Waiter waiter([&] { gate.wait_for(kLongEnough); }, [&] { gate.open(); });
    EXPECT_EQ(steady(watch), "");
  }
  {
    const Waiter waiter([&] { socket.read(); }, [&] { socket.write(); });
    EXPECT_EQ(steady(watch), "");
  }
  {
    pollfd on{.fd = socket.ends[0], .events = POLLIN, .revents = 0};
    const Waiter waiter([&] { ::poll(&on, 1, -1); }, [&] { socket.write(); });
    EXPECT_EQ(steady(watch), "");
  }
  {  // beside one that hangs
    const Waiter hangs([&] { other.wait(); }, [&] { other.open(); });
    const Waiter waiter([] { std::this_thread::sleep_for(milliseconds(1000)); }, [] {});
    std::this_thread::sleep_for(milliseconds(100));
    watch.look();
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT_EQ(watch.look(), "");
  }
  {  // the other end may be a program that this one has started
    const pid_t child = ::fork();
    if (child == 0) {
      for (;;) ::pause();
    }
    const Waiter waiter([&] { pipe.read(); },
                        [&] {
                          pipe.write();
                          ::kill(child, SIGKILL);
                          ::waitpid(child, nullptr, 0);
                        });
    EXPECT_EQ(steady(watch), "");
  }
}

// Nobody polls once an hour.
TEST_F(ThreadWatchTest, AWaitOfAnHourHangs) {
  ThreadWatch watch;
  Gate gate;
  const Waiter waiter([&] { gate.wait_for(std::chrono::hours(1)); }, [&] { gate.open(); });
  EXPECT_EQ(steady(watch), "all its threads wait for locks or each other");
}

// Those of MPI wake by themselves, all the time, where the rank hangs.
TEST_F(ThreadWatchTest, ThreadsThatServeOthersDoNotCount) {
  ThreadWatch watch;
  std::atomic<bool> over{false};
  Gate gate;
  const Waiter hangs([&] { gate.wait(); }, [&] { gate.open(); });
  for (const char* name : {"halfstep_comm", "halfstep_watch", "cuda-EvtHandlr"}) {
    over = false;
    const Waiter waiter(
        [&, name] {
          ::pthread_setname_np(::pthread_self(), name);
          while (!over) std::this_thread::sleep_for(milliseconds(1));
        },
        [&] { over = true; });
    EXPECT_EQ(steady(watch), "all its threads wait for locks or each other") << name;
  }
}

TEST_F(ThreadWatchTest, NorDoThoseThatAreLeftOut) {
  ThreadWatch watch;
  std::atomic<bool> over{false};
  Gate gate;
  std::unique_ptr<Waiter> runs;
  {
    const NotCounted not_counted;
    runs = std::make_unique<Waiter>(
        [&] {
          while (!over) std::this_thread::sleep_for(milliseconds(1));
        },
        [&] { over = true; });
  }
  const Waiter hangs([&] { gate.wait(); }, [&] { gate.open(); });
  EXPECT_EQ(steady(watch), "all its threads wait for locks or each other");
}

TEST(BlockedCall, IsReadFromTheText) {
  BlockedCall call;
  ASSERT_TRUE(parse_blocked_call("202 0x7f5c 0x189 0x0 0x0 0xa 0xffffffffffffffff 0x7ffe 0x7f93\n", call));
  EXPECT_EQ(call.number, 202);
  EXPECT_EQ(call.arguments, (std::array<std::uint64_t, 6>{0x7f5c, 0x189, 0, 0, 10, 0xffffffffffffffff}));
  for (const char* text : {"", "running\n", "-1 0x7ffe 0x7f93\n", "202 0x1 0x2", "0x"}) {
    EXPECT_FALSE(parse_blocked_call(text, call)) << text;
  }
}

}  // namespace
}  // namespace halfstep::dist::detail
