// SPDX-License-Identifier: Apache-2.0
// PyTorch's harness for its scaler: short trainings against a control that is not scaled.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/grad_scaler.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/sgd.h"

namespace halfstep {
namespace {

using amp::GradScaler;
using Values = std::vector<double>;
constexpr double kInf = std::numeric_limits<double>::infinity();

// Two linear layers over four batches; infinity goes into a gradient at the third.
struct Harness {
  Tensor w0, w1;
  std::vector<Tensor> inputs, targets;
  optim::SGD optimizer;

  static Tensor numbers(double phase, const Shape& sizes, double size) {
    Values v;
    for (std::int64_t i = 0; i < sizes.numel(); ++i) v.push_back(std::sin(phase + static_cast<double>(i)) * size);
    return tensor(v, sizes);
  }
  Harness()
      : w0(numbers(1, {8, 8}, 0.2).requires_grad_()),
        w1(numbers(2, {8, 8}, 0.2).requires_grad_()),
        optimizer({{"0.weight", w0}, {"1.weight", w1}}, {.lr = 1}) {
    for (int i = 0; i < 4; ++i) {
      inputs.push_back(numbers(3 + i, {8, 8}, 1));
      targets.push_back(numbers(30 + i, {8, 8}, 1));
    }
  }
  Tensor loss(std::size_t i) const {
    const Tensor difference = linear(linear(inputs[i], w0), w1).to(f32) - targets[i];
    return sum(difference * difference) * (1.0 / 64);
  }
};

class ScaledTraining : public ::testing::TestWithParam<int> {};

TEST_P(ScaledTraining, MatchesAControlThatSkipsTheBadStep) {
  // Plain; unscale_ first; clipped; in a region of autocast.
  const int kind = GetParam();
  for (const bool enabled : {true, false}) {
    Harness scaled, control;
    GradScaler scaler{{.init_scale = 128, .growth_interval = 1, .enabled = enabled}};
    for (std::size_t i = 0; i < 4; ++i) {
      const bool skipped = enabled && i == 2;
      scaled.optimizer.zero_grad();
      const Tensor loss = [&] {
        amp::Autocast region{{.dtype = bf16, .enabled = kind == 3}};
        return scaled.loss(i);
      }();
      scaler.scale(loss).backward();
      if (skipped) scaled.w1.grad()[0].fill_(kInf);
      if (kind == 1) scaler.unscale_(scaled.optimizer);
      const auto clip = [](const Harness& h, double factor) {
        const NoGrad no_grad;
        for (Tensor g : {h.w0.grad(), h.w1.grad()}) g.mul_(factor);
      };
      if (kind == 2) {
        scaler.unscale_(scaled.optimizer);
        clip(scaled, 0.5);
      }
      const auto result = scaler.step(scaled.optimizer);
      EXPECT_EQ(result.ran(), !skipped);
      if (skipped) {
        EXPECT_EQ(result.first_overflow(), "1.weight");
      }
      scaler.update();
      if (skipped) continue;
      control.optimizer.zero_grad();
      control.loss(i).backward();
      if (kind == 2) clip(control, 0.5);
      control.optimizer.step();
    }
    EXPECT_EQ(scaler.get_scale(), enabled ? 128 * 8 * 0.5 : 1);
    for (const auto& [a, b] : {std::pair{scaled.w0, control.w0}, {scaled.w1, control.w1}}) {
      const auto ours = a.to_vector<double>(), theirs = b.to_vector<double>();
      if (kind == 3) {
        // bf16 has 8 bits: products of 8 terms of at most 1, three steps.
        for (std::size_t k = 0; k < ours.size(); ++k) EXPECT_NEAR(ours[k], theirs[k], 0.05);
      } else {
        // Powers of two scale without rounding: the same bits.
        EXPECT_EQ(ours, theirs);
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Kinds, ScaledTraining, ::testing::Range(0, 4));

TEST(Scaled, Accumulation) {
  Harness scaled, control;
  GradScaler scaler{{.init_scale = 128, .growth_interval = 1}};
  for (std::size_t i = 0; i < 4; ++i) {
    scaler.scale(scaled.loss(i) * 0.5).backward();
    (control.loss(i) * 0.5).backward();
    if (i % 2 == 0) continue;
    scaler.step(scaled.optimizer);
    scaler.update();
    scaled.optimizer.zero_grad();
    control.optimizer.step();
    control.optimizer.zero_grad();
  }
  EXPECT_EQ(scaled.w0.to_vector<float>(), control.w0.to_vector<float>());
  EXPECT_EQ(scaler.get_scale(), 512);
}

TEST(Scaled, GradientPenalty) {
  Harness scaled, control;
  GradScaler scaler{{.init_scale = 128, .growth_interval = 1}};
  const auto penalty = [](const std::vector<Tensor>& grads, double inverse) {
    Tensor total = zeros({});
    for (const Tensor& g : grads) total = total + sum(g * g) * (inverse * inverse);
    return total;
  };
  for (std::size_t i = 0; i < 4; ++i) {
    scaled.optimizer.zero_grad();
    const Tensor loss = scaled.loss(i);
    const auto grads = grad({scaler.scale(loss)}, {scaled.w0, scaled.w1}, {.create_graph = true});
    scaler.scale(loss + penalty(grads, 1 / scaler.get_scale())).backward();
    EXPECT_TRUE(scaler.step(scaled.optimizer).ran());
    scaler.update();
    control.optimizer.zero_grad();
    const Tensor plain = control.loss(i);
    const auto plain_grads = grad({plain}, {control.w0, control.w1}, {.create_graph = true});
    (plain + penalty(plain_grads, 1)).backward();
    control.optimizer.step();
  }
  EXPECT_EQ(scaled.w0.to_vector<float>(), control.w0.to_vector<float>());
  EXPECT_EQ(scaled.w1.to_vector<float>(), control.w1.to_vector<float>());
}

TEST(Scaled, TwoModelsTwoLossesOneScaler) {
  Harness a, b, control_a, control_b;
  GradScaler scaler{{.init_scale = 128, .growth_interval = 1}};
  for (std::size_t i = 0; i < 4; ++i) {
    const bool bad = i == 2;
    for (Harness* h : {&a, &b}) h->optimizer.zero_grad();
    const Tensor la = a.loss(i), lb = b.loss(i);
    const Tensor loss0 = la * 2 + lb * 3, loss1 = la * 0.6 - lb * 0.5;
    scaler.scale(loss0).backward({}, {.retain_graph = true});
    scaler.scale(loss1).backward();
    if (bad) a.w0.grad()[1].fill_(kInf);
    scaler.unscale_(a.optimizer);
    EXPECT_EQ(scaler.step(a.optimizer).ran(), !bad);
    EXPECT_TRUE(scaler.step(b.optimizer).ran());
    scaler.update();
    for (Harness* h : {&control_a, &control_b}) h->optimizer.zero_grad();
    const Tensor ca = control_a.loss(i), cb = control_b.loss(i);
    (ca * 2 + cb * 3).backward({}, {.retain_graph = true});
    (ca * 0.6 - cb * 0.5).backward();
    if (!bad) control_a.optimizer.step();
    control_b.optimizer.step();
  }
  EXPECT_EQ(scaler.get_scale(), 128 * 8 * 0.5);
  EXPECT_EQ(a.w0.to_vector<float>(), control_a.w0.to_vector<float>());
  EXPECT_EQ(b.w0.to_vector<float>(), control_b.w0.to_vector<float>());
}

TEST(Scaled, SmallGradientsSurviveF16) {
  const Tensor x = tensor(Values(100, 1), {100}, {.dtype = f16, .requires_grad = true});
  const auto nonzero = [&] {
    int n = 0;
    for (const double g : x.grad().to_vector<double>()) n += g != 0;
    x.set_grad({});
    return n;
  };
  (sum(x.to(f32)) * 1e-9).backward();
  EXPECT_EQ(nonzero(), 0);
  GradScaler scaler;
  scaler.scale(sum(x.to(f32)) * 1e-9).backward();
  EXPECT_EQ(nonzero(), 100);
}

}  // namespace
}  // namespace halfstep
