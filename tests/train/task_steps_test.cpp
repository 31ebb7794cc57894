// SPDX-License-Identifier: Apache-2.0
// How the steps and evaluations of a task add up: several batches a step, stops, parts and captures.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/data/loader.h"
#include "halfstep/nn/loss.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/classification.h"
#include "halfstep/train/evaluate.h"
#include "halfstep/train/model.h"
#include "halfstep/train/task.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

using training::Task;
using training::TaskLoss;
using training::TrainStep;

// A step of several batches has the gradients of one batch of all their samples.
TEST(TaskSteps, SeveralBatchesAreOneStep) {
  const test::Samples samples(40, 6, 3, 5);
  const auto whole = samples.dataset();
  std::vector<std::int64_t> all(40);
  for (std::int64_t i = 0; i < 40; ++i) all[static_cast<std::size_t>(i)] = i;
  const auto part = [&](std::size_t from, std::size_t count) {
    return whole->batch({.indices = std::span(all).subspan(from, count)});
  };
  for (const bool captured : {false, true}) {
    std::vector<std::vector<double>> weights;
    for (const bool cut : {false, true}) {
      manual_seed(3);
      const test::Regression net(6, 3);
      optim::SGD optimizer{net.parameters(), {.lr = 0.5}};
      const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
      TrainStep step = make_train_step(std::make_shared<training::ClassificationTask>(classifier), optimizer, {},
                                       {.clip_norm = 0.7});
      for (int i = 0; i < 4; ++i) {
        std::vector<data::Batch> batches;
        if (cut) {
          batches = {part(0, 16), part(16, 16), part(32, 8)};
        } else {
          batches = {part(0, 40)};
        }
        const training::StepValues values = captured ? step.run_captured(batches) : step.run(batches);
        EXPECT_EQ(values.samples, 40);
        EXPECT_EQ(values.losses.size(), batches.size());
        if (cut) {
          EXPECT_EQ(values.weights, (std::vector<double>{0.4, 0.4, 0.2}));
        }
      }
      weights.push_back(net.parameters()[0].tensor.to_vector<double>());
    }
    // Four steps; gradients are sums of 40 terms under 1, added in another order.
    for (std::size_t i = 0; i < weights[0].size(); ++i) EXPECT_NEAR(weights[1][i], weights[0][i], 4 * 40 * 0x1p-24);
  }
}

// Asked to stop while the loop waits for a batch: the batch that comes then is the next run's first.
// Without a scaler overflow and scale are the same tensors in every step, unless someone writes to them.
TEST(TaskSteps, WhatACallerWritesToValuesIsNotTheNextSteps) {
  const test::Samples samples(8, 6, 3, 5);
  const std::vector<std::int64_t> all = {0, 1, 2, 3, 4, 5, 6, 7};
  const data::Batch batch = samples.dataset()->batch({.indices = all});
  for (const bool captured : {false, true}) {
    manual_seed(3);
    const test::Regression net(6, 3);
    optim::SGD optimizer{net.parameters(), {.lr = 0.1}};
    const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
    TrainStep step = make_train_step(std::make_shared<training::ClassificationTask>(classifier), optimizer);
    for (int i = 0; i < 5; ++i) {
      training::StepValues values = captured ? step.run_captured({&batch, 1}) : step.run({&batch, 1});
      EXPECT_EQ(values.overflow.item<double>(), 0) << i;
      EXPECT_EQ(values.scale.item<double>(), 1) << i;
      values.overflow.fill_(1);
      if (i % 2 == 0) values.scale.fill_(7);
    }
    EXPECT_EQ(step.capture_stats().replayed, captured ? 3u : 0u);
  }
}

TEST(TaskSteps, AStopWhileWaitingForDataLosesNoBatch) {
  const test::Samples samples(40, 6, 3, 5), others(10, 6, 3, 6);
  struct Stopping final : data::Dataset {
    std::shared_ptr<const data::Dataset> rows;
    std::atomic<bool>* stop;
    std::int64_t at;  // batches until it asks
    mutable std::int64_t made = 0;
    std::int64_t size() const override { return rows->size(); }
    data::Batch batch(const data::BatchRequest& request) const override {
      if (++made == at) stop->store(true);
      return rows->batch(request);
    }
  };
  for (const int accumulate : {1, 2}) {
    for (std::int64_t at = 1; at <= 10; ++at) {
      training::TrainConfig config;
      config.model = "net";
      config.epochs = 2;
      config.batch_size = 8;
      config.lr = 0.5;
      config.workers = 0;
      config.accumulate = accumulate;
      manual_seed(3);
      const test::Regression whole(6, 3);
      const auto losses = test::run(config, whole, samples.dataset(), others.dataset()).losses();
      test::TemporaryDir folder;
      config.out = folder.path() / "run";
      std::atomic<bool> stop{false};
      const auto stopping = std::make_shared<Stopping>();
      stopping->rows = samples.dataset();
      stopping->stop = &stop;
      stopping->at = at;
      manual_seed(3);
      const test::Regression net(6, 3);
      const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
      std::vector<double> seen;
      training::TrainCallbacks callbacks;
      callbacks.on_step = [&](const training::StepReport& r) { seen.push_back(r.loss); };
      EXPECT_TRUE(training::train(config, classifier, stopping, others.dataset(), callbacks, &stop).interrupted);
      config.resume = config.out;
      manual_seed(9);
      const test::Regression rest(6, 3);
      for (const double loss : test::run(config, rest, samples.dataset(), others.dataset()).losses()) {
        seen.push_back(loss);
      }
      EXPECT_EQ(seen, losses) << "batch " << at << ", " << accumulate << " batches a step";
      EXPECT_EQ(test::values(rest), test::values(whole));
    }
  }
}

// The optimizer of a part: gradients of the rest neither grow nor count for the norm that is clipped to.
TEST(TaskSteps, AnOptimizerOfAPartSeesThatPartOnly) {
  const test::Samples samples(8, 6, 3, 5);
  std::vector<std::int64_t> all{0, 1, 2, 3, 4, 5, 6, 7};
  const data::Batch batch = samples.dataset()->batch({.indices = all});
  manual_seed(3);
  const test::Regression net(6, 3);
  const NamedTensors own{{"bias", net.fc.bias}};
  optim::SGD optimizer{own, {.lr = 1}};
  const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
  TrainStep step =
      make_train_step(std::make_shared<training::ClassificationTask>(classifier), optimizer, {}, {.clip_norm = 1e-3});
  std::vector<double> foreign;
  for (int i = 0; i < 2; ++i) {
    {
      const NoGrad no_grad;
      Tensor(net.fc.bias).copy_(zeros({3}));
    }
    step.run({&batch, 1});
    // A step of rate 1 moves by the clipped gradient: its norm is the bound, less PyTorch's 1e-6 over the norm before
    // (above 0.1 here) and a few roundings of 2^-24.
    double squares = 0;
    for (const double v : net.fc.bias.to_vector<double>()) squares += v * v;
    EXPECT_NEAR(std::sqrt(squares), 1e-3, 1e-3 * (1e-6 / 0.1 + 8 * 0x1p-24));
    foreign.push_back(net.fc.weight.grad().to_vector<double>()[0]);
  }
  EXPECT_EQ(foreign[0], foreign[1]) << "one step's gradient, not two steps'";
}

// One part that overflows leaves the means of the others, and checkpoints stay readable.
TEST(TaskSteps, AnInfinitePartIsLeftOutOfTheMeans) {
  struct Odd final : Task {
    const test::Regression& net;
    int calls = 0;
    explicit Odd(const test::Regression& n) : net(n) {}
    const nn::ModuleBase& network() const override { return net; }
    TaskLoss loss(const data::Batch& batch) override {
      TaskLoss made;
      made.loss = cross_entropy(net(batch.input), batch.target);
      made.parts = {
          {"part", tensor({++calls == 2 ? std::numeric_limits<double>::infinity() : 4.0}, {}, {.dtype = f32})}};
      return made;
    }
  };
  const test::Samples samples(32, 6, 3, 5);
  manual_seed(3);
  const test::Regression net(6, 3);
  training::TrainConfig config;
  config.model = "net";
  config.batch_size = 8;
  config.lr = 0.5;
  config.capture = false;
  test::TemporaryDir folder;
  config.out = folder.path() / "run";
  training::train(config, std::make_shared<Odd>(net), samples.dataset(), samples.dataset());
  EXPECT_EQ(training::load_checkpoint(config.out).parts, (std::map<std::string, double>{{"part", 12}}));
}

// An evaluation of its own inside of a run takes nothing from the run's.
TEST(TaskSteps, AnEvaluationInsideOfARun) {
  const test::Samples samples(32, 6, 3, 5);
  manual_seed(3);
  const test::Regression net(6, 3);
  optim::SGD optimizer{net.parameters(), {.lr = 0.5}};
  data::DataLoader loader{samples.dataset(), {.batch_size = 8}}, test{samples.dataset(), {.batch_size = 8}};
  training::Model model{net, {.loss = nn::CrossEntropyLoss{}, .optimizer = optimizer, .metrics = {"accuracy"}}};
  const auto history = model.fit(3, loader, test, {training::Lambda{{.on_epoch_end = [&](training::TrainContext&) {
                                   EXPECT_FALSE(model.eval(test).contains("loss"));
                                 }}}});
  for (const double loss : history["eval_loss"]) EXPECT_TRUE(std::isfinite(loss));
}

// One loader for both: each epoch has its own order all the same.
TEST(TaskSteps, OneLoaderForTrainingAndEvaluation) {
  const test::Samples samples(40, 6, 3, 5);
  std::vector<std::vector<double>> weights;
  for (const bool shared : {false, true}) {
    manual_seed(3);
    const test::Regression net(6, 3);
    optim::SGD optimizer{net.parameters(), {.lr = 0.5}};
    data::DataLoader loader{samples.dataset(), {.batch_size = 16, .shuffle = true}},
        other{samples.dataset(), {.batch_size = 16}};
    training::Model model{net, {.loss = nn::CrossEntropyLoss{}, .optimizer = optimizer, .metrics = {"accuracy"}}};
    model.fit(3, loader, shared ? loader : other);
    weights.push_back(net.fc.weight.to_vector<double>());
  }
  EXPECT_EQ(weights[0], weights[1]);
}

TEST(TaskSteps, HitsAreCountedAsTheLabelRanks) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  const Tensor scores = tensor({{3, 2, 1, 0, -1, -2},
                                {0, 0, 0, 0, 0, 0},
                                {0, 0, 0, 0, 0, 0},
                                {1, nan, 3, 4, 5, 6},
                                {1, nan, 3, 4, 5, 6},
                                {9, 8, 7, 6, 5, 4},
                                {1, 2, 3, 4, 5, 6}});
  // First; first of equals; last of equals; a NaN; second of those that a NaN stands among; sixth; no class.
  const training::TopHits hits =
      training::count_top_hits(scores, tensor(std::vector<std::int64_t>{0, 0, 5, 1, 4, 5, -100}, {7}));
  EXPECT_EQ(hits.top1.item<double>(), 2);
  EXPECT_EQ(hits.top5.item<double>(), 3);
  // Soft targets count by their largest share.
  const training::TopHits soft =
      training::count_top_hits(tensor({{0.0, 1.0, 2.0}, {2.0, 1.0, 0.0}}), tensor({{0.1, 0.3, 0.6}, {0.1, 0.6, 0.3}}));
  EXPECT_EQ(soft.top1.item<double>(), 1);
  EXPECT_EQ(soft.top5.item<double>(), 2);
  EXPECT_NE(test::error_of<ShapeError>([&] { training::count_top_hits(scores, zeros({3})); }).find("count_top_hits"),
            std::string::npos);
}

TEST(TaskSteps, MistakesAreNamed) {
  manual_seed(3);
  const test::Regression net(6, 3), other(6, 3);
  const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
  const auto task = std::make_shared<training::ClassificationTask>(classifier);
  optim::SGD optimizer{net.parameters(), {.lr = 0.5}}, foreign{other.parameters(), {.lr = 0.5}};
  const auto refused = [](auto&& f, const char* part) {
    const std::string error = test::error_of<Error>(f);
    EXPECT_NE(error.find(part), std::string::npos) << error;
  };
  refused([&] { training::make_train_step(nullptr, optimizer); }, "expected a task, got none");
  refused([&] { make_train_step(task, foreign); }, "no parameter of this network");
  refused([&] { make_train_step(task, optimizer, {}, {.autocast = f32}); },
          "expected f16 or bf16 for autocast, got f32");
  refused([&] { make_train_step(task, optimizer, {}, {.clip_norm = -1}); }, "clip_norm of at least 0, got -1");
  TrainStep step = make_train_step(task, optimizer);
  refused([&] { step.run({}); }, "at least one batch, got none");
  refused([&] { step.run_captured({}); }, "at least one batch, got none");
  refused([&] { step.predict(zeros({1, 6})); }, "expected a step of build_train_network(), got one of a Task");
  training::Model model{step};
  const data::Batch batch{zeros({2, 6}), zeros({2}, {.dtype = i64})};
  const std::vector<data::Batch> batches{batch};
  refused([&] { model.train(1, batches, {}, {.accumulate = 0}); }, "at least 1 batch a step, got 0");
  refused([&] { model.train(1, batches, {}, {.read_every = 0}); }, "at least 1 step between reads, got 0");
  data::DataLoader loader{test::Samples(8, 6, 3, 1).dataset(), {.batch_size = 4}};
  refused([&] { model.train(3, loader, {}, {.from = {.epoch = 1, .batch = 1}}); },
          "expected a loader at epoch 1, batch 1, where the run resumes, got one at epoch 0, batch 0");
  refused([&] { model.train(3, batches, {}, {.from = {.epoch = -1}}); }, "got epoch -1, batch 0, step 0");
  refused([&] { model.train(3, batches, {}, {.from = {.step = std::numeric_limits<std::int64_t>::max()}}); },
          "expected a state to resume from");
  const data::Batch none{zeros({0, 6}), zeros({0}, {.dtype = i64})};
  refused([&] { step.run(std::vector{batch, none}); }, "at least one sample in each batch, got 0");
  training::MetricResults results;
  refused([&] { training::evaluate(*task, batches, results, {.read_every = 0}); }, "at least 1 batch between reads");
}

}  // namespace
}  // namespace halfstep
