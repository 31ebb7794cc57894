// SPDX-License-Identifier: Apache-2.0
#include "halfstep/optim/lbfgs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/grad_scaler.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "tests/optim/optim_golden.h"

namespace halfstep {
namespace {

using optim::LBFGS;
using optim::LineSearch;

// On another device sums are rounded in another order, and where a minimum lies a float32 loss tells only to the root
// of its rounding: |loss| <= 8 here, curvatures from 0.7 up, so about sqrt(2 * 8 * 2^-24 / 0.7), 0.0012.
double f32_bound(double on_cpu) { return default_device().is_cpu() ? on_cpu : std::max(on_cpu, 0.0012); }

// The functions of tests/goldens/make_optim.py.
Tensor quadratic(const Tensor& x) {
  const Tensor a = tensor({3, 1, 0, 1, 2, 0.5, 0, 0.5, 1}, {3, 3}, {.dtype = x.dtype()});
  const Tensor b = tensor({1, -2, 0.5}, {.dtype = x.dtype()});
  return 0.5 * sum(x * mv(a, x)) - sum(b * x);
}
Tensor rosenbrock(const Tensor& x) {
  const std::int64_t n = x.size(0);
  const Tensor low = x.narrow(0, 0, n - 1), high = x.narrow(0, 1, n - 1);
  const Tensor d = high - low * low, e = 1 - low;
  return sum(100 * (d * d) + e * e);
}

TEST(LbfgsGolden, Trajectories) {
  for (const test::GoldenEntry& e : goldens_of({"LBFGS"})) {
    Tensor x = tensor_of(e.inputs[0]).requires_grad_();
    LBFGS optimizer({{"x", x}},
                    {.lr = e.real("lr"),
                     .max_iter = e.integer("max_iter"),
                     .max_eval = e.integer("max_eval", 0),
                     .tolerance_grad = e.real("tolerance_grad"),
                     .tolerance_change = e.real("tolerance_change"),
                     .history_size = e.integer("history_size"),
                     .line_search = e.text("line_search") == "none" ? LineSearch::none : LineSearch::strong_wolfe});
    const std::string function = e.text("function");
    const auto value = [&](const Tensor& at) {
      return function == "quadratic" ? quadratic(at) : function == "parabola" ? 0.5 * sum(at * at) : rosenbrock(at);
    };
    const auto closure = [&] {
      optimizer.zero_grad();
      const Tensor loss = value(x);
      loss.backward();
      return loss;
    };
    // In f64 1e-9 of the largest value (the line search magnifies roundings), in f32 the drift of roundings.
    const double bound = e.inputs[0].dtype == "f64" ? 1e-9 * 4 : f32_bound(drift_bound(e, e.integer("steps")));
    for (std::int64_t s = 0; s < e.integer("steps"); ++s) {
      const std::string what = e.name + " step " + std::to_string(s);
      const double loss = optimizer.step(closure).item<double>();
      const double expected = e.tensor("loss").data[static_cast<std::size_t>(s)];
      EXPECT_NEAR(loss, expected, bound * (1 + std::abs(expected))) << what;
      expect_near(x.to_vector<double>(), row_of(e.outputs[0], s), bound, what);
      if (e.inputs[0].dtype == "f64") {
        EXPECT_EQ(static_cast<double>(optimizer.evaluations()),
                  e.tensor("evaluations").data[static_cast<std::size_t>(s)])
            << what;
      }
    }
  }
}

TEST(Lbfgs, NeedsAClosure) {
  LBFGS optimizer({{"x", ones({2}, {.requires_grad = true})}});
  try {
    optimizer.step();
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("step(closure)"), std::string::npos) << e.what();
  }
  EXPECT_THROW(optimizer.step({ones({2})}), Error);
  EXPECT_THROW(optimizer.step([] { return Tensor(); }), Error);
  EXPECT_THROW((LBFGS({}, {.max_iter = 0})), Error);
}

// A closure that throws in the middle of a step, as one that loads data may.
TEST(Lbfgs, AClosureThatThrowsLeavesEverythingAsItWas) {
  Tensor x = tensor({-1.2, 1}, {.dtype = f32, .requires_grad = true}), y = tensor({3}, {.dtype = bf16});
  y.requires_grad_();
  LBFGS optimizer({{"x", x}, {"y", y}}, {.max_iter = 4, .line_search = LineSearch::strong_wolfe});
  int calls = 0, fails_at = -1;
  const auto closure = [&] {
    if (++calls == fails_at) throw std::runtime_error("no data");
    optimizer.zero_grad();
    const Tensor loss = rosenbrock(x) + sum(y * y);
    loss.backward();
    return loss;
  };
  optimizer.step(closure);
  const auto x0 = x.to_vector<float>(), y0 = y.to_vector<float>();
  const auto state = optimizer.state_dict();
  fails_at = calls + 3;
  EXPECT_THROW(optimizer.step(closure), std::runtime_error);
  EXPECT_EQ(x.to_vector<float>(), x0);
  EXPECT_EQ(y.to_vector<float>(), y0);
  const auto after = optimizer.state_dict();
  EXPECT_EQ(after.numbers, state.numbers);
  ASSERT_EQ(after.tensors.size(), state.tensors.size());
  for (std::size_t i = 0; i < state.tensors.size(); ++i) {
    EXPECT_EQ(after.tensors[i].tensor.to_vector<float>(), state.tensors[i].tensor.to_vector<float>());
  }
}

TEST(Lbfgs, ResumesBitForBit) {
  const auto closure = [](LBFGS& o, const Tensor& x) {
    return [&o, x] {
      o.zero_grad();
      const Tensor loss = rosenbrock(x);
      loss.backward();
      return loss;
    };
  };
  Tensor x = tensor({-1.2, 1}, {.requires_grad = true}), y = tensor({0, 0}, {.requires_grad = true});
  const optim::LBFGSOptions options{.max_iter = 4, .history_size = 3, .line_search = LineSearch::strong_wolfe};
  LBFGS a({{"x", x}}, options), b({{"x", y}}, options);
  for (int i = 0; i < 3; ++i) a.step(closure(a, x));
  {
    NoGrad no_grad;
    y.copy_(x);
  }
  EXPECT_THROW(b.load_state_dict({}), Error);
  b.load_state_dict(a.state_dict());
  for (int i = 0; i < 3; ++i) {
    a.step(closure(a, x));
    b.step(closure(b, y));
    EXPECT_EQ(x.to_vector<float>(), y.to_vector<float>());
  }
  EXPECT_EQ(a.evaluations(), b.evaluations());
}

// A step whose third evaluation overflows leaves parameters and state as they were, and the scale falls.
TEST(Lbfgs, RollsBackUnderAScaler) {
  const std::vector<double> start{2, -1, 3};
  Tensor x = tensor(start, {.dtype = f32, .requires_grad = true});
  LBFGS optimizer({{"x", x}}, {.max_iter = 5, .line_search = LineSearch::strong_wolfe});
  amp::GradScaler scaler{{.init_scale = 1024}};
  int calls = 0, overflow_at = 3;
  const auto closure = [&] {
    optimizer.zero_grad();
    Tensor loss = quadratic(x);
    scaler.scale(++calls == overflow_at ? loss * INFINITY : loss).backward();
    return loss;
  };
  auto result = scaler.step(optimizer, closure);
  scaler.update();
  EXPECT_FALSE(result.ran());
  EXPECT_EQ(result.first_overflow(), "x");
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(x.to_vector<double>(), start);
  EXPECT_EQ(scaler.get_scale(), 512);
  EXPECT_EQ(optimizer.evaluations(), 0);
  // Without an overflow it goes the way of the optimizer alone: a scale of a power of two changes no bit.
  overflow_at = -1;
  Tensor y = tensor(start, {.dtype = f32, .requires_grad = true});
  LBFGS alone({{"y", y}}, {.max_iter = 5, .line_search = LineSearch::strong_wolfe});
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(scaler.step(optimizer, closure).ran());
    scaler.update();
    alone.step([&] {
      alone.zero_grad();
      const Tensor loss = quadratic(y);
      loss.backward();
      return loss;
    });
    EXPECT_EQ(x.to_vector<float>(), y.to_vector<float>());
  }
  // The minimum solves A x = b.
  Tensor z = x.detach();
  const Tensor a = tensor({3, 1, 0, 1, 2, 0.5, 0, 0.5, 1}, {3, 3});
  expect_near(mv(a, z).to_vector<double>(), {1, -2, 0.5}, 3.6 * f32_bound(1e-5 / 3.6),
              "gradient");  // 3.6: the norm of A
}

// An overflow in the middle of a training, when there is a history of steps: the next ones go on as if it had not been.
TEST(Lbfgs, AnOverflowLeavesTheHistoryAlone) {
  Tensor x = tensor({-1.2, 1}, {.requires_grad = true}), y = tensor({-1.2, 1}, {.requires_grad = true});
  const optim::LBFGSOptions options{.max_iter = 4, .history_size = 3, .line_search = LineSearch::strong_wolfe};
  LBFGS scaled({{"x", x}}, options), alone({{"y", y}}, options);
  amp::GradScaler scaler{{.init_scale = 256, .growth_interval = 100}};
  int calls = 0;
  bool bad = false;
  const auto closure = [&] {
    scaled.zero_grad();
    const Tensor loss = rosenbrock(x);
    ++calls;
    // The second evaluation is the line search's first: the parameters have left their place.
    scaler.scale(bad && calls == 2 ? loss * INFINITY : loss).backward();
    return loss;
  };
  for (int i = 0; i < 8; ++i) {
    calls = 0;
    bad = i == 3;
    const auto before = x.to_vector<float>();
    const auto evaluations = scaled.evaluations();
    const double loss_before = rosenbrock(x.detach()).item<double>();
    const auto result = scaler.step(scaled, closure);
    scaler.update();
    EXPECT_EQ(result.ran(), !bad);
    EXPECT_EQ(result.loss().item<double>(), loss_before);
    if (bad) {
      EXPECT_EQ(calls, 2);
      EXPECT_EQ(x.to_vector<float>(), before);
      EXPECT_EQ(scaled.evaluations(), evaluations);
      EXPECT_EQ(scaler.get_scale(), 128);
      EXPECT_EQ(scaler.growth_tracker(), 0);
      continue;
    }
    alone.step([&] {
      alone.zero_grad();
      const Tensor loss = rosenbrock(y);
      loss.backward();
      return loss;
    });
    EXPECT_EQ(x.to_vector<float>(), y.to_vector<float>()) << i;
    // One step is one step towards growth, however many evaluations it took.
    EXPECT_GT(calls, 1);
    EXPECT_EQ(scaler.growth_tracker(), i < 3 ? i + 1 : i - 3);
  }
}

// Least squares under autocast in f16, from a scale at which the gradients overflow. The columns of x are orthogonal
// and the target is in their span, so that mse is |w - w*|^2 and the minimum is w*, whose values f16 holds. The
// gradient is 0 where the rounded predictions are the targets: within half a unit of f16's last place (2^-9 at the
// largest, 4.5), and w - w* = x' (x w - x w*) / 8 is no larger; the rounding of the weights adds half a unit of theirs,
// 2^-10 at 2. Float32 by the same way is the reference, with its half units 2^-22 and 2^-23.
TEST(Lbfgs, TrainsInF16LikeInFloat32) {
  const std::vector<double> best{1.5, -0.75, 0.25, 2};
  // Hadamard's matrix of order 4, twice, with the signs of the second half turned.
  const Tensor x = tensor(
      {1, 1, 1, 1, 1, -1, 1, -1, 1, 1, -1, -1, 1, -1, -1, 1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1, 1, 1, -1, 1, 1, -1},
      {8, 4});
  const Tensor target = mv(x, tensor(best, {4}));
  const auto train = [&](bool low, int* skipped) {
    Tensor w = zeros({1, 4}, {.requires_grad = true});
    LBFGS optimizer({{"w", w}}, {.max_iter = 4, .line_search = LineSearch::strong_wolfe});
    amp::GradScaler scaler{{.init_scale = 0x1p24, .enabled = low}};
    for (int i = 0; i < 30; ++i) {
      const auto before = w.to_vector<float>();
      const auto step = scaler.step(optimizer, [&] {
        optimizer.zero_grad();
        Tensor loss;
        {
          amp::Autocast autocast{{.dtype = f16, .enabled = low}};
          const Tensor predicted = linear(x, w);
          EXPECT_EQ(predicted.dtype(), low ? f16 : f32);
          loss = mse_loss(flatten(predicted), target);
        }
        scaler.scale(loss).backward();
        return loss;
      });
      scaler.update();
      if (!step.ran()) {
        ++*skipped;
        EXPECT_EQ(w.to_vector<float>(), before);
      }
    }
    return w.to_vector<double>();
  };
  int skipped = 0, none = 0;
  const auto wide = train(false, &none), low = train(true, &skipped);
  EXPECT_EQ(none, 0);
  // At the start the largest gradient of a prediction is 2 / 8 * |x w*| = 4.5 / 4, times 2^24: it fits f16 (below 2^16)
  // from a scale of 2^15 on, nine halvings later.
  EXPECT_EQ(skipped, 9);
  for (std::size_t i = 0; i < best.size(); ++i) {
    EXPECT_NEAR(wide[i], best[i], 4 * 0x1p-24 * 4.5) << i;
    EXPECT_NEAR(low[i], best[i], 0x1p-9 + 0x1p-10) << i;
  }
}

// Steps of much less than a unit of bf16 add up in the master weights.
TEST(Lbfgs, LowPrecisionWeightsMove) {
  Tensor x = tensor({1}, {.dtype = bf16, .requires_grad = true});
  LBFGS optimizer({{"x", x}}, {.lr = 1e-3, .max_iter = 1});
  for (int i = 0; i < 100; ++i) {
    optimizer.step([&] {
      optimizer.zero_grad();
      const Tensor loss = sum(x);
      loss.backward();
      return loss;
    });
  }
  EXPECT_NEAR(x.item<double>(), 0.9, 0x1p-8);
}

}  // namespace
}  // namespace halfstep
