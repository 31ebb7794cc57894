// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/sgd.h"

namespace halfstep {
namespace {

using amp::GradScaler;
using Values = std::vector<double>;
constexpr double kInf = std::numeric_limits<double>::infinity();

Tensor parameter(const Values& values, const Shape& sizes, DType dtype) {
  return tensor(values, sizes, {.dtype = dtype, .requires_grad = true});
}

// Unscaling in the optimizer's pass gives the bits that a pass of its own gives: in gradients, parameters and states.
template <class Fused, class Options>
void expect_same_as_unfused(const Options& options) {
  struct Plain : Fused {
    using Fused::Fused;
    bool unscales() const override { return false; }
  };
  for (const bool overflow : {false, true}) {
    NamedTensors sets[2];
    for (NamedTensors& set : sets) {
      for (const DType dtype : {f32, f64, f16, bf16}) {
        for (const DType grad_dtype : {f32, f64, f16, bf16}) {
          for (const std::int64_t n : {5, 1000, dtype == grad_dtype ? 20000 : 33}) {
            Values values, gradients;
            for (std::int64_t i = 0; i < 2 * n; ++i) {
              values.push_back(std::sin(static_cast<double>(i)));
              gradients.push_back(3e-4 * std::cos(static_cast<double>(7 * i)));
            }
            if (overflow && dtype == f16 && n == 1000) gradients[1999] = kInf;
            const Tensor p = parameter(values, {2, n}, dtype);
            // Every other one turned, so that it is laid out anew.
            const Tensor g = tensor(gradients, set.size() % 2 ? Shape{2, n} : Shape{n, 2}, {.dtype = grad_dtype});
            p.set_grad(set.size() % 2 ? g : g.t());
            set.push_back({"p" + std::to_string(set.size()), p});
          }
        }
      }
    }
    Fused fused(sets[0], options);
    Plain plain(sets[1], options);
    ASSERT_TRUE(fused.unscales());
    GradScaler a{{.init_scale = 3}}, b{{.init_scale = 3}};  // a scale that rounds
    for (GradScaler* scaler : {&a, &b}) scaler->scale(zeros({}));
    const auto first = a.step(fused), second = b.step(plain);
    ASSERT_EQ(first.ran(), !overflow);
    ASSERT_EQ(first.overflows(), second.overflows());
    for (std::size_t i = 0; i < sets[0].size(); ++i) {
      const Tensor &p = sets[0][i].tensor, &q = sets[1][i].tensor;
      ASSERT_EQ(p.to_vector<double>(), q.to_vector<double>()) << i;
      ASSERT_EQ(p.grad().dtype(), q.grad().dtype()) << i;
      ASSERT_EQ(p.grad().to_vector<double>(), q.grad().to_vector<double>()) << i;
    }
    const optim::OptimizerState s = fused.state_dict(), t = plain.state_dict();
    ASSERT_EQ(s.tensors.size(), t.tensors.size());
    for (std::size_t i = 0; i < s.tensors.size(); ++i) {
      ASSERT_EQ(s.tensors[i].tensor.to_vector<double>(), t.tensors[i].tensor.to_vector<double>()) << s.tensors[i].name;
    }
    // The gradients are unscaled now: dividing them again is a mistake that is named.
    EXPECT_THROW(a.unscale_(fused), AmpError);
  }
}

TEST(FusedUnscale, UnscalingInTheOptimizersPassChangesNoBit) {
  expect_same_as_unfused<optim::SGD>(optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
  expect_same_as_unfused<optim::Adam>(optim::AdamOptions{.lr = 0.1});
  expect_same_as_unfused<optim::SGD>(optim::SGDOptions{.lr = 0.1, .low_precision = optim::LowPrecision::kahan});
}

}  // namespace
}  // namespace halfstep
