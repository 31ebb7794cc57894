// SPDX-License-Identifier: Apache-2.0
// The simulated accelerator's collectives through its table alone: ranks are threads, or processes that are killed.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <limits>
#include <thread>

#include "tests/runtime/sim_table.h"

namespace halfstep::test {
namespace {

using Clock = std::chrono::steady_clock;

class SimCollectives : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(order("clear;restore")); }
  void TearDown() override { ASSERT_TRUE(order("clear;restore")); }
};

struct Id {
  char data[HALFSTEP_GROUP_ID_BYTES];
  uint64_t bytes = 0;
  Id() { EXPECT_EQ(sim().group_id(data, sizeof data, &bytes), HALFSTEP_OK) << last_error().text; }
};

/// A rank in a thread or process: its group and queue.
struct Rank {
  Rank(const Id& id, int ranks, int rank) : ranks(ranks), rank(rank), queue(rank % 2) {
    EXPECT_EQ(sim().group_create(rank % 2, ranks, rank, id.data, id.bytes, &group), HALFSTEP_OK) << last_error().text;
  }
  ~Rank() {
    if (group != nullptr) {
      EXPECT_EQ(sim().group_destroy(group), HALFSTEP_OK);
    }
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;
  void* at(const DeviceTensor& t, int64_t elements = 0) const {
    return static_cast<float*>(t.memory->data()) + elements;
  }
  /// Waits for the queue, and returns what the group says.
  std::string outcome() const {
    EXPECT_EQ(sim().queue_synchronize(queue.get()), HALFSTEP_OK) << last_error().text;
    return sim().group_error(group) == HALFSTEP_OK ? "" : last_error().text;
  }
  const int ranks, rank;
  SimQueue queue;
  halfstep_group* group = nullptr;
};

void with_ranks(int ranks, const std::function<void(Rank&)>& body) {
  const Id id;
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      Rank rank(id, ranks, r);
      if (rank.group != nullptr) body(rank);
    });
  }
  for (std::thread& t : threads) t.join();
}

std::vector<float> numbers(int rank, int64_t n) {
  std::vector<float> values;
  for (int64_t i = 0; i < n; ++i) values.push_back(static_cast<float>((i * 37 + rank * 101) % 1000) * 0.37f - 100);
  return values;
}

// 300,000 floats are more than a ring between two ranks holds.
TEST_F(SimCollectives, MoveAndReduceValuesOfAllRanks) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const int64_t n : {int64_t{1}, int64_t{7}, int64_t{300000}}) {
      with_ranks(ranks, [&](Rank& r) {
        const int64_t all = n * ranks;
        const DeviceTensor own = r.queue.tensor(numbers(r.rank, n)), whole = r.queue.tensor(numbers(r.rank, all));
        const DeviceTensor sum = r.queue.empty({n}), mean = r.queue.empty({n}), gathered = r.queue.empty({all}),
                           part = r.queue.empty({n}), swapped = r.queue.empty({all}),
                           root = r.queue.tensor(numbers(r.rank, n));
        const auto f32 = HALFSTEP_F32;
        halfstep_queue* q = r.queue.get();
        ASSERT_EQ(sim().all_reduce(r.group, q, r.at(own), r.at(sum), n, f32, HALFSTEP_REDUCE_SUM), HALFSTEP_OK);
        ASSERT_EQ(sim().all_reduce(r.group, q, r.at(own), r.at(mean), n, f32, HALFSTEP_REDUCE_MEAN), HALFSTEP_OK);
        ASSERT_EQ(sim().all_gather(r.group, q, r.at(own), r.at(gathered), n, f32), HALFSTEP_OK);
        ASSERT_EQ(sim().reduce_scatter(r.group, q, r.at(whole), r.at(part), n, f32, HALFSTEP_REDUCE_MAX), HALFSTEP_OK);
        ASSERT_EQ(sim().all_to_all(r.group, q, r.at(whole), r.at(swapped), n, f32), HALFSTEP_OK);
        ASSERT_EQ(sim().broadcast(r.group, q, r.at(root), n, f32, ranks - 1), HALFSTEP_OK);
        ASSERT_EQ(r.outcome(), "");
        const auto sums = r.queue.read<float>(sum), means = r.queue.read<float>(mean),
                   gathers = r.queue.read<float>(gathered), parts = r.queue.read<float>(part),
                   swaps = r.queue.read<float>(swapped), roots = r.queue.read<float>(root);
        std::vector<std::vector<float>> small, large;
        for (int k = 0; k < ranks; ++k) {
          small.push_back(numbers(k, n));
          large.push_back(numbers(k, all));
        }
        for (int64_t i = 0; i < n; ++i) {
          const auto at = static_cast<std::size_t>(i), mine = static_cast<std::size_t>(r.rank * n + i);
          float expected = small[0][at], largest = large[0][mine];
          for (std::size_t k = 1; k < small.size(); ++k) {
            expected += small[k][at];
            largest = std::max(largest, large[k][mine]);
          }
          ASSERT_EQ(sums[at], expected) << i;
          ASSERT_EQ(means[at], expected / static_cast<float>(ranks)) << i;
          ASSERT_EQ(parts[at], largest) << i;
          ASSERT_EQ(roots[at], small.back()[at]) << i;
          for (std::size_t k = 0; k < small.size(); ++k) {
            const std::size_t there = k * static_cast<std::size_t>(n) + at;
            ASSERT_EQ(gathers[there], small[k][at]) << i;
            ASSERT_EQ(swaps[there], large[k][mine]) << i;
          }
        }
      });
    }
  }
}

TEST_F(SimCollectives, SendsAndReceivesBeginTogether) {
  with_ranks(3, [](Rank& r) {
    const int64_t n = 200000;  // more than a ring holds: one after the other they would wait for each other
    const int next = (r.rank + 1) % 3, last = (r.rank + 2) % 3;
    const DeviceTensor own = r.queue.tensor(numbers(r.rank, n)), got = r.queue.empty({n}), small = r.queue.empty({1});
    const halfstep_transfer transfers[] = {{r.at(own), n, HALFSTEP_F32, next, 0, 0},
                                           {r.at(own), 1, HALFSTEP_F32, next, 0, 0},
                                           {r.at(got), n, HALFSTEP_F32, last, 1, 0},
                                           {r.at(small), 1, HALFSTEP_F32, last, 1, 0}};
    ASSERT_EQ(sim().send_receive(r.group, r.queue.get(), transfers, 4), HALFSTEP_OK);
    ASSERT_EQ(r.outcome(), "");
    EXPECT_EQ(r.queue.read<float>(got), numbers(last, n));
    EXPECT_EQ(r.queue.read<float>(small)[0], numbers(last, 1)[0]);
    const halfstep_transfer itself = {r.at(own), 1, HALFSTEP_F32, r.rank, 0, 0};
    EXPECT_EQ(sim().send_receive(r.group, r.queue.get(), &itself, 1), HALFSTEP_FAILED);
  });
}

TEST_F(SimCollectives, CallsThatMakeNoSenseAreRefused) {
  const Id id;
  char small[4];
  uint64_t bytes = 9;
  EXPECT_EQ(sim().group_id(small, sizeof small, &bytes), HALFSTEP_FAILED);
  EXPECT_EQ(bytes, 0U);
  halfstep_group* group = nullptr;
  EXPECT_EQ(sim().group_create(0, 1, 0, id.data, 5, &group), HALFSTEP_FAILED);
  EXPECT_EQ(sim().group_create(0, 1, 1, id.data, id.bytes, &group), HALFSTEP_FAILED);
  EXPECT_EQ(sim().group_create(7, 1, 0, id.data, id.bytes, &group), HALFSTEP_FAILED);
  Rank r(id, 1, 0);
  EXPECT_EQ(sim().group_create(0, 1, 0, id.data, id.bytes, &group), HALFSTEP_FAILED);  // once is enough
  const DeviceTensor t = r.queue.tensor(numbers(0, 8));
  const auto reduce = [&](int32_t dtype, int32_t how, int64_t n = 8) {
    return sim().all_reduce(r.group, r.queue.get(), r.at(t), r.at(t), n, dtype, how);
  };
  EXPECT_EQ(reduce(HALFSTEP_F32, 5), HALFSTEP_FAILED);
  EXPECT_EQ(reduce(HALFSTEP_BOOL, HALFSTEP_REDUCE_SUM), HALFSTEP_UNSUPPORTED);
  EXPECT_EQ(reduce(HALFSTEP_I32, HALFSTEP_REDUCE_MEAN), HALFSTEP_UNSUPPORTED);
  EXPECT_EQ(reduce(HALFSTEP_F32, HALFSTEP_REDUCE_SUM, 1000), HALFSTEP_FAILED);  // beyond its memory
  EXPECT_EQ(sim().broadcast(r.group, r.queue.get(), r.at(t), 8, HALFSTEP_F32, 1), HALFSTEP_FAILED);
  EXPECT_EQ(reduce(HALFSTEP_F32, HALFSTEP_REDUCE_SUM), HALFSTEP_OK);
  EXPECT_EQ(r.outcome(), "");
}

TEST_F(SimCollectives, RanksThatDoSomethingElseAreNoticed) {
  with_ranks(2, [](Rank& r) {
    const DeviceTensor t = r.queue.tensor(numbers(r.rank, 8)), all = r.queue.empty({16});
    ASSERT_EQ(sim().all_gather(r.group, r.queue.get(), r.at(t), r.at(all), r.rank == 0 ? 8 : 4, HALFSTEP_F32),
              HALFSTEP_OK);
    EXPECT_EQ(r.outcome(), r.rank == 0 ? "rank 1 sent 16 bytes in call 1 of the group, expected 32 in call 1"
                                       : "rank 0 sent 32 bytes in call 1 of the group, expected 16 in call 1");
  });
}

TEST_F(SimCollectives, AnAbortEndsWhatWaits) {
  with_ranks(2, [](Rank& r) {
    const DeviceTensor t = r.queue.tensor(numbers(r.rank, 8));
    const auto begin = Clock::now();
    if (r.rank == 0) {  // the other one never calls it
      EXPECT_EQ(sim().broadcast(r.group, r.queue.get(), r.at(t), 8, HALFSTEP_F32, 1), HALFSTEP_OK);
      EXPECT_EQ(r.outcome(), "rank 1 has given up");
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      EXPECT_EQ(sim().group_error(r.group), HALFSTEP_OK);
      EXPECT_EQ(sim().group_abort(r.group), HALFSTEP_OK);
      EXPECT_EQ(sim().broadcast(r.group, r.queue.get(), r.at(t), 8, HALFSTEP_F32, 1), HALFSTEP_FAILED);
      EXPECT_STREQ(last_error().text, "the group was aborted");
    }
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(5));
  });
  // One that waits itself.
  with_ranks(2, [](Rank& r) {
    if (r.rank == 1) return;
    const DeviceTensor t = r.queue.tensor(numbers(r.rank, 8));
    ASSERT_EQ(sim().broadcast(r.group, r.queue.get(), r.at(t), 8, HALFSTEP_F32, 1), HALFSTEP_OK);
    EXPECT_EQ(r.outcome(), "rank 1 has left the group");
  });
}

TEST_F(SimCollectives, ALostDeviceAndOrderedFaultsEndThemToo) {
  ASSERT_TRUE(order("refuse:broadcast:1;corrupt:all_gather:1"));
  with_ranks(1, [](Rank& r) {
    const DeviceTensor t = r.queue.tensor(numbers(0, 8)), all = r.queue.empty({8});
    EXPECT_EQ(sim().broadcast(r.group, r.queue.get(), r.at(t), 8, HALFSTEP_F32, 0), HALFSTEP_FAILED);
    EXPECT_STREQ(last_error().text, "refused, as ordered");
    EXPECT_EQ(sim().all_gather(r.group, r.queue.get(), r.at(t), r.at(all), 8, HALFSTEP_F32), HALFSTEP_OK);
    EXPECT_EQ(r.outcome(), "");
    auto expected = numbers(0, 8);
    expected[0] *= 1.5f;
    EXPECT_EQ(r.queue.read<float>(all), expected);
    ASSERT_TRUE(order("lost:1"));
    EXPECT_EQ(sim().broadcast(r.group, r.queue.get(), r.at(t), 8, HALFSTEP_F32, 0), HALFSTEP_LOST);
    EXPECT_EQ(sim().group_error(r.group), HALFSTEP_LOST);
    ASSERT_TRUE(order("restore"));
  });
}

// A process that is killed in the middle of its work: the system takes its lock back, and nothing of the group stays.
TEST_F(SimCollectives, AKilledProcessIsNoticedAtOnce) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a child of a process with threads starts none under this sanitizer";
#endif
  for (const bool early : {true, false}) {
    const Id id;
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      {
        Rank r(id, 2, 1);
        const DeviceTensor t = r.queue.tensor(numbers(1, 8)), all = r.queue.empty({16});
        if (early) raise(SIGKILL);
        sim().all_gather(r.group, r.queue.get(), r.at(t), r.at(all), 8, HALFSTEP_F32);
        r.outcome();
        raise(SIGKILL);
      }
      _exit(1);
    }
    Rank r(id, 2, 0);
    const DeviceTensor t = r.queue.tensor(numbers(0, 8)), all = r.queue.empty({16});
    if (!early) {
      ASSERT_EQ(sim().all_gather(r.group, r.queue.get(), r.at(t), r.at(all), 8, HALFSTEP_F32), HALFSTEP_OK);
      ASSERT_EQ(r.outcome(), "");
      EXPECT_EQ(r.queue.read<float>(all)[8], numbers(1, 8)[0]);
    }
    const auto begin = Clock::now();
    ASSERT_EQ(sim().all_gather(r.group, r.queue.get(), r.at(t), r.at(all), 8, HALFSTEP_F32), HALFSTEP_OK);
    // Nobody has waited for the child yet: it is a zombie, which has a number but no files.
    EXPECT_EQ(r.outcome(), "rank 1 is gone");
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(5));
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status));
  }
}

}  // namespace
}  // namespace halfstep::test
