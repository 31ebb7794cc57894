// SPDX-License-Identifier: Apache-2.0
// MNIST learned as in MindSpore's tutorial on mixed precision: the losses follow those that the tutorial prints, and
// those of the same training in float32 more closely.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "examples/mindspore.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

constexpr int kReach = 25;  // steps either side of the one that is compared

// What the tutorial's losses, of single batches, may be off from ours, of 51 steps and several seeds: they
// scatter by about 0.2 from seed to seed.
constexpr double kScatter = 0.25;

struct Curve {
  std::vector<double> losses;
  std::vector<int> skipped;  // steps that were, before and in each step
};

const data::MnistData* digits() {
  static const auto loaded = []() -> std::optional<data::MnistData> {
    const auto folder = test::data_dir();
    if (!folder || !data::has_mnist(*folder / "mnist", data::Split::kTrain)) return std::nullopt;
    return data::load_mnist(*folder / "mnist", data::Split::kTrain);
  }();
  return loaded ? &*loaded : nullptr;
}

void record(Curve& curve, double loss, bool skipped) {
  curve.losses.push_back(loss);
  curve.skipped.push_back((curve.skipped.empty() ? 0 : curve.skipped.back()) + (skipped ? 1 : 0));
}

// An epoch as examples/mindspore_function.cpp has it.
Curve function_style(DType dtype, std::uint64_t seed) {
  const auto net = mindspore::initialised(mindspore::Network{}, seed);
  if (dtype != f32) amp::auto_mixed_precision(net, amp::Level::O2, dtype);
  optim::SGD optimizer{net.parameters(), {.lr = 1e-2}};
  amp::DynamicLossScaler scaler{1024, 2, 50};
  const auto forward = [&](const Tensor& images, const Tensor& labels) {
    const Tensor logits = net(images);
    return std::pair(scaler.scale(cross_entropy(logits, labels)), logits);
  };
  const auto grad_fn = value_and_grad(forward, net.parameters());
  auto step = capture([&](const Tensor& images, const Tensor& labels) {
    auto [value, gradients] = grad_fn(images, labels);
    const Tensor is_finite = amp::all_finite(gradients);
    const Tensor loss = scaler.unscale(value.first);
    optimizer.step(scaler.unscale(gradients), {.unless = logical_not(is_finite)});
    scaler.adjust(is_finite);
    return std::pair(loss, is_finite);
  });
  Curve curve;
  auto loader = mindspore::batches(*digits(), seed);
  for (const data::Batch& batch : loader) {
    const auto [loss, is_finite] = step(batch.input, batch.target);
    record(curve, loss.item<double>(), !is_finite.item<bool>());
  }
  EXPECT_GT(step.stats().replayed, 900u) << step.why_not();
  return curve;
}

// Some epochs as examples/mindspore_model.cpp has them.
Curve model_style(amp::Level level, std::uint64_t seed, int epochs) {
  const auto net = mindspore::initialised(mindspore::Network{}, seed);
  optim::SGD optimizer{net.parameters(), {.lr = 1e-2}};
  training::Model model{net,
                        {.loss = nn::CrossEntropyLoss{},
                         .optimizer = optimizer,
                         .amp_level = level,
                         .loss_scale_manager = amp::FixedLossScaleManager{}}};
  Curve curve;
  const auto loss = [&](training::TrainContext& c) {
    record(curve, c.loss.item<double>(), c.overflow.defined() && c.overflow.to(f32).item<float>() != 0);
  };
  model.train(epochs, mindspore::batches(*digits(), seed), {training::Lambda{{.on_step_end = loss}}});
  return curve;
}

// The mean around a step, which counts from 0.
double around(const std::vector<Curve>& seeds, std::int64_t step) {
  double sum = 0;
  int count = 0;
  for (const Curve& c : seeds) {
    const auto end = static_cast<std::int64_t>(c.losses.size());
    for (auto i = std::max<std::int64_t>(step - kReach, 0); i < std::min(step + kReach + 1, end); ++i, ++count) {
      sum += c.losses[static_cast<std::size_t>(i)];
    }
  }
  return sum / count;
}

void expect_near_tutorial(const std::vector<Curve>& seeds, const std::vector<double>& tutorial, int first) {
  for (std::size_t i = 0; i < tutorial.size(); ++i) {
    const int step = first + 100 * static_cast<int>(i);
    const double ours = around(seeds, step);
    std::printf("step %d: %.3f, tutorial %.3f\n", step, ours, tutorial[i]);
    EXPECT_NEAR(ours, tutorial[i], kScatter) << "step " << step;
  }
}

// The same seed takes the same batches, so that what parts the curves is rounding and skipped steps.
//
// Rounding: with u = 2^-11 each value of the forward and the backward pass is off by at most u of its size. Six
// roundings stand between a weight and its gradient (three activations or logits, three gradients); were all of them in
// one direction, gradients would be 6u too large or small, and the training would be 6u of its steps ahead or behind.
// Skipped steps put it behind by their number. So many steps change the loss by at most so many times the curve's
// steepest slope, here taken between hundreds. And the loss itself is computed from logits, of size below 8, that are
// off by u: 8u.
void expect_near_float32(const Curve& half, const Curve& full) {
  const double u = std::ldexp(1.0, -11);
  ASSERT_EQ(half.losses.size(), full.losses.size());
  double slope = 0, worst = 0;
  for (int step = 0; step <= 900; step += 100) {
    const double before = around({full}, std::max(step - 100, 0)), here = around({full}, step);
    slope = std::max(slope, std::abs(here - before) / 100);
    const double skipped = half.skipped[static_cast<std::size_t>(step)];
    const double difference = std::abs(around({half}, step) - here);
    EXPECT_LT(difference, 8 * u + (6 * u * step + skipped) * slope) << "step " << step << ", skipped " << skipped;
    worst = std::max(worst, difference);
  }
  std::printf("f16 and float32 part by at most %.4f, with %d steps skipped\n", worst, half.skipped.back());
}

class MindSporeCurves : public testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "thousands of steps take too long under a sanitizer; the pieces have tests of their own";
#endif
    if (!digits()) GTEST_SKIP() << "no mnist in the data folder: set HALFSTEP_DATA";
  }
};
using MindSporeCurvesSlow = MindSporeCurves;

TEST_F(MindSporeCurves, FunctionStyle) {
  const Curve half = function_style(f16, 1), full = function_style(f32, 1);
  expect_near_tutorial({half}, mindspore::kFunctionLosses, 0);
  expect_near_float32(half, full);
}

TEST_F(MindSporeCurves, ModelStyle) {
  const Curve half = model_style(amp::Level::O2, 1, 1), full = model_style(amp::Level::O0, 1, 1);
  expect_near_tutorial({half}, mindspore::kModelLosses, 100);
  expect_near_float32(half, full);
}

TEST_F(MindSporeCurvesSlow, FunctionStyleWithThreeSeeds) {
  std::vector<Curve> seeds;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    seeds.push_back(function_style(f16, seed));
    expect_near_float32(seeds.back(), function_style(f32, seed));
  }
  expect_near_tutorial(seeds, mindspore::kFunctionLosses, 0);
}

TEST_F(MindSporeCurvesSlow, ModelStyleWithThreeSeedsAndTenEpochs) {
  std::vector<Curve> seeds;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) seeds.push_back(model_style(amp::Level::O2, seed, 10));
  expect_near_tutorial(seeds, mindspore::kModelLosses, 100);
  const std::int64_t epoch = static_cast<std::int64_t>(seeds[0].losses.size()) / 10;
  ASSERT_EQ(epoch, 938);
  // LossMonitor(100)'s steps of the tenth epoch, 58, 158, … 858; the tutorial's losses there lie between these two.
  for (std::int64_t step = 58; step < epoch; step += 100) {
    const double ours = around(seeds, 9 * epoch + step - 1);
    std::printf("epoch 10 step %d: %.3f\n", static_cast<int>(step), ours);
    EXPECT_GT(ours, 0.072) << "step " << step;
    EXPECT_LT(ours, 0.191) << "step " << step;
  }
}

}  // namespace
}  // namespace halfstep
