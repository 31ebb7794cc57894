// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/reduce.h"

namespace halfstep {
namespace {

// An optimizer of the user's that moves its parameter between evaluations and knows no way back.
class Walker : public amp::OptimizerBase {
 public:
  explicit Walker(const Tensor& p, const std::string& name = "w") : parameters_{{name, p}} {}
  const NamedTensors& named_parameters() const override { return parameters_; }
  void step_unless(const Tensor&, const Tensor&) override {}
  Tensor step_closure(const std::function<Tensor()>& closure) override {
    Tensor loss;
    for (int i = 0; i < 3; ++i) {
      loss = closure();
      const NoGrad no_grad;
      Tensor p = parameters_[0].tensor;
      p.sub_(parameters_[0].tensor.grad());
    }
    return loss;
  }

 private:
  NamedTensors parameters_;
};

TEST(GradScaler, TheScalerItselfTakesParametersBack) {
  const Tensor p = tensor({8}, {1}, {.requires_grad = true});
  Walker walker(p);
  amp::GradScaler scaler{{.init_scale = 4}};
  int calls = 0;
  const auto closure = [&] {
    p.set_grad({});
    const Tensor loss = sum(p * p) * 0.25;
    scaler.scale(++calls == 3 ? loss * INFINITY : loss).backward();
    return loss;
  };
  const auto result = scaler.step(walker, closure);
  EXPECT_FALSE(result.ran());
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(p.item<double>(), 8) << "not the 2 of two halvings";
  EXPECT_EQ(result.loss().item<double>(), 16) << "of the first evaluation";
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 2);
  // The gradient of w^2 / 4 is w / 2: three evaluations, each unscaled, are three halvings.
  EXPECT_TRUE(scaler.step(walker, closure).ran());
  EXPECT_EQ(p.item<double>(), 1);
}

// Gradients that keep their memory from one evaluation to the next are new ones all the same.
TEST(GradScaler, AClosureMayFillItsGradientsWithZeros) {
  const Tensor p = tensor({8}, {1}, {.requires_grad = true});
  Walker walker(p);
  amp::GradScaler scaler{{.init_scale = 4}};
  const auto closure = [&] {
    if (p.grad().defined()) {
      const NoGrad no_grad;
      p.grad().detach().zero_();
    }
    const Tensor loss = sum(p * p) * 0.25;
    scaler.scale(loss).backward();
    return loss;
  };
  EXPECT_TRUE(scaler.step(walker, closure).ran());
  EXPECT_EQ(p.item<double>(), 1);
}

TEST(GradScaler, ParametersWithoutANameAreToldByPlaceAndShape) {
  const Tensor p = tensor({8}, {1}, {.requires_grad = true});
  Walker walker(p, "");
  amp::GradScaler scaler;
  const auto result = scaler.step(walker, [&] {
    const Tensor loss = sum(p * p) * INFINITY;
    scaler.scale(loss).backward();
    return loss;
  });
  EXPECT_EQ(result.first_overflow(), "parameter 0 [1]");
}

}  // namespace
}  // namespace halfstep
