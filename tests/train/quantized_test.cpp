// SPDX-License-Identifier: Apache-2.0
// Quantization-aware training in the loop: with every precision, captured and not, resumed.
#include <gtest/gtest.h>

#include "halfstep/data/digits.h"
#include "halfstep/data/mnist.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/norm_act.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/quant/quantization.h"
#include "tests/support/test_data.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

struct SmallNet : nn::Module<SmallNet> {
  nn::Conv2d conv1 =
      child("conv1", nn::Conv2d{{.in = 1, .out = 8, .kernel = {5, 5}, .stride = {2, 2}, .padding = 2, .bias = false}});
  nn::BatchNorm2d bn1 = child("bn1", nn::BatchNorm2d{{.channels = 8}});
  nn::Conv2d conv2 =
      child("conv2", nn::Conv2d{{.in = 8, .out = 16, .kernel = {3, 3}, .stride = {2, 2}, .padding = 1, .bias = false}});
  nn::BatchNorm2d bn2 = child("bn2", nn::BatchNorm2d{{.channels = 16}});
  nn::Linear fc = child("fc", nn::Linear{{.in = 16 * 49, .out = 10}});
  Tensor forward(const Tensor& x) const {
    const Tensor a = bn1(conv1(x.reshape({x.size(0), 1, 28, 28})), Activation::relu);
    return fc(flatten(bn2(conv2(a), Activation::relu), 1));
  }
};

SmallNet small_net(bool quantized) {
  manual_seed(11);
  SmallNet net;
  if (quantized) quant::prepare(net, zeros({1, 784}));
  return net;
}

std::shared_ptr<const data::Dataset> digits(data::Split split, std::int64_t count) {
  return std::make_shared<data::MnistDataset>(data::make_digits(split, {.count = count}));
}

training::TrainConfig config_of(const std::string& amp, int epochs) {
  training::TrainConfig config;
  config.amp = amp;
  config.epochs = epochs;
  config.batch_size = 32;
  config.lr = 0.05;
  config.momentum = 0.9;
  return config;
}

TEST(QuantizedTraining, ReachesWhatTheNetworkReachesInEveryPrecision) {
  const auto train = digits(data::Split::kTrain, 1024), test = digits(data::Split::kTest, 500);
  for (const char* amp : {"off", "f16", "bf16"}) {
    for (const bool quantized : {false, true}) {
      const SmallNet net = small_net(quantized);
      const test::Recorded r = test::run(config_of(amp, 4), net, train, test);
      // 500 digits: one standard deviation of 95% is 1%; all six lie well above what an untrained network has, 10%.
      EXPECT_GT(static_cast<double>(r.evals.back().metrics["top1"]), 0.9) << amp << (quantized ? " quantized" : "");
      if (!quantized) continue;
      const auto q = quant::quantization_of(net);
      for (const quant::QuantizedTensor& t : q->tensors()) {
        for (const float s : q->at(t.name).scale.to_vector<float>()) {
          EXPECT_TRUE(std::isfinite(s) && s > 0 && s != 1) << t.name;
        }
      }
    }
  }
}

// A first scale that overflows, so that some steps are skipped and their ranges dropped.
TEST(QuantizedTraining, CapturedStepsAreEagerOnesBitForBit) {
  const auto train = digits(data::Split::kTrain, 320), test = digits(data::Split::kTest, 64);
  std::vector<std::vector<std::vector<double>>> states;
  std::vector<std::vector<double>> losses;
  for (const bool capture : {false, true}) {
    training::TrainConfig config = config_of("f16", 2);
    config.loss_scale = "dynamic:1e9";
    config.capture = capture;
    const SmallNet net = small_net(true);
    const test::Recorded r = test::run(config, net, train, test);
    EXPECT_GT(r.report.skipped, 2);
    EXPECT_EQ(r.report.captured.replayed > 0, capture);
    states.push_back(test::values(net));
    losses.push_back(r.losses());
  }
  EXPECT_EQ(states[1], states[0]);
  EXPECT_EQ(losses[1], losses[0]);
}

TEST(QuantizedTraining, ResumesBitExactly) {
  const auto train = digits(data::Split::kTrain, 320), test = digits(data::Split::kTest, 64);
  const test::TemporaryDir temporary;
  std::vector<std::vector<std::vector<double>>> states;
  for (const bool stopped : {false, true}) {
    training::TrainConfig config = config_of("f16", 2);
    config.out = temporary.path() / (stopped ? "stopped" : "whole");
    if (stopped) {
      test::run(config, small_net(true), train, test, 7);
      config.resume = config.out;
    }
    const SmallNet net = small_net(true);
    test::run(config, net, train, test);
    states.push_back(test::values(net));
  }
  EXPECT_EQ(states[1], states[0]);
}

}  // namespace
}  // namespace halfstep
