// SPDX-License-Identifier: Apache-2.0
// How far two runs of the same training may drift apart by rounding alone, derived for softmax regression.
//
// The loss of a batch is convex, and its gradient has the Lipschitz constant L = r^2 / 2, where r is the largest norm
// of a sample with the 1 for the bias (a softmax's Jacobian has a norm of at most 1/2). A gradient step with lr <= 2 /
// L doesn't move two points further apart, so the distance between the exact way and a way whose steps are each off by
// at most E is at most E a step. What is off, with C classes and u the unit roundoff of the arithmetic named:
//   logits     each by e = k u R, R the largest sum of |weight| and |bias| of a class (inputs are at most 1)
//   softmax    the change of the logits halved, and 8 u of float32 for exponential, sum and quotient
//   gradient   a residual has a norm of at most sqrt 2, so r sqrt 2 in all; n terms in float32: (n + 4) u of it
//   update     u of the weights' norm and 2 u of lr times the gradient
// And the loss follows the logits with at most sqrt 2, the norm of a residual.
#include <gtest/gtest.h>

#include "halfstep/data/loader.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/matmul.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

using test::Recorded;
using test::Regression;
using test::Samples;
using training::TrainConfig;

constexpr double kUnit32 = 0x1p-24;

// Largest sum of absolute weights and bias of a class, and the norm of all, over the course of runs.
struct Sizes {
  double row = 0, norm = 0;
  void see(const Regression& net) {
    const auto w = net.fc.weight.to_vector<double>(), b = net.fc.bias.to_vector<double>();
    double squares = 0;
    for (std::size_t c = 0; c < b.size(); ++c) {
      double sum = std::abs(b[c]);
      squares += b[c] * b[c];
      for (std::size_t j = 0; j < w.size() / b.size(); ++j) {
        sum += std::abs(w[c * (w.size() / b.size()) + j]);
        squares += std::pow(w[c * (w.size() / b.size()) + j], 2);
      }
      row = std::max(row, sum);
    }
    norm = std::max(norm, std::sqrt(squares));
  }
};

struct Bounds {
  double reach;    // r
  double classes;  // C
  double lr;
  double logit;     // e
  double residual;  // relative error of the residuals beside softmax's: their rounding to 16 bits
  Sizes sizes;
  // E for batches of n.
  double step(double n) const {
    const double gradient =
        reach * (std::sqrt(classes) * (logit / 2 + 8 * kUnit32) + std::sqrt(2.0) * (residual + (n + 4) * kUnit32));
    return lr * gradient + kUnit32 * (sizes.norm + 2 * lr * std::sqrt(2.0) * reach);
  }
  // Of the loss of n samples: logits, then log-sum-exp, difference and mean in float32.
  double loss(double n) const {
    return std::sqrt(2.0 * classes) * logit + (n + 8) * kUnit32 * (std::log(classes) + 2 * sizes.row);
  }
};

// Batches of 32 whose gradients are accumulated by twos or threes are batches of 64 or 96, the last, smaller group
// included: 160 samples are two groups of three and two batches.
TEST(TrainBounds, AccumulationIsALargerBatch) {
  const Samples samples(160, 8, 3, 1);
  for (const int group : {2, 3}) {
    TrainConfig config;
    config.epochs = 3;
    config.lr = 0.2;
    config.seed = 5;
    const auto training = [&](std::int64_t batch, int accumulate, Sizes* sizes) {
      config.batch_size = batch;
      config.accumulate = accumulate;
      manual_seed(2);
      const Regression net(8, 3);
      sizes->see(net);
      return test::run(config, net, samples.dataset(), samples.dataset(), 0, [&] { sizes->see(net); });
    };
    Sizes sizes;
    const Recorded large = training(32 * group, 1, &sizes), small = training(32, group, &sizes);
    const double n = 32 * group;
    // A dot product of eight and a bias: nine products, and one for the rounding of the second order.
    const Bounds bounds{
        .reach = 3, .classes = 3, .lr = config.lr, .logit = 10 * kUnit32 * sizes.row, .residual = 0, .sizes = sizes};
    ASSERT_LE(config.lr, 2 / (bounds.reach * bounds.reach / 2));
    ASSERT_EQ(large.steps.size(), small.steps.size());
    ASSERT_EQ(large.steps.size(), group == 2 ? 9U : 6U);
    double bound = 0;
    for (std::size_t t = 0; t < large.steps.size(); ++t) {
      // Both runs are off, each by its own rounding.
      const double apart = 2 * static_cast<double>(t) * bounds.step(n);
      bound = std::sqrt(2.0) * bounds.reach * apart + 2 * bounds.loss(n);
      EXPECT_NEAR(large.steps[t].loss, small.steps[t].loss, bound) << "group " << group << " step " << t;
    }
    EXPECT_GT(small.steps.front().loss - small.steps.back().loss, 100 * bound) << "steps of another length would show";
  }
}

// The loss that hand-made casts give: weights, bias and logits rounded to `dtype`, all else in float64.
double loss_with_casts(const Regression& net, const Tensor& x, const Tensor& y, DType dtype) {
  const auto rounded = [&](const Tensor& t) { return t.detach().to(dtype).to(f64); };
  const Tensor logits = rounded(linear(x.to(f64), rounded(net.fc.weight), rounded(net.fc.bias)));
  return cross_entropy(logits, y).item<double>();
}

// Under autocast weights, bias and logits are rounded once each (the inputs are exact), and so are the residuals that
// come back; the weights' gradients and the update are float32.
TEST(TrainBounds, MixedPrecisionFollowsFloat32) {
  // Few samples a batch, so that the rounding of the mean hides nothing.
  const Samples samples(160, 4, 2, 3), others(20, 4, 2, 4);
  TrainConfig config;
  config.batch_size = 8;
  config.lr = 0.1;
  config.seed = 7;
  for (const char* amp : {"bf16", "f16"}) {
    const DType dtype = amp == std::string("f16") ? f16 : bf16;
    const double unit = dtype == f16 ? 0x1p-11 : 0x1p-8;
    Sizes sizes;
    const auto training = [&](const Regression& net, const char* precision) {
      config.amp = precision;
      sizes.see(net);
      return test::run(config, net, samples.dataset(), others.dataset(), 0, [&] { sizes.see(net); });
    };
    manual_seed(11);
    const Regression wide_net(4, 2), low_net = nn::clone(wide_net);
    // The first batch's loss is known to the rounding of float32.
    const auto order = data::shuffled_order(160, config.seed, 0);
    const auto [x, y] = samples.dataset()->batch({.indices = std::span(order).first(8)});
    const double first = loss_with_casts(low_net, x, y, dtype), plain = loss_with_casts(low_net, x, y, f32);
    const Recorded wide = training(wide_net, "off"), low = training(low_net, amp);
    const Bounds exact{.reach = std::sqrt(5.0),
                       .classes = 2,
                       .lr = config.lr,
                       .logit = 6 * kUnit32 * sizes.row,
                       .residual = 0,
                       .sizes = sizes};
    Bounds rough = exact;
    rough.logit += 2 * unit * (1 + unit) * sizes.row;
    rough.residual = unit;
    ASSERT_LE(config.lr, 2 / (exact.reach * exact.reach / 2));
    EXPECT_NEAR(wide.steps[0].loss, plain, exact.loss(8));
    EXPECT_NEAR(low.steps[0].loss, first, exact.loss(8)) << amp;
    EXPECT_GT(std::abs(first - plain), 4 * exact.loss(8)) << "the two can be told apart";
    ASSERT_EQ(low.steps.size(), 20U);
    for (std::size_t t = 0; t < low.steps.size(); ++t) {
      const double apart = static_cast<double>(t) * (rough.step(8) + exact.step(8));
      EXPECT_NEAR(low.steps[t].loss, wide.steps[t].loss,
                  std::sqrt(2.0) * rough.reach * apart + rough.loss(8) + exact.loss(8))
          << amp << " step " << t;
      EXPECT_EQ(low.steps[t].scale, dtype == f16 ? 65536 : 1);
    }
    EXPECT_LT(low.evals.back().metrics["loss"], 0.9 * low.steps.front().loss);
    // Evaluation runs in the same dtype.
    const std::vector<std::int64_t> all = data::shuffled_order(20, 0, 0);
    const auto [tx, ty] = others.dataset()->batch({.indices = all});
    EXPECT_NEAR(low.evals.back().metrics["loss"], loss_with_casts(low_net, tx, ty, dtype), exact.loss(20)) << amp;
    if (dtype == bf16) {  // f16 is too close to float32 to tell by this mean
      EXPECT_GT(std::abs(low.evals.back().metrics["loss"] - loss_with_casts(low_net, tx, ty, f32)), exact.loss(20));
    }
  }
}

}  // namespace
}  // namespace halfstep
