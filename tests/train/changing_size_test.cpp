// SPDX-License-Identifier: Apache-2.0
// A data set that has another size in every epoch, such as one that grows while it is collected.
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "halfstep/data/loader.h"
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

}  // namespace
}  // namespace halfstep
