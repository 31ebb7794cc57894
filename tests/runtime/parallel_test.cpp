// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "halfstep/core/error.h"

namespace halfstep {
namespace {

/// Sets the number of threads for one test.
class Threads {
 public:
  explicit Threads(int n) : before_(num_threads()) { set_num_threads(n); }
  ~Threads() { set_num_threads(before_); }

 private:
  int before_;
};

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

TEST(Parallel, CoversEachItemOnce) {
  for (int threads : {1, 2, 3, 7}) {
    const Threads set(threads);
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
  const Threads set(3);
  EXPECT_EQ(ranges_of(10, 1), (Ranges{{0, 4}, {4, 7}, {7, 10}}));
  EXPECT_EQ(ranges_of(10, 4), (Ranges{{0, 5}, {5, 10}}));
  EXPECT_EQ(ranges_of(10, 6), (Ranges{{0, 10}}));
}

TEST(Parallel, SmallWorkStaysOnTheCallingThread) {
  const Threads set(4);
  const auto self = std::this_thread::get_id();
  parallel_for(100, 1000, [&](std::int64_t begin, std::int64_t end) {
    EXPECT_EQ(std::this_thread::get_id(), self);
    EXPECT_EQ(end - begin, 100);
    EXPECT_FALSE(in_parallel_region());
  });
}

TEST(Parallel, NestedCallsRunSerially) {
  const Threads set(2);
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
  const Threads set(4);
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
  const Threads set(2);
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

TEST(Parallel, RefusesNoThreads) {
  EXPECT_THROW(set_num_threads(0), Error);
  EXPECT_GE(num_threads(), 1);
}

}  // namespace
}  // namespace halfstep
