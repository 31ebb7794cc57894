// SPDX-License-Identifier: Apache-2.0
// Parts of a recipe beside the loss: last rates, what warms up, averages of weights, patience, sums over samples.
#include <gtest/gtest.h>

#include <map>
#include <numbers>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/nn/activation.h"
#include "halfstep/nn/norm.h"
#include "halfstep/optim/ema.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/evaluate.h"
#include "halfstep/train/optimizer.h"
#include "halfstep/train/schedule.h"
#include "tests/support/test_data.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

using test::Recorded;
using test::Samples;
using training::TrainConfig;

struct Normed : nn::Module<Normed> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 12, .out = 24}});
  nn::BatchNorm1d bn = child("bn", nn::BatchNorm1d{{.channels = 24}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 24, .out = 6}});
  Tensor forward(const Tensor& x) const { return fc2(relu(bn(fc1(x)))); }
};

std::map<std::string, std::vector<double>> by_name(const NamedTensors& all) {
  std::map<std::string, std::vector<double>> result;
  for (const NamedTensor& t : all) result[t.name] = t.tensor.to_vector<double>();
  return result;
}

TEST(Recipe, RatesEndAtAPartOfTheHighest) {
  const Normed net;
  optim::SGD optimizer{net.parameters(), {.lr = 0.5}};
  for (const bool linear : {true, false}) {
    training::RateSchedule schedule{training::parse_rate_rule(linear ? "linear:0.25" : "cosine:0.25", 2), optimizer, 5,
                                    4};
    for (int i = 0; i < 25; ++i) {
      schedule.set(i);
      // Ten steps of warm-up, then ten; steps past the end have the rate of the last one.
      const double part = std::min(i, 19) < 10 ? 0 : (std::min(i, 19) - 10) / 10.0;
      const double left = linear ? 1 - part : (1 + std::cos(std::numbers::pi * part)) / 2;
      const double expected = i < 10 ? 0.5 * (1e-3 + (1 - 1e-3) * i / 10) : 0.5 * (0.25 + 0.75 * left);
      EXPECT_NEAR(optimizer.lr(), expected, 1e-15) << i;
    }
  }
  for (const char* bad : {"linear:2", "linear:-1", "linear:0.1,1", "cosine:nan", "cosine:1,1"}) {
    EXPECT_THROW(training::parse_rate_rule(bad), Error) << bad;
  }
}

TEST(Recipe, MomentumAndTheRateOfBiasesWarmUp) {
  TrainConfig config;
  config.lr = 0.01;
  config.momentum = 0.9;
  config.weight_decay = 0.5;
  config.norm_decay = false;
  config.warmup_bias_lr = 0.1;
  const Normed net;
  const auto optimizer = training::make_optimizer(config, net.parameters());
  ASSERT_EQ(optimizer->num_groups(), 3);
  const auto names = [&](int group) {
    std::string text;
    for (const std::size_t i : optimizer->group_parameters(group)) {
      text += optimizer->named_parameters()[i].name + " ";
    }
    return text;
  };
  EXPECT_EQ(names(0), "fc1.weight fc2.weight ");
  EXPECT_EQ(names(1), "bn.weight ");
  EXPECT_EQ(names(2), "fc1.bias bn.bias fc2.bias ");
  const auto state = optimizer->state_dict().numbers;
  EXPECT_EQ(state.at("group0.weight_decay"), 0.5);
  EXPECT_EQ(state.at("group1.weight_decay"), 0);
  EXPECT_EQ(state.at("group2.weight_decay"), 0);
  // Ten steps an epoch: a warm-up of one epoch is longer as the least number of steps says.
  training::RateSchedule schedule{training::parse_rate_rule("constant", 1),
                                  *optimizer,
                                  10,
                                  4,
                                  {.least_steps = 20, .momentum = 0.8, .bias_lr = 0.1}};
  for (int i = 0; i < 30; ++i) {
    schedule.set(i);
    const double part = std::min(i / 20.0, 1.0);
    for (int g = 0; g < 3; ++g) EXPECT_NEAR(optimizer->momentum(g), 0.8 + 0.1 * part, 1e-15) << i;
    const double rate = i < 20 ? 0.01 * (1e-3 + (1 - 1e-3) * part) : 0.01;
    EXPECT_NEAR(optimizer->lr(0), rate, 1e-15) << i;
    EXPECT_NEAR(optimizer->lr(1), rate, 1e-15) << i;
    EXPECT_NEAR(optimizer->lr(2), 0.1 - 0.09 * part, 1e-15) << i;
  }
}

TrainConfig averaged() {
  TrainConfig config;
  config.epochs = 3;
  config.batch_size = 16;
  config.lr = 0.3;
  config.momentum = 0.9;
  config.ema = 0.9;
  config.ema_warmup = 4;
  config.warmup_epochs = 1;
  config.warmup_momentum = 0.5;
  config.warmup_bias_lr = 0.6;
  config.nominal_batch = 8;
  config.clip_norm = 10;
  config.lr_schedule = "linear:0.1";
  config.seed = 4;
  return config;
}

// What is evaluated and saved is the average that optim::EMA gives of the same weights; training goes on with its own.
TEST(Recipe, TheAverageIsEvaluatedAndSaved) {
  const test::TemporaryDir temporary;
  const Samples samples(200, 12, 6, 1), others(90, 12, 6, 2);
  TrainConfig config = averaged();
  config.out = temporary.path() / "run";
  const Normed net;
  optim::EMA expected{net.state_dict(), {.decay = 0.9, .warmup = 4}};
  const Recorded r = test::run(config, net, samples.dataset(), others.dataset(), 0, [&] { expected.update(); });
  const training::Checkpoint last = training::load_checkpoint(config.out / "last.safetensors");
  const auto saved = by_name(last.weights), averages = by_name(expected.averages());
  for (const auto& [name, values] : averages) EXPECT_EQ(saved.at(name), values) << name;
  EXPECT_EQ(by_name(last.training_weights), by_name(net.state_dict()));
  EXPECT_NE(saved.at("fc1.weight"), by_name(net.state_dict()).at("fc1.weight"));
  EXPECT_EQ(last.ema_updates, r.report.steps);

  const Normed loaded;
  loaded.load_state_dict(training::load_weights(config.out / "last.safetensors"));
  const training::Classifier classifier{.module = &loaded, .forward = [&](const Tensor& x) { return loaded(x); }};
  EXPECT_EQ(static_cast<double>(training::evaluate(classifier, others.dataset(), std::nullopt).metrics["loss"]),
            static_cast<double>(r.report.metrics["loss"]));
}

TEST(Recipe, RunsWithAnAverageResumeBitForBit) {
  const test::TemporaryDir temporary;
  const Samples samples(200, 12, 6, 1), others(90, 12, 6, 2);
  for (const std::int64_t stop : {5, 13, 20}) {
    TrainConfig config = averaged();
    manual_seed(8);
    const Normed net;
    const Normed first_net = nn::clone(net), rest_net = nn::clone(net);
    config.out = temporary.path() / "whole" / std::to_string(stop);
    test::run(config, net, samples.dataset(), others.dataset());
    const auto whole = training::load_checkpoint(config.out);
    config.out = temporary.path() / "parts" / std::to_string(stop);
    EXPECT_TRUE(test::run(config, first_net, samples.dataset(), others.dataset(), stop).report.interrupted);
    config.resume = config.out;
    test::run(config, rest_net, samples.dataset(), others.dataset());
    EXPECT_EQ(test::values(rest_net), test::values(net)) << stop;
    const auto parts = training::load_checkpoint(config.out);
    EXPECT_EQ(by_name(parts.weights), by_name(whole.weights)) << stop;
    EXPECT_EQ(by_name(parts.optimizer.tensors), by_name(whole.optimizer.tensors)) << stop;
    EXPECT_EQ(parts.optimizer.numbers, whole.optimizer.numbers) << stop;
    EXPECT_EQ(parts.ema_updates, whole.ema_updates);
  }
}

TEST(Recipe, PatienceEndsARunThatGetsNoBetter) {
  const test::TemporaryDir temporary;
  const Samples samples(64, 12, 6, 1);
  TrainConfig config;
  config.epochs = 9;
  config.batch_size = 16;
  config.lr = 1e-30;  // no weight moves: the first evaluation stays the best
  config.patience = 2;
  config.out = temporary.path() / "run";
  const test::Regression net(12, 6);
  Recorded r = test::run(config, net, samples.dataset(), samples.dataset());
  EXPECT_EQ(r.report.epochs, 3);
  EXPECT_TRUE(r.report.out_of_patience);
  EXPECT_FALSE(r.report.interrupted);
  EXPECT_EQ(training::load_checkpoint(config.out).best_epoch, 1);
  config.resume = config.out;
  r = test::run(config, net, samples.dataset(), samples.dataset());
  EXPECT_TRUE(r.report.nothing_left);
  EXPECT_TRUE(r.report.out_of_patience);
  EXPECT_TRUE(r.steps.empty());
  config.patience = 4;
  r = test::run(config, net, samples.dataset(), samples.dataset());
  EXPECT_EQ(r.report.epochs, 5);
  config.patience = 0;
  r = test::run(config, net, samples.dataset(), samples.dataset());
  EXPECT_EQ(r.report.epochs, 9);
  EXPECT_FALSE(r.report.out_of_patience);
}

// Factors that are powers of 2 are exact: a sum over 16 samples with a sixteenth of the rate is their mean.
TEST(Recipe, GradientsOfSumsAreThoseOfMeansTimesTheSamples) {
  const Samples samples(160, 12, 6, 1);
  for (const std::int64_t shards : {0, 4}) {
    TrainConfig mean;
    mean.epochs = 2;
    mean.batch_size = 8;
    mean.accumulate = 2;
    mean.lr = 0.5;
    mean.momentum = 0.5;
    mean.weight_decay = 1.0 / 128;
    mean.reproducible = shards;
    TrainConfig sum = mean;
    sum.lr = 0.5 / 16;
    sum.nominal_batch = 32;
    sum.weight_decay = 0.25;  // of steps of 32 samples: half of it for 16, a sixteenth of that beside a mean
    manual_seed(8);
    const test::Regression a(12, 6);
    const test::Regression b = nn::clone(a);
    const Recorded means = test::run(mean, a, samples.dataset(), samples.dataset());
    const Recorded sums = test::run(sum, b, samples.dataset(), samples.dataset());
    EXPECT_EQ(test::values(a), test::values(b)) << shards;
    EXPECT_EQ(means.losses(), sums.losses()) << shards;  // which stay means
    EXPECT_NE(means.losses().front(), means.losses().back());
  }
}

}  // namespace
}  // namespace halfstep
