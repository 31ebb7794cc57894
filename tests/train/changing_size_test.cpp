// SPDX-License-Identifier: Apache-2.0
// Steps of changing sizes: a data set that has another size in every epoch, such as one that grows while it is
// collected, and the replay of steps that differ in size.
#include <gtest/gtest.h>

#include <numeric>
#include <optional>
#include <vector>

#include "halfstep/data/loader.h"
#include "halfstep/ops/observer.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/train/classification.h"
#include "halfstep/train/model.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

struct Growing final : data::Dataset {
  std::shared_ptr<const data::Dataset> all;
  std::shared_ptr<std::int64_t> count;
  std::int64_t size() const override { return *count; }
  data::Batch batch(const data::BatchRequest& request) const override { return all->batch(request); }
};

// Sets the size of the next epoch, and notes the steps of each.
struct Sizes final : training::CallbackBase {
  std::shared_ptr<std::int64_t> count;
  std::vector<std::int64_t> next;
  std::vector<std::int64_t> announced = {};
  std::vector<std::vector<std::int64_t>> samples = {};
  void on_epoch_begin(training::TrainContext& context) override {
    announced.push_back(context.steps_in_epoch);
    samples.emplace_back();
  }
  void on_values(training::TrainContext&, std::span<const training::StepRecord> steps) override {
    for (const training::StepRecord& r : steps) samples.back().push_back(r.samples);
  }
  void on_epoch_end(training::TrainContext& context) override {
    if (static_cast<std::size_t>(context.epoch) <= next.size()) {
      *count = next[static_cast<std::size_t>(context.epoch) - 1];
    }
  }
};

TEST(Model, AnEpochHasTheStepsOfTheSizeThatTheDataHaveThen) {
  manual_seed(3);
  const test::Samples samples(56, 6, 3, 5);
  const test::Regression net(6, 3);
  optim::SGD optimizer{net.parameters(), {.lr = 0.1}};
  const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
  const auto growing = std::make_shared<Growing>();
  growing->all = samples.dataset();
  growing->count = std::make_shared<std::int64_t>(40);
  data::DataLoader loader(growing, {.batch_size = 8, .shuffle = true});
  const auto sizes = std::make_shared<Sizes>();
  sizes->count = growing->count;
  sizes->next = {24, 56};
  training::Model model{make_train_step(std::make_shared<training::ClassificationTask>(classifier), optimizer)};
  model.train(3, loader, {training::Callback(sizes)}, {.accumulate = 2});
  // Batches of 8, two a step: 5, 3 and 7 batches.
  EXPECT_EQ(sizes->samples, (std::vector<std::vector<std::int64_t>>{{16, 16, 8}, {16, 8}, {16, 16, 16, 8}}));
  EXPECT_EQ(sizes->announced, (std::vector<std::int64_t>{3, 2, 4}));
}

// Sizes that alternate are recorded each; a smaller step that comes once an epoch runs in the memory of the others.
TEST(TrainStep, SmallerStepsAreRecordedWhereTheyComeOften) {
  const test::Samples samples(40, 6, 3, 5);
  std::vector<std::int64_t> all(40);
  for (std::int64_t i = 0; i < 40; ++i) all[static_cast<std::size_t>(i)] = i;
  const auto batch = [&](std::size_t n) { return samples.dataset()->batch({.indices = std::span(all).first(n)}); };
  const auto replayed = [&](const std::vector<std::size_t>& sizes) {
    manual_seed(3);
    const test::Regression net(6, 3);
    optim::SGD optimizer{net.parameters(), {.lr = 0.5}};
    const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
    training::TrainStep step = make_train_step(std::make_shared<training::ClassificationTask>(classifier), optimizer);
    for (const std::size_t n : sizes) {
      const data::Batch b = batch(n);
      step.run_captured({&b, 1});
    }
    const CaptureStats stats = step.capture_stats();
    EXPECT_EQ(stats.plain + stats.recorded + stats.replayed, sizes.size());
    return stats.replayed;
  };
  std::vector<std::size_t> alternating, epochs, smaller_later(4, 40);
  for (int i = 0; i < 10; ++i) {
    alternating.insert(alternating.end(), {40, 20});
    epochs.insert(epochs.end(), {40, 40, 40, 40, 40, 20});
    smaller_later.push_back(20);
  }
  EXPECT_GE(replayed(alternating), 14u);
  EXPECT_GE(replayed(epochs), 38u);
  EXPECT_GE(replayed(smaller_later), 6u);
}

// An epoch's last, smaller step runs uncaptured whatever else is the matter.
TEST(TrainStep, WhyStepsArentReplayedIsSaidOfAllOfThem) {
  struct Watching : OpObserver {
    void after_call(const ObservedCall& /*call*/) override {}
  };
  const test::Samples samples(40, 6, 3, 5);
  std::vector<std::int64_t> all(40);
  for (std::int64_t i = 0; i < 40; ++i) all[static_cast<std::size_t>(i)] = i;
  for (const bool watched : {false, true}) {
    manual_seed(3);
    const test::Regression net(6, 3);
    optim::SGD optimizer{net.parameters(), {.lr = 0.5}};
    const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
    training::TrainStep step = make_train_step(std::make_shared<training::ClassificationTask>(classifier), optimizer);
    Watching observer;
    std::optional<Observing> watching;
    if (watched) watching.emplace(&observer);
    for (const std::size_t n : {40u, 40u, 40u, 40u, 40u, 8u}) {
      const data::Batch b = samples.dataset()->batch({.indices = std::span(all).first(n)});
      step.run_captured({&b, 1});
    }
    EXPECT_EQ(step.why_not_captured(), watched ? "ops are observed for debugging or profiling"
                                               : "it has fewer samples than the steps before it");
    EXPECT_EQ(step.capture_stats().replayed, watched ? 0u : 3u);
  }
}

}  // namespace
}  // namespace halfstep
