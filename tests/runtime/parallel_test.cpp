// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/parallel.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "halfstep/core/error.h"
#include "halfstep/runtime/processors_internal.h"
#include "halfstep/runtime/thread_pool_internal.h"
#include "tests/support/test_data.h"
#include "tests/support/threads.h"

#ifdef __SANITIZE_THREAD__
#define HALFSTEP_SKIP_FORKS GTEST_SKIP() << "the thread sanitizer doesn't follow threads of a child";
#elif defined(__SANITIZE_ADDRESS__)
// Unlike the C library's, whose locks fork() takes first: a worker that is just starting may hold one of them, and the
// child waits for it for ever.
#define HALFSTEP_SKIP_FORKS GTEST_SKIP() << "the address sanitizer's allocator has locks that fork() doesn't take";
#else
#define HALFSTEP_SKIP_FORKS
#endif

namespace halfstep {
namespace {

using Ranges = std::set<std::pair<std::int64_t, std::int64_t>>;

Ranges ranges_of(std::int64_t n, std::int64_t grain) {
  Ranges ranges;
  std::mutex mutex;
  parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
    const std::lock_guard lock(mutex);
    ranges.emplace(begin, end);
  });
  return ranges;
}

// Each job once, and no worker in two places at once.
TEST(Parallel, JobsHaveAWorkerEach) {
  for (const int threads : {1, 2, 3, 9}) {
    const test::ThreadsGuard guard(threads);
    for (const std::int64_t jobs : {0, 1, 2, 5, 16, 100}) {
      EXPECT_EQ(num_workers(jobs), std::clamp<std::int64_t>(jobs, 1, threads));
      for (const std::int64_t most : {std::int64_t{2}, num_workers(jobs)}) {
        std::vector<std::atomic<int>> done(static_cast<std::size_t>(jobs));
        std::vector<std::atomic<int>> busy(static_cast<std::size_t>(std::min(most, num_workers(jobs))));
        parallel_jobs(jobs, most, [&](std::int64_t job, std::int64_t worker) {
          EXPECT_EQ(busy.at(static_cast<std::size_t>(worker))++, 0);
          ++done.at(static_cast<std::size_t>(job));
          --busy.at(static_cast<std::size_t>(worker));
        });
        for (const auto& count : done) EXPECT_EQ(count.load(), 1);
      }
    }
  }
}

// The caller's first job takes until all others are done: its other jobs are taken by the second worker, last one
// first.
TEST(Parallel, JobsOfASlowWorkerAreTaken) {
  constexpr std::int64_t kJobs = 10;
  const test::ThreadsGuard guard(2);
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  std::atomic<std::int64_t> others{0};
  std::vector<std::int64_t> second;
  parallel_jobs(kJobs, [&](std::int64_t job, std::int64_t worker) {
    if (job == 0) {
      while (others < kJobs - 1 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
      return;
    }
    if (worker == 1) second.push_back(job);
    ++others;
  });
  EXPECT_EQ(others, kJobs - 1);
  EXPECT_EQ(second, (std::vector<std::int64_t>{5, 6, 7, 8, 9, 4, 3, 2, 1}));
}

// All jobs are done before, and of several exceptions the lowest job's comes, whoever threw first.
TEST(Parallel, JobsThrowTheLowestOnesException) {
  const test::ThreadsGuard guard(3);
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> done{0};
    try {
      parallel_jobs(30, [&](std::int64_t job, std::int64_t) {
        ++done;
        if (job % 7 == 3) throw std::runtime_error(std::to_string(job));
      });
      FAIL() << "nothing was thrown";
    } catch (const std::runtime_error& e) {
      EXPECT_STREQ(e.what(), "3");
    }
    EXPECT_EQ(done, 30);
  }
}

TEST(Parallel, CoversEachItemOnce) {
  for (int threads : {1, 2, 3, 7}) {
    const test::ThreadsGuard set(threads);
    for (std::int64_t n : {1, 2, 5, 64, 1000}) {
      std::vector<std::atomic<int>> seen(static_cast<std::size_t>(n));
      parallel_for(n, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
      });
      for (const auto& count : seen) EXPECT_EQ(count.load(), 1);
    }
  }
}

TEST(Parallel, NothingToDoCallsNothing) {
  parallel_for(0, 1, [](std::int64_t, std::int64_t) { FAIL(); });
  parallel_for(-3, 1, [](std::int64_t, std::int64_t) { FAIL(); });
}

TEST(Parallel, RangesAreTheSameEveryTime) {
  const test::ThreadsGuard set(3);
  EXPECT_EQ(ranges_of(10, 3), (Ranges{{0, 4}, {4, 7}, {7, 10}}));
  EXPECT_EQ(ranges_of(10, 4), (Ranges{{0, 5}, {5, 10}}));
  EXPECT_EQ(ranges_of(10, 6), (Ranges{{0, 10}}));
  // Up to four a thread, of at least a grain.
  EXPECT_EQ(ranges_of(10, 2), (Ranges{{0, 2}, {2, 4}, {4, 6}, {6, 8}, {8, 10}}));
  EXPECT_EQ(ranges_of(120, 1).size(), 12u);
  EXPECT_TRUE(ranges_of(120, 1).contains({50, 60}));
}

// Of two threads one is busy with its first range until all others are done: the other one runs its own in order, then
// takes the rest from the other end.
TEST(Parallel, RangesOfASlowThreadAreTaken) {
  const test::ThreadsGuard set(2);
  for (const bool descending : {false, true}) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    std::atomic<std::int64_t> others{0};
    std::vector<std::int64_t> order;
    const auto body = [&](std::int64_t begin, std::int64_t) {
      if (begin == (descending ? 3 : 0)) {
        while (others < 7 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
        return;
      }
      order.push_back(begin);
      ++others;
    };
    if (descending) {
      parallel_for_descending(8, 1, body);
    } else {
      parallel_for(8, 1, body);
    }
    EXPECT_EQ(others, 7);
    EXPECT_EQ(order, descending ? (std::vector<std::int64_t>{7, 6, 5, 4, 0, 1, 2})
                                : (std::vector<std::int64_t>{4, 5, 6, 7, 3, 2, 1}));
  }
}

TEST(Parallel, SmallWorkStaysOnTheCallingThread) {
  const test::ThreadsGuard set(4);
  const auto self = std::this_thread::get_id();
  parallel_for(100, 1000, [&](std::int64_t begin, std::int64_t end) {
    EXPECT_EQ(std::this_thread::get_id(), self);
    EXPECT_EQ(end - begin, 100);
    EXPECT_FALSE(in_parallel_region());
  });
}

TEST(Parallel, NestedCallsRunSerially) {
  const test::ThreadsGuard set(2);
  std::atomic<int> inner{0};
  parallel_for(2, 1, [&](std::int64_t, std::int64_t) {
    EXPECT_TRUE(in_parallel_region());
    const auto self = std::this_thread::get_id();
    parallel_for(50, 1, [&](std::int64_t begin, std::int64_t end) {
      EXPECT_EQ(std::this_thread::get_id(), self);
      EXPECT_EQ(end - begin, 50);
      ++inner;
    });
  });
  EXPECT_EQ(inner.load(), 2);
  EXPECT_FALSE(in_parallel_region());
}

TEST(Parallel, ThrowsTheExceptionOfTheLowestRangeWhenAllAreDone) {
  const test::ThreadsGuard set(4);
  for (int attempt = 0; attempt < 20; ++attempt) {
    std::atomic<int> done{0};
    try {
      parallel_for(4, 1, [&](std::int64_t begin, std::int64_t) {
        ++done;
        if (begin >= 1) throw std::runtime_error(std::to_string(begin));
      });
      FAIL() << "expected an exception";
    } catch (const std::runtime_error& e) {
      EXPECT_STREQ(e.what(), "1");
    }
    EXPECT_EQ(done.load(), 4);
    EXPECT_FALSE(in_parallel_region());
  }
}

TEST(Parallel, CallsFromSeveralThreadsDoNotMeet) {
  const test::ThreadsGuard set(2);
  std::vector<std::int64_t> sums(4, 0);
  {
    std::vector<std::jthread> callers;
    for (std::int64_t& sum : sums) {
      callers.emplace_back([&sum] {
        for (int repeat = 0; repeat < 50; ++repeat) {
          std::atomic<std::int64_t> total{0};
          parallel_for(100, 1, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) total += i;
          });
          sum += total;
        }
      });
    }
  }
  for (const std::int64_t sum : sums) EXPECT_EQ(sum, 50 * 4950);
}

TEST(Parallel, RefusesNoThreadsAndTooMany) {
  const int before = num_threads();
  EXPECT_THROW(set_num_threads(0), Error);
  EXPECT_THROW(set_num_threads(100'000), Error);
  EXPECT_EQ(num_threads(), before);
}

TEST(Parallel, MoreThreadsThanProcessorsDoTheSame) {
  const test::ThreadsGuard set(64);
  std::vector<std::atomic<int>> seen(1000);
  for (int repeat = 0; repeat < 20; ++repeat) {
    parallel_for(1000, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
    });
  }
  for (const auto& count : seen) EXPECT_EQ(count.load(), 20);
}

// What a call promises when the system lets no worker run: the caller does everything. A process that may make no
// thread is such a machine.
TEST(Parallel, NeedsNoWorker) {
  HALFSTEP_SKIP_FORKS
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const rlimit none = {0, 0};
    if (setrlimit(RLIMIT_NPROC, &none) != 0 || (getuid() == 0 && setuid(65534) != 0)) _exit(2);  // root has no limit
    set_num_threads(4);
    std::atomic<int> sum{0};
    parallel_for(100, 1, [&](std::int64_t begin, std::int64_t end) { sum += static_cast<int>(end - begin); });
    _exit(sum == 100 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(Parallel, AChildOfForkHasAPoolOfItsOwn) {
  HALFSTEP_SKIP_FORKS
  const test::ThreadsGuard set(3);
  const auto sum = [] {
    std::atomic<std::int64_t> total{0};
    parallel_for(999, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) total += i;
    });
    return total.load();
  };
  EXPECT_EQ(sum(), 999 * 998 / 2);  // the workers are there
  for (int depth = 0; depth < 3; ++depth) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(60);  // a hang ends as a failure
      bool right = true;
      for (int repeat = 0; repeat < 100; ++repeat) right = right && sum() == 999 * 998 / 2;
      const pid_t grandchild = fork();
      if (grandchild == 0) {
        alarm(60);
        _exit(sum() == 999 * 998 / 2 ? 0 : 1);
      }
      int status = 0;
      right = right && waitpid(grandchild, &status, 0) == grandchild && status == 0;
      _exit(right ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    EXPECT_EQ(sum(), 999 * 998 / 2);
  }
}

// Nobody waits for a range that nobody has begun: with a worker busy elsewhere for ever, calls still end.
TEST(Parallel, ACallDoesNotWaitForABusyWorker) {
  const test::ThreadsGuard set(2);
  std::atomic<bool> leave{false}, taken{false};
  std::jthread other([&] {
    parallel_for(2, 1, [&](std::int64_t, std::int64_t) {
      taken = true;
      while (!leave) std::this_thread::yield();
    });
  });
  while (!taken) std::this_thread::yield();
  for (int repeat = 0; repeat < 100; ++repeat) {
    std::atomic<int> items{0};
    parallel_for(10, 1, [&](std::int64_t begin, std::int64_t end) { items += static_cast<int>(end - begin); });
    ASSERT_EQ(items.load(), 10);
  }
  leave = true;
}

// A worker rests when others want its processor: it helps with calls that take long, and with no others.
TEST(Parallel, RestingWorkersHelpWithLongCallsOnly) {
  using namespace std::chrono;
  if (detail::processors() < 2) GTEST_SKIP() << "workers don't spin on one processor, and so never rest";
  const test::ThreadsGuard set(2);
  const auto caller = std::this_thread::get_id();
  const auto jobs_elsewhere = [&](std::int64_t jobs, microseconds each) {
    std::atomic<int> elsewhere{0};
    parallel_jobs(jobs, 2, [&](std::int64_t, std::int64_t) {
      if (std::this_thread::get_id() != caller) ++elsewhere;
      const auto end = steady_clock::now() + each;
      while (steady_clock::now() < end) {
      }
    });
    return elsewhere.load();
  };
  const auto rested = [] { return detail::pool_resting() == 1; };
  bool alone = false, shared = false;
  const auto until = steady_clock::now() + 30s;
  while (!(alone && shared) && steady_clock::now() < until) {
    detail::pool_ask_for_rest();
    for (int i = 0; i < 100 && !rested(); ++i) jobs_elsewhere(8, 100us);
    if (!rested()) continue;
    const auto begin = steady_clock::now();
    const int of_short = jobs_elsewhere(8, 5us);
    // Unless this thread was put aside meanwhile: the call was long then.
    if (steady_clock::now() - begin < 200us && rested()) {
      EXPECT_EQ(of_short, 0);
      alone = true;
    }
    if (rested()) shared = jobs_elsewhere(16, 1ms) > 0 || shared;
  }
  EXPECT_TRUE(alone);
  EXPECT_TRUE(shared);
}

// A thread that checks every 5 ms, beside a program with time slices of `slice` ms, one after each `every` ms.
int contended_checks(int slice, int every, int checks) {
  detail::Contention contention;
  constexpr std::int64_t kMs = 1'000'000;
  std::int64_t now = 0, ran = 0, delayed = 0;
  int found = 0;
  for (std::int64_t ms = 0, next = 0; checks > 0; ++ms) {
    now = ms * kMs;
    (ms % every < slice ? delayed : ran) += kMs;
    // The check waits until the thread runs.
    if (ms < next || ms % every < slice) continue;
    next = ms + 5;
    --checks;
    found += contention.check(now, ran, delayed) ? 1 : 0;
  }
  return found;
}

TEST(Parallel, ContentionIsWhatGoesOn) {
  EXPECT_GT(contended_checks(3, 6, 100), 50);    // slices of EEVDF
  EXPECT_GT(contended_checks(12, 24, 100), 25);  // slices of CFS on many processors
  EXPECT_EQ(contended_checks(2, 200, 1000), 0);  // a daemon
  EXPECT_EQ(contended_checks(0, 100, 1000), 0);
  constexpr std::int64_t kMs = 1'000'000;
  detail::Contention contention;
  EXPECT_FALSE(contention.check(0, 0, 50 * kMs)) << "what was before isn't known";
  EXPECT_FALSE(contention.check(5 * kMs, 3 * kMs, 52 * kMs)) << "once";
  EXPECT_FALSE(contention.check(100 * kMs, 90 * kMs, 52 * kMs));
  EXPECT_FALSE(contention.check(105 * kMs, 93 * kMs, 54 * kMs)) << "long after";
  EXPECT_FALSE(contention.check(110 * kMs, 98 * kMs, 54 * kMs));
  EXPECT_TRUE(contention.check(115 * kMs, 101 * kMs, 56 * kMs)) << "twice in 10 ms";
  EXPECT_FALSE(contention.check(120 * kMs, 106 * kMs - 1, 56 * kMs + 400'000)) << "short";
  contention.rested(400 * kMs);
  EXPECT_TRUE(contention.check(410 * kMs, 108 * kMs, 60 * kMs)) << "after a rest once is enough";
}

// Signals whose handlers are the program's own reach the program's own threads.
TEST(Parallel, WorkersTakeNoSignals) {
  const test::ThreadsGuard set(2);
  static std::atomic<int> elsewhere{0};
  static pthread_t self;
  self = pthread_self();
  elsewhere = 0;
  struct sigaction action = {}, before = {};
  action.sa_handler = [](int) { elsewhere += pthread_equal(pthread_self(), self) ? 0 : 1; };
  ASSERT_EQ(sigaction(SIGUSR1, &action, &before), 0);
  for (int repeat = 0; repeat < 200; ++repeat) {
    parallel_for(2, 1, [&](std::int64_t, std::int64_t) { kill(getpid(), SIGUSR1); });
  }
  sigaction(SIGUSR1, &before, nullptr);
  EXPECT_EQ(elsewhere.load(), 0);
}

// A fault in a worker is still the program's to report.
TEST(Parallel, FaultsInWorkersReachTheProgramsHandler) {
  HALFSTEP_SKIP_FORKS
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    signal(SIGSEGV, [](int) { _exit(42); });
    set_num_threads(2);
    static const auto caller = std::this_thread::get_id();
    for (;;) {
      parallel_for(2, 1, [](std::int64_t, std::int64_t) {
        if (std::this_thread::get_id() != caller) raise(SIGSEGV);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      });
    }
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 42) << status;
}

// --- Quotas of control groups

class Quota : public testing::Test {
 protected:
  void put(const std::string& file, const std::string& text) const {
    const auto path = root_.path() / file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  double quota(const std::string& groups) const { return detail::processor_quota(groups, root_.path().string()); }

 private:
  test::TemporaryDir root_;
};

TEST_F(Quota, IsTheLeastOfTheGroupAndThoseAbove) {
  EXPECT_EQ(quota("0::/a/b\n"), 0);
  put("a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(quota("0::/a/b\n"), 0);
  put("a/cpu.max", "150000 100000\n");
  EXPECT_EQ(quota("0::/a/b\n"), 1.5);
  put("a/b/cpu.max", "50000 100000\n");
  EXPECT_EQ(quota("0::/a/b\n"), 0.5);
  EXPECT_EQ(quota("0::/a\n"), 1.5);
  EXPECT_EQ(quota("0::/\n"), 0);
}

TEST_F(Quota, OfVersionOneAndOfContainersWhosePathIsTheHosts) {
  put("cpu,cpuacct/x/cpu.cfs_quota_us", "250000\n");
  put("cpu,cpuacct/x/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(quota("5:memory:/x\n4:cpu,cpuacct:/x\n"), 2.5);
  put("cpu/cpu.cfs_quota_us", "-1\n");
  put("cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(quota("1:cpu:/docker/0123\n"), 0);
  put("cpu/cpu.cfs_quota_us", "100000\n");
  EXPECT_EQ(quota("1:cpu:/docker/0123\n"), 1);
}

TEST_F(Quota, OfDamagedTextIsNone) {
  put("cpu.max", "nonsense\n");
  for (const char* text : {"", "\n\n", "0:", "0::", "::::", "1:cpu", "0::no/slash"}) EXPECT_EQ(quota(text), 0) << text;
  put("cpu.max", "100000\n");  // no period
  EXPECT_EQ(quota("0::/\n"), 0);
}

}  // namespace
}  // namespace halfstep
