// SPDX-License-Identifier: Apache-2.0
// Factors of 0 beside infinite weights, and optimizers with nothing to train. Expected values: PyTorch 2.15, two steps
// with a gradient of 1.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/ema.h"
#include "halfstep/optim/lbfgs.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/log.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
using Values = std::vector<double>;
using Made = std::unique_ptr<optim::Optimizer>;

struct Case {
  const char* name;
  std::function<Made(const NamedTensors&)> make;
  double finite;      // the third weight after two steps, from 1
  double infinite;    // the fourth, whose first gradient is infinite: -inf or NaN
  const char* state;  // and one of the states: the weights' infinities aren't in it
  double moment;
};

const std::vector<Case>& cases() {
  using namespace optim;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  static const std::vector<Case> all = {
      {"SGD", [](auto& p) { return std::make_unique<SGD>(p, SGDOptions{.lr = 0.1}); }, 0.8, -kInf, nullptr, 0},
      {"momentum", [](auto& p) { return std::make_unique<SGD>(p, SGDOptions{.lr = 0.1, .momentum = 0.9}); }, 0.71,
       -kInf, "momentum_buffer", 1.9},
      {"Nesterov",
       [](auto& p) { return std::make_unique<SGD>(p, SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true}); },
       0.539, -kInf, "momentum_buffer", 1.9},
      {"dampening",
       [](auto& p) { return std::make_unique<SGD>(p, SGDOptions{.lr = 0.1, .momentum = 0.9, .dampening = 1}); }, 0.81,
       -kInf, "momentum_buffer", 0.9},
      {"Adam", [](auto& p) { return std::make_unique<Adam>(p, AdamOptions{.lr = 0.1}); }, 0.8, nan, "exp_avg", 0.19},
      {"AMSGrad", [](auto& p) { return std::make_unique<Adam>(p, AdamOptions{.lr = 0.1, .amsgrad = true}); }, 0.8, nan,
       "max_exp_avg_sq", 0.001999},
      {"AdamW without decay",
       [](auto& p) { return std::make_unique<AdamW>(p, AdamWOptions{.lr = 0.1, .weight_decay = 0}); }, 0.8, nan,
       "exp_avg_sq", 0.001999},
      {"AdamW", [](auto& p) { return std::make_unique<AdamW>(p, AdamWOptions{.lr = 0.1}); }, 0.798101, nan, "exp_avg",
       0.19},
  };
  return all;
}

TEST(EdgeValues, AnInfiniteWeightStaysInfiniteWithoutWeightDecay) {
  for (const Case& c : cases()) {
    for (const DType dtype : {f32, f64, bf16}) {
      SCOPED_TRACE(std::string(c.name) + " " + name(dtype));
      // Enough elements for whole vectors and a rest.
      constexpr int kRepeats = 5;
      Values start, first, second;
      for (int i = 0; i < kRepeats; ++i) {
        for (const double v : {kInf, -kInf, 1.0, 1.0}) start.push_back(v);
        for (const double v : {1.0, 1.0, 1.0, kInf}) first.push_back(v);
        for (int k = 0; k < 4; ++k) second.push_back(1);
      }
      const Tensor w = tensor(start, {.dtype = dtype, .requires_grad = true});
      const Made optimizer = c.make({{"w", w}});
      for (const Values& g : {first, second}) {
        w.set_grad(tensor(g, {.dtype = dtype}));
        optimizer->step();
      }
      const Values got = w.to_vector<double>();
      const double tolerance = dtype == bf16 ? 4e-3 : 1e-6;
      for (std::size_t i = 0; i < got.size(); i += 4) {
        EXPECT_EQ(got[i], kInf);
        EXPECT_EQ(got[i + 1], -kInf);
        EXPECT_NEAR(got[i + 2], c.finite, tolerance);
        // Adam's moment of an infinite gradient: infinity by infinity.
        EXPECT_TRUE(std::isnan(c.infinite) ? std::isnan(got[i + 3]) : got[i + 3] == c.infinite) << got[i + 3];
      }
      if (!c.state) continue;
      for (const NamedTensor& t : optimizer->state_dict().tensors) {
        if (t.name != std::string("w.") + c.state) continue;
        const Values moments = t.tensor.to_vector<double>();
        for (std::size_t i = 0; i < moments.size(); ++i) {
          if (i % 4 == 3) continue;
          EXPECT_NEAR(moments[i], c.moment, 1e-6) << t.name << " " << i;
        }
      }
    }
  }
}

TEST(EdgeValues, AnAverageThatNeverMovesTakesNothingOfAnInfinity) {
  Tensor w = tensor(Values{1, 2}, {.dtype = f32});
  optim::EMA ema({{"w", w}}, {.decay = 1});
  ema.update();  // the first takes the values as they are
  w.copy_(tensor(Values{kInf, 5}));
  ema.update();
  EXPECT_EQ(ema.state_dict().tensors[0].tensor.to_vector<double>(), (Values{1, 2}));
}

TEST(NothingToTrain, AnOptimizerWithoutParametersIsRefused) {
  for (const auto& make :
       std::vector<std::function<void()>>{[] { optim::SGD({}, {.lr = 0.1}); }, [] { optim::Adam({}, {.lr = 0.1}); },
                                          [] { optim::AdamW({}, {.lr = 0.1}); }, [] { optim::LBFGS({}, {}); },
                                          [] { optim::EMA({}, {.decay = 0.5}); }}) {
    const std::string text = test::error_of<Error>(make);
    EXPECT_NE(text.find("got none"), std::string::npos) << text;
  }
  // An empty group beside another is what splitting parameters by a rule may give.
  const Tensor w = ones({2}).requires_grad_();
  optim::SGD sgd({{"w", w}}, {.lr = 0.5});
  sgd.add_param_group({}, {.lr = 0.1});
  w.set_grad(ones({2}));
  sgd.step();
  EXPECT_EQ(w.to_vector<double>(), (Values{0.5, 0.5}));
}

TEST(NothingToTrain, StepsThatCanChangeNothingAreWarnedOf) {
  std::vector<std::string> said;
  set_log_sink([&](LogLevel, std::string_view text) { said.emplace_back(text); });
  const Tensor w = ones({2}), v = ones({3}).requires_grad_();
  optim::SGD frozen({{"frozen.weight", w}}, {.lr = 0.5});
  frozen.step({ones({2})});  // given gradients need no record
  EXPECT_TRUE(said.empty());
  frozen.step();
  frozen.step();
  optim::SGD waits({{"v", v}}, {.lr = 0.5});
  waits.step();  // no gradient yet
  set_log_sink({});
  ASSERT_EQ(said.size(), 1u);
  for (const char* part : {"SGD: none of the 1 parameters requires grad", "frozen.weight [2]", "requires_grad_()"}) {
    EXPECT_NE(said[0].find(part), std::string::npos) << said[0];
  }
}

}  // namespace
}  // namespace halfstep
