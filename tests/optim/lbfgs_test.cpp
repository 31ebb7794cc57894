// SPDX-License-Identifier: Apache-2.0
#include "halfstep/optim/lbfgs.h"

#include <gtest/gtest.h>

#include <cmath>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/reduce.h"
#include "tests/optim/optim_golden.h"

namespace halfstep {
namespace {

using optim::LBFGS;
using optim::LineSearch;

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
    const bool bowl = e.text("function") == "quadratic";
    const auto closure = [&] {
      optimizer.zero_grad();
      const Tensor loss = bowl ? quadratic(x) : rosenbrock(x);
      loss.backward();
      return loss;
    };
    // In f64 1e-9 of the largest value (the line search magnifies roundings), in f32 the drift of roundings.
    const double bound = e.inputs[0].dtype == "f64" ? 1e-9 * 4 : drift_bound(e, e.integer("steps"));
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
  expect_near(mv(a, z).to_vector<double>(), {1, -2, 0.5}, 1e-5, "gradient");
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
