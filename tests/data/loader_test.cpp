// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/loader.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <thread>

#include "halfstep/core/error.h"
#include "halfstep/runtime/log.h"
#include "tests/data/idx_files.h"

namespace halfstep::data {
namespace {

using test::expect_error;
using Indices = std::vector<std::int64_t>;
using Batches = std::vector<Indices>;

/// What the data set under test saw; shared, since the loader takes the data set by value.
struct Seen {
  std::atomic<int> made{0};
  std::mutex mutex;
  std::set<std::thread::id> threads;
  std::set<std::uint64_t> seeds;
};

/// n samples: the input is the index, the target the epoch.
class Counting final : public Dataset {
 public:
  explicit Counting(std::int64_t n, std::shared_ptr<Seen> seen = std::make_shared<Seen>())
      : n_(n), seen_(std::move(seen)) {}
  std::int64_t size() const override { return n_; }
  Batch batch(const BatchRequest& request) const override {
    const int number = seen_->made++;
    {
      const std::scoped_lock lock(seen_->mutex);
      seen_->threads.insert(std::this_thread::get_id());
      seen_->seeds.insert(request.seed);
    }
    // Batches take unlike times, so that workers finish out of order.
    std::this_thread::sleep_for(std::chrono::microseconds(number % 3 * 100));
    const auto n = static_cast<std::int64_t>(request.indices.size());
    Batch batch{empty({n}, {.dtype = i64}), empty({n}, {.dtype = i64})};
    std::ranges::copy(request.indices, batch.input.data<std::int64_t>());
    std::fill_n(batch.target.data<std::int64_t>(), n, request.epoch);
    for (const std::int64_t index : request.indices) {
      if (index == fails_at) throw std::runtime_error("sample " + std::to_string(index) + " is bad");
    }
    return batch;
  }

  std::int64_t fails_at = -1;

 private:
  std::int64_t n_;
  std::shared_ptr<Seen> seen_;
};

Batches run_epoch(DataLoader& loader) {
  Batches batches;
  for (auto [x, y] : loader) batches.push_back(x.to_vector<std::int64_t>());
  return batches;
}

Indices flat(const Batches& batches) {
  Indices all;
  for (const Indices& batch : batches) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

class LoaderWorkers : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Counts, LoaderWorkers, testing::Values(0, 1, 2, 5), testing::PrintToStringParamName());

TEST_P(LoaderWorkers, GivesAllSamplesInOrder) {
  DataLoader loader{Counting{10}, {.batch_size = 4, .workers = GetParam()}};
  EXPECT_EQ(loader.size(), 3);
  EXPECT_EQ(run_epoch(loader), (Batches{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9}}));
  EXPECT_EQ(run_epoch(loader), (Batches{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9}}));
}

TEST_P(LoaderWorkers, DropsTheSmallerLastBatch) {
  DataLoader loader{Counting{10}, {.batch_size = 4, .drop_last = true, .workers = GetParam()}};
  EXPECT_EQ(loader.size(), 2);
  EXPECT_EQ(run_epoch(loader), (Batches{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  DataLoader none{Counting{3}, {.batch_size = 4, .drop_last = true, .workers = GetParam()}};
  EXPECT_EQ(none.size(), 0);
  EXPECT_TRUE(run_epoch(none).empty());
}

TEST_P(LoaderWorkers, HandlesAnEmptyDataSet) {
  DataLoader loader{Counting{0}, {.batch_size = 4, .shuffle = true, .workers = GetParam()}};
  EXPECT_EQ(loader.size(), 0);
  EXPECT_TRUE(run_epoch(loader).empty());
  EXPECT_EQ(loader.state(), (LoaderState{1, 0}));
}

// The order is the one of shuffled_order, whatever the number of workers.
TEST_P(LoaderWorkers, ShufflesByTheSeed) {
  DataLoader loader{Counting{103},
                    {.batch_size = 10, .shuffle = true, .workers = GetParam(), .prefetch = 2, .seed = 5}};
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) EXPECT_EQ(flat(run_epoch(loader)), shuffled_order(103, 5, epoch));
}

TEST_P(LoaderWorkers, TellsTheDataSetSeedAndEpoch) {
  const auto seen = std::make_shared<Seen>();
  DataLoader loader{Counting{4, seen}, {.batch_size = 2, .workers = GetParam(), .seed = 12}};
  for (std::int64_t epoch = 0; epoch < 2; ++epoch) {
    for (const auto& [x, y] : loader) EXPECT_EQ(y.to_vector<std::int64_t>(), (Indices{epoch, epoch}));
  }
  EXPECT_EQ(seen->seeds, (std::set<std::uint64_t>{12}));
}

// A second program goes on at any place with the same batches, other numbers of workers included.
TEST_P(LoaderWorkers, ResumesAnywhere) {
  const LoaderOptions options{.batch_size = 4, .shuffle = true, .workers = 2, .seed = 9};
  Batches all;
  std::vector<LoaderState> states;
  DataLoader first{Counting{22}, options};
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (auto [x, y] : first) {
      all.push_back(x.to_vector<std::int64_t>());
      states.push_back(first.state());  // as a checkpoint inside the loop would save it, after this batch
    }
  }
  ASSERT_EQ(all.size(), 12U);
  EXPECT_EQ(states[0], (LoaderState{0, 1}));
  EXPECT_EQ(states[5], (LoaderState{0, 6}));
  EXPECT_EQ(states[6], (LoaderState{1, 1}));
  for (std::size_t k = 0; k < all.size(); ++k) {
    LoaderOptions resumed_options = options;
    resumed_options.workers = GetParam();
    DataLoader resumed{Counting{22}, resumed_options};
    resumed.seek(states[k]);
    EXPECT_EQ(resumed.state(), states[k]);
    Batches rest;
    while (resumed.state().epoch < 2) {
      for (const Indices& batch : run_epoch(resumed)) rest.push_back(batch);
    }
    EXPECT_EQ(rest, Batches(all.begin() + static_cast<std::ptrdiff_t>(k) + 1, all.end())) << k;
  }
}

TEST_P(LoaderWorkers, EndsAnEpochThatIsLeftEarly) {
  DataLoader loader{Counting{40}, {.batch_size = 4, .shuffle = true, .workers = GetParam(), .seed = 3}};
  for (auto [x, y] : loader) {
    EXPECT_EQ(x.size(0), 4);
    break;
  }
  EXPECT_EQ(loader.state(), (LoaderState{0, 1}));
  EXPECT_EQ(flat(run_epoch(loader)), shuffled_order(40, 3, 1));
}

// The exception comes with its own type, after the good batches before it, and the loader is of use afterwards.
TEST_P(LoaderWorkers, PassesExceptionsOn) {
  Counting dataset{20};
  dataset.fails_at = 9;
  DataLoader loader{dataset, {.batch_size = 4, .workers = GetParam()}};
  for (int round = 0; round < 2; ++round) {
    int batches = 0;
    expect_error<std::runtime_error>(
        [&] {
          for (auto [x, y] : loader) batches += x.size(0) == 4;
        },
        {"sample 9 is bad"});
    EXPECT_EQ(batches, 2);
  }
  dataset.fails_at = 0;
  DataLoader at_once{dataset, {.batch_size = 4, .workers = GetParam()}};
  expect_error<std::runtime_error>([&] { run_epoch(at_once); }, {"sample 0 is bad"});
}

TEST_P(LoaderWorkers, GoesAwayWithoutALoopOrInTheMiddleOfOne) {
  for (int round = 0; round < 20; ++round) {
    auto loader = std::make_unique<DataLoader>(Counting{1000}, LoaderOptions{.batch_size = 2, .workers = GetParam()});
    auto iterator = loader->begin();
    if (round % 2 == 0) ++iterator;
  }
  const DataLoader unused{Counting{5}, {.workers = GetParam()}};
  EXPECT_EQ(unused.size(), 5);
}

TEST_P(LoaderWorkers, MayGoBeforeItsIterator) {
  auto loader = std::make_unique<DataLoader>(Counting{6}, LoaderOptions{.batch_size = 2, .workers = GetParam()});
  auto iterator = loader->begin();
  loader.reset();
  int batches = 0;
  for (; iterator != std::default_sentinel; ++iterator) ++batches;
  EXPECT_EQ(batches, 3);
}

TEST_P(LoaderWorkers, MovesInTheMiddleOfALoop) {
  DataLoader loader{Counting{8}, {.batch_size = 2, .workers = GetParam()}};
  auto iterator = loader.begin();
  DataLoader moved = std::move(loader);
  ++iterator;
  EXPECT_EQ((*iterator).input.to_vector<std::int64_t>(), (Indices{2, 3}));
  EXPECT_EQ(moved.state(), (LoaderState{0, 2}));
}

TEST(Loader, MakesNoMoreAheadThanAskedFor) {
  const auto seen = std::make_shared<Seen>();
  DataLoader loader{Counting{1000, seen}, {.batch_size = 1, .workers = 2, .prefetch = 3}};
  auto iterator = loader.begin();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  // One was handed out, six may wait.
  EXPECT_LE(seen->made, 7);
  EXPECT_GE(seen->made, 1);
}

TEST(Loader, WithoutWorkersStaysInTheCallersThread) {
  const auto seen = std::make_shared<Seen>();
  DataLoader loader{Counting{10, seen}, {.batch_size = 2, .workers = 0}};
  run_epoch(loader);
  EXPECT_EQ(seen->threads, std::set{std::this_thread::get_id()});
  const auto elsewhere = std::make_shared<Seen>();
  DataLoader threaded{Counting{10, elsewhere}, {.batch_size = 2, .workers = 2}};
  run_epoch(threaded);
  EXPECT_FALSE(elsewhere->threads.contains(std::this_thread::get_id()));
}

TEST(Loader, WithoutAThreadToBeHadMakesItsBatchesItself) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the thread sanitizer doesn't follow threads of a child";
#endif
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const rlimit none = {0, 0};
    if ((getuid() == 0 && setuid(65534) != 0) || setrlimit(RLIMIT_NPROC, &none) != 0) _exit(2);  // root has no limit
    std::vector<std::string> said;
    set_log_sink([&](LogLevel, std::string_view text) { said.emplace_back(text); });
    const auto seen = std::make_shared<Seen>();
    DataLoader loader{Counting{10, seen}, {.batch_size = 2, .shuffle = true, .workers = 3, .seed = 7}};
    DataLoader alone{Counting{10}, {.batch_size = 2, .shuffle = true, .workers = 0, .seed = 7}};
    bool good = true;
    for (int epoch = 0; epoch < 3; ++epoch) good = good && run_epoch(loader) == run_epoch(alone);
    good = good && seen->threads == std::set{std::this_thread::get_id()};
    // Said once, not each epoch.
    good = good && said.size() == 1 && said[0].find("0 of 3 workers could be started") != std::string::npos &&
           said[0].find("the loop makes its batches itself") != std::string::npos;
    _exit(good ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 2) GTEST_SKIP() << "threads can't be forbidden here";
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(Loader, SeeksToTheEndOfAnEpoch) {
  DataLoader loader{Counting{8}, {.batch_size = 4}};
  loader.seek({.epoch = 3, .batch = 2});
  EXPECT_TRUE(run_epoch(loader).empty());
  EXPECT_EQ(loader.state(), (LoaderState{4, 0}));
}

// Parts of a batch, for ranks: one behind the other they are the batch, and every sample comes once.
TEST_P(LoaderWorkers, RanksShareEachBatch) {
  for (const int ranks : {1, 2, 3, 4}) {
    const LoaderOptions options{.batch_size = 7, .shuffle = true, .workers = GetParam(), .seed = 5, .repeat = 2};
    DataLoader whole{Counting{30}, options};
    const Batches all = run_epoch(whole);
    Batches together(all.size());
    for (int rank = 0; rank < ranks; ++rank) {
      LoaderOptions own = options;
      own.rank = rank;
      own.ranks = ranks;
      DataLoader part{Counting{30}, own};
      EXPECT_EQ(part.size(), whole.size());
      std::size_t k = 0;
      for (const Batch& batch : part) {
        const Indices got = batch.input.to_vector<std::int64_t>();
        EXPECT_EQ(batch.all_samples, ranks == 1 ? 0 : static_cast<std::int64_t>(all[k].size()));
        if (batch.stand_in) {
          EXPECT_EQ(got, Indices{all[k][0]}) << "one sample, which counts nothing";
        } else {
          together[k].insert(together[k].end(), got.begin(), got.end());
        }
        ++k;
      }
      EXPECT_EQ(k, all.size());
      EXPECT_EQ(part.state(), (LoaderState{1, 0}));
    }
    EXPECT_EQ(together, all) << ranks;
  }
  expect_error<Error>([] { DataLoader(Counting{1}, {.rank = 2, .ranks = 2}); }, {"rank 2 of 2"});
  expect_error<Error>([] { DataLoader(Counting{1}, {.ranks = 0}); }, {"of 0"});
}

// Samples of each part of the last batch of a pass, 0 where one of another part stands in.
std::vector<std::int64_t> last_parts(std::int64_t samples, std::int64_t batch_size, int ranks, int shards = 0) {
  std::vector<std::int64_t> sizes;
  for (int rank = 0; rank < ranks; ++rank) {
    DataLoader loader{Counting{samples}, {.batch_size = batch_size, .rank = rank, .ranks = ranks, .shards = shards}};
    Batch last;
    for (const Batch& batch : loader) last = batch;
    const std::int64_t own = last.stand_in ? 0 : last.input.numel();
    EXPECT_EQ(std::accumulate(last.shards.begin(), last.shards.end(), std::int64_t{0}), shards > 0 ? own : 0);
    if (shards > 0) {
      sizes.insert(sizes.end(), last.shards.begin(), last.shards.end());
    } else {
      sizes.push_back(own);
    }
  }
  return sizes;
}

// Rank 0, whose buffers are kept, always has samples, and nobody a single one that others could have with theirs.
TEST(Loader, RanksOfASmallBatchHaveSeveralSamplesOrNone) {
  using Sizes = std::vector<std::int64_t>;
  EXPECT_EQ(last_parts(7, 8, 2), (Sizes{4, 3}));
  EXPECT_EQ(last_parts(3, 8, 2), (Sizes{3, 0}));
  EXPECT_EQ(last_parts(1, 8, 2), (Sizes{1, 0}));
  EXPECT_EQ(last_parts(3, 8, 4), (Sizes{3, 0, 0, 0}));
  EXPECT_EQ(last_parts(5, 8, 4), (Sizes{2, 0, 3, 0}));
  EXPECT_EQ(last_parts(7, 8, 4), (Sizes{2, 2, 3, 0}));
  EXPECT_EQ(last_parts(10, 8, 3), (Sizes{2, 0, 0}));
  // Whole batches whose parts are single samples are the user's choice, which the last one follows.
  EXPECT_EQ(last_parts(4, 4, 4), (Sizes{1, 1, 1, 1}));
  EXPECT_EQ(last_parts(3, 4, 4), (Sizes{1, 1, 1, 0}));
  EXPECT_EQ(last_parts(2, 3, 4), (Sizes{1, 0, 1, 0}));
  // Shards are the same on any number of ranks.
  for (const std::int64_t samples : {1, 2, 3, 7, 9, 10, 15, 16, 21, 27}) {
    for (const std::int64_t batch_size : {8, 16, 20}) {
      const Sizes alone = last_parts(samples, batch_size, 1, 8);
      EXPECT_GT(alone[0], 0);
      for (const int ranks : {2, 4, 8}) EXPECT_EQ(last_parts(samples, batch_size, ranks, 8), alone) << samples;
    }
  }
  expect_error<Error>([] { DataLoader(Counting{1}, {.ranks = 3, .shards = 4}); }, {"3 ranks divide, got 4"});
}

TEST(Loader, RefusesBadOptionsAndCalls) {
  expect_error<Error>([] { DataLoader(Counting{1}, {.batch_size = 0}); }, {"batch size", "got 0"});
  expect_error<Error>([] { DataLoader(Counting{1}, {.workers = -1}); }, {"workers", "got -1"});
  expect_error<Error>([] { DataLoader(Counting{1}, {.prefetch = 0}); }, {"prefetch", "got 0"});
  expect_error<Error>([] { DataLoader(std::shared_ptr<const Dataset>{}, {}); }, {"got none"});
  DataLoader loader{Counting{8}, {.batch_size = 4}};
  expect_error<Error>([&] { loader.seek({.epoch = 0, .batch = 3}); }, {"batch from 0 to 2", "batch 3"});
  expect_error<Error>([&] { loader.seek({.epoch = -1, .batch = 0}); }, {"epoch -1"});
  for (auto [x, y] : loader) {
    expect_error<Error>([&] { loader.seek({}); }, {"inside"});
    expect_error<Error>([&] { loader.begin(); }, {"one loop at a time"});
  }
  EXPECT_EQ(loader.state(), (LoaderState{1, 0}));
}

TEST(ShuffledOrder, IsAPermutation) {
  for (const std::int64_t n : {0, 1, 2, 1000}) {
    Indices order = shuffled_order(n, 1, 2);
    Indices expected(static_cast<std::size_t>(n));
    std::iota(expected.begin(), expected.end(), 0);
    if (n == 1000) {
      EXPECT_NE(order, expected);
    }
    std::ranges::sort(order);
    EXPECT_EQ(order, expected);
  }
}

TEST(ShuffledOrder, DependsOnSeedAndEpoch) {
  EXPECT_EQ(shuffled_order(50, 1, 2), shuffled_order(50, 1, 2));
  EXPECT_NE(shuffled_order(50, 1, 2), shuffled_order(50, 1, 3));
  EXPECT_NE(shuffled_order(50, 1, 2), shuffled_order(50, 2, 2));
}

// All 24 orders of four samples come equally often: 24,000 tries, so 1000 each with a deviation of 31; five deviations.
TEST(ShuffledOrder, IsUniform) {
  std::map<Indices, int> counts;
  for (std::int64_t epoch = 0; epoch < 24000; ++epoch) ++counts[shuffled_order(4, 11, epoch)];
  EXPECT_EQ(counts.size(), 24U);
  for (const auto& [order, n] : counts) EXPECT_NEAR(n, 1000, 155);
}

// A size() that counts wrongly must not become an epoch of nothing, or of what wraps round.
class Wrong final : public Dataset {
 public:
  std::int64_t size() const override { return count; }
  Batch batch(const BatchRequest&) const override { return {}; }
  mutable std::int64_t count = -1;
};
TEST(DataLoader, NegativeSizesAreErrors) {
  for (const std::int64_t size : {std::int64_t{-1}, std::int64_t{-100}, std::numeric_limits<std::int64_t>::min()}) {
    const auto dataset = std::make_shared<Wrong>();
    dataset->count = size;
    test::expect_error<Error>([&] { DataLoader(dataset, {.batch_size = 4}); },
                              {"at least 0 samples", std::to_string(size)});
  }
  // One that changes between epochs.
  const auto dataset = std::make_shared<Wrong>();
  dataset->count = 0;
  DataLoader loader(dataset, {.batch_size = 4, .shuffle = true});
  EXPECT_EQ(loader.size(), 0);
  dataset->count = -7;
  EXPECT_THROW(loader.size(), Error);
  EXPECT_THROW(loader.begin(), Error);
  dataset->count = 0;
  EXPECT_FALSE(loader.begin() != loader.end());
  EXPECT_THROW(shuffled_order(-1, 0, 0), Error);
  // And sizes whose epoch has no number.
  dataset->count = std::numeric_limits<std::int64_t>::max();
  EXPECT_THROW(DataLoader(dataset, {.batch_size = 1, .repeat = 2}), Error);
}

}  // namespace
}  // namespace halfstep::data
