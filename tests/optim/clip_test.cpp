// SPDX-License-Identifier: Apache-2.0
#include "halfstep/optim/clip.h"

#include <gtest/gtest.h>

#include <cmath>

#include "halfstep/ops/create.h"

namespace halfstep {
namespace {

NamedTensors with_gradients(const std::vector<Tensor>& gradients) {
  NamedTensors result;
  for (const Tensor& g : gradients) {
    Tensor p = zeros(g.sizes(), {.dtype = g.dtype(), .requires_grad = true});
    p.set_grad(g);
    result.push_back({"p" + std::to_string(result.size()), p});
  }
  return result;
}

TEST(Clip, NormOfAllGradientsTogether) {
  for (DType dtype : {f32, f64, f16, bf16}) {
    const auto p = with_gradients({tensor({3}, {.dtype = dtype}), tensor({0, -4}, {.dtype = dtype})});
    EXPECT_EQ(optim::grad_norm(p).item<double>(), 5);
    EXPECT_EQ(optim::grad_norm(p, INFINITY).item<double>(), 4);
    const Tensor before = optim::clip_grad_norm_(p, 1);
    EXPECT_EQ(before.item<double>(), 5);
    const double unit = dtype == bf16 ? 0x1p-8 : dtype == f16 ? 0x1p-11 : 0x1p-23;
    EXPECT_NEAR(p[0].tensor.grad().item<double>(), 3 / 5.000001, unit);
    EXPECT_NEAR(p[1].tensor.grad().to_vector<double>()[1], -4 / 5.000001, unit);
    optim::clip_grad_norm_(p, 10);
    EXPECT_NEAR(p[0].tensor.grad().item<double>(), 3 / 5.000001, unit) << "small gradients stay";
  }
}

TEST(Clip, SquaresMayLeaveTheRange) {
  const auto p = with_gradients({full({3000}, 1e30), full({2}, 1e-30)});
  EXPECT_FLOAT_EQ(optim::grad_norm(p).item<float>(), static_cast<float>(std::sqrt(3000.0) * 1e30));
}

// Wherever it is, and whatever comes after it.
TEST(Clip, ANaNIsTheNormOfEveryKind) {
  for (const double norm_type : {0.5, 1.0, 2.0, static_cast<double>(INFINITY)}) {
    for (int place = 0; place < 3; ++place) {
      std::vector<double> values(100, 1);
      values[static_cast<std::size_t>(place) * 49] = NAN;
      const auto p = with_gradients({tensor({2, 3}), tensor(values, {100}), tensor({4})});
      EXPECT_TRUE(std::isnan(optim::grad_norm(p, norm_type).item<double>())) << norm_type << ' ' << place;
    }
  }
}

TEST(Clip, Values) {
  const auto p = with_gradients({tensor({-3, -0.5, 0, 2, NAN}), tensor({5, 6}).slice(0, 0, 2, 2)});
  optim::clip_grad_value_(p, 1);
  const auto v = p[0].tensor.grad().to_vector<float>();
  EXPECT_EQ(std::vector<float>(v.begin(), v.end() - 1), (std::vector<float>{-1, -0.5, 0, 1}));
  EXPECT_TRUE(std::isnan(v.back()));
  EXPECT_EQ(p[1].tensor.grad().item<float>(), 1);
}

TEST(Clip, NonFiniteNormsAreAnErrorOnlyWhenAsked) {
  const auto p = with_gradients({tensor({1, INFINITY})});
  EXPECT_THROW(optim::clip_grad_norm_(p, 1, {.error_if_nonfinite = true}), Error);
  EXPECT_TRUE(std::isinf(optim::clip_grad_norm_(p, 1).item<double>()));
  EXPECT_THROW(optim::clip_grad_norm_(p, -1), Error);
  EXPECT_EQ(optim::grad_norm({}).item<double>(), 0);
}

}  // namespace
}  // namespace halfstep
