// SPDX-License-Identifier: Apache-2.0
// A Model on a device whose queue the host shall not wait for: the simulated
// one.
#include <gtest/gtest.h>

#ifdef HALFSTEP_SIM_PLUGIN
#include <cmath>
#include <sstream>

#include "halfstep/data/loader.h"
#include "halfstep/nn/loss.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/loss.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/train/classification.h"
#include "halfstep/train/model.h"
#include "tests/runtime/on_sim.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

class ModelOnSim : public test::OnSim {};

const test::Samples& samples() {
  static const test::Samples all(100, 6, 3, 1);
  return all;
}

data::DataLoader loader() { return data::DataLoader{samples().dataset(), {.batch_size = 16}}; }

test::Regression fresh(Device device) {
  manual_seed(7);
  test::Regression net(6, 3);
  net.to(device);
  return net;
}

TEST_F(ModelOnSim, TrainsAndEvaluatesAsOnTheCpu) {
  std::vector<training::History> histories;
  std::vector<double> accuracies;
  for (const Device device : {Device{}, sim}) {
    const test::Regression net = fresh(device);
    optim::SGD optimizer{net.parameters(), {.lr = 0.3}};
    training::Model model{net,
                          {.loss = nn::CrossEntropyLoss{},
                           .optimizer = optimizer,
                           .metrics = {"accuracy"},
                           .loss_scale_manager = amp::FixedLossScaleManager{1024}}};
    std::ostringstream out;
    histories.push_back(model.fit(2, loader(), loader(), {training::LossMonitor{5, out}, training::TimeMonitor{out}}));
    EXPECT_NE(out.str().find("epoch: 1 step: 5, loss is 0.9"), std::string::npos) << out.str();
    EXPECT_NE(out.str().find("epoch: 2 step: 3, loss is "), std::string::npos) << out.str();
    accuracies.push_back(model.eval(loader())["accuracy"]);
    EXPECT_EQ(model.predict(zeros({1, 6}, {.device = Device{}})).device(), device);
  }
  // 14 steps of sums of 100 terms under 3 in another order: 2^-24 each, a
  // factor of 10 for what a step passes on.
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_NEAR(histories[1]["loss"][i], histories[0]["loss"][i], 14 * 100 * 3 * 10 * 0x1p-24);
  }
  EXPECT_EQ(histories[1]["skipped"], (std::vector<double>{0, 0}));
  EXPECT_NEAR(accuracies[1], accuracies[0], 0.01);  // one sample on the edge
}

// Nobody looks at the losses before a line is due; then the message names the
// step.
TEST_F(ModelOnSim, FindsANanWhenALineIsDue) {
  for (const std::int64_t every : {4, 0}) {
    const test::Regression net = fresh(sim);
    optim::SGD optimizer{net.parameters(), {.lr = 0.3}};
    int step = 0;
    const auto loss = [&](const Tensor& output, const Tensor& target) {
      return ++step == 2 ? cross_entropy(output, target) * std::nan("") : cross_entropy(output, target);
    };
    training::Model model{
        net, {.loss = loss, .optimizer = optimizer, .loss_scale_manager = amp::FixedLossScaleManager{1024}}};
    std::ostringstream out;
    const std::string error = test::error_of<Error>([&] {
      model.train(2, loader(), {training::LossMonitor{every, out}});
    });
    EXPECT_NE(error.find("got nan in epoch 1, step 2"), std::string::npos) << error;
    EXPECT_EQ(step, every == 0 ? 7 : 4);  // the epoch's end
  }
}

// The host reads the values of many steps at once: nothing else in a step, loss scaling, clipping and skipped steps
// included, makes the device's queue wait.
TEST_F(ModelOnSim, ReadsTheDeviceOnlyWhenValuesAreDue) {
  std::vector<data::Batch> batches;
  for (data::Batch b : loader()) {
    for (int i = 0; i < 3; ++i) batches.push_back({b.input.to(sim), b.target.to(sim)});
  }
  ASSERT_EQ(batches.size(), 21u);
  for (const bool counted : {false, true}) {
    SCOPED_TRACE(counted);
    const test::Regression net = fresh(sim);
    optim::SGD optimizer{net.parameters(), {.lr = 0.1}};
    const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
    training::Model model{make_train_step(std::make_shared<training::ClassificationTask>(
                                              classifier, training::ClassificationOptions{.train_accuracy = counted}),
                                          optimizer, amp::GradScaler({.init_scale = 1e30}), {.autocast = f16})};
    std::vector<std::uint64_t> reads, waits;
    std::vector<std::int64_t> read_at;
    std::vector<training::StepRecord> records;
    struct Watch : training::CallbackBase {
      std::function<void(std::span<const training::StepRecord>)> values;
      std::function<void(training::TrainContext&)> step;
      void on_values(training::TrainContext&, std::span<const training::StepRecord> steps) override { values(steps); }
      void on_step_begin(training::TrainContext& c) override { step(c); }
    };
    const auto watch = std::make_shared<Watch>();
    watch->step = [&](training::TrainContext&) {
      reads.push_back(test::sim_stats().host_reads);
      waits.push_back(test::sim_stats().waiting_copies);
    };
    watch->values = [&](std::span<const training::StepRecord> steps) {
      read_at.push_back(static_cast<std::int64_t>(reads.size()));
      records.insert(records.end(), steps.begin(), steps.end());
    };
    model.train(1, batches, {training::Callback(watch)}, {.read_every = 8});
    EXPECT_EQ(read_at, (std::vector<std::int64_t>{8, 16, 21}));
    // Between the beginnings of two steps: one read of the ring, one of the scale, and one of the flags of each skipped
    // step. Scores and labels that are counted on the host come by two copies of each step, which wait for nobody.
    for (std::size_t i = 1; i < reads.size(); ++i) {
      const bool due = i == 8 || i == 16;
      EXPECT_EQ(reads[i] - reads[i - 1], (due ? 1u + 1u + 8u : 0u) + (counted ? 2u : 0u)) << "step " << i;
      if (!due) {
        EXPECT_EQ(waits[i], waits[i - 1]) << "step " << i;
      }
    }
    ASSERT_EQ(records.size(), 21u);
    for (std::size_t i = 0; i < records.size(); ++i) {
      EXPECT_EQ(records[i].step, static_cast<std::int64_t>(i) + 1);
      EXPECT_TRUE(std::isfinite(records[i].loss));
      EXPECT_EQ(records[i].scale, static_cast<float>(1e30) * std::ldexp(1.0, -static_cast<int>(i)))
          << "all are skipped";
      EXPECT_TRUE(records[i].skipped);
      EXPECT_EQ(records[i].skipped_steps, static_cast<std::int64_t>(i) + 1);
      EXPECT_FALSE(records[i].overflow.empty());
      EXPECT_EQ(records[i].parts.contains("top1"), counted);
    }
    EXPECT_EQ(net.parameters()[0].tensor.to_vector<double>(), fresh(sim).parameters()[0].tensor.to_vector<double>());
  }
}

// The tutorial's "loss scale as part of the full graph": the whole step is replayed on the device, skipped ones too.
TEST_F(ModelOnSim, ReplaysStepsToTheSameBits) {
  std::vector<training::History> histories;
  std::vector<std::vector<double>> weights;
  for (const bool captured : {false, true}) {
    const test::Regression net = fresh(sim);
    optim::SGD optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9}};
    training::Model model{net,
                          {.loss = nn::CrossEntropyLoss{},
                           .optimizer = optimizer,
                           .metrics = {"accuracy"},
                           .amp_level = amp::Level::O2,
                           .loss_scale_manager = amp::DynamicLossScaleManager{0x1p22, 2, 4},
                           .capture = captured}};
    std::vector<data::Batch> batches;
    for (data::Batch b : loader()) {
      if (b.input.size(0) == 16) batches.push_back({b.input.to(sim), b.target.to(sim)});
    }
    histories.push_back(model.fit(4, batches, batches));
    const CaptureStats stats = model.capture_stats();
    // Each epoch's first step is recorded anew: the evaluation had its memory.
    EXPECT_EQ(stats.replayed, captured ? 4U * 6 - 5 : 0U);
    EXPECT_EQ(stats.graphs > 11U, captured);
    weights.push_back(net.parameters()[0].tensor.to_vector<double>());
  }
  EXPECT_EQ(histories[0]["loss"], histories[1]["loss"]);
  EXPECT_EQ(histories[0]["eval_accuracy"], histories[1]["eval_accuracy"]);
  EXPECT_EQ(histories[0]["skipped"], histories[1]["skipped"]);
  EXPECT_GT(histories[0]["skipped"].back(), 0);
  EXPECT_LT(histories[0]["skipped"].back(), 24);
  EXPECT_EQ(weights[0], weights[1]);
}

// A step that is replayed writes its loss to one place.
TEST_F(ModelOnSim, RemembersLossesThatAreOverwritten) {
  std::ostringstream out;
  training::LossMonitor monitor(3, out);
  training::TrainContext context;
  context.loss = ones({}, {.device = sim});
  const auto step = [&](double loss) {
    context.step = ++context.step_in_epoch;
    context.loss.fill_(loss);
    monitor.on_step_end(context);
  };
  for (const double loss : {3, 2, 1, 4}) step(loss);
  EXPECT_EQ(out.str(), "epoch: 0 step: 3, loss is 1.0\n");
  step(std::nan(""));
  EXPECT_NE(test::error_of<Error>([&] { step(1); }).find("got nan in epoch 0, step 5"), std::string::npos);
}

}  // namespace
}  // namespace halfstep
#endif
