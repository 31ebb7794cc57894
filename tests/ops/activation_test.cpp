// SPDX-License-Identifier: Apache-2.0
// What tests/ops/pointwise_test.cpp doesn't cover: relu's bits, prelu's shapes, 16-bit gradients, slopes far
// out, dropout.
#include "halfstep/ops/activation.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <numbers>

#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/gradcheck.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep {
namespace {

using Values = std::vector<double>;

TEST(Relu, EveryBitPatternIn16Bits) {
  for (const DType dtype : {f16, bf16}) {
    Tensor x = empty({65536}, {.dtype = dtype, .device = Device{}});
    auto* bits = static_cast<std::uint16_t*>(x.raw_data());
    for (int i = 0; i < 65536; ++i) bits[i] = static_cast<std::uint16_t>(i);
    const Tensor y = relu(x.to(default_device())).to(Device{});
    const auto* got = static_cast<const std::uint16_t*>(y.raw_data());
    const Values in = x.to_vector<double>(), out = y.to_vector<double>();
    for (std::size_t i = 0; i < in.size(); ++i) {
      const bool keep = !(in[i] <= 0);  // NaN too
      // A GPU's conversion makes one NaN of all; other devices may make a NaN quiet, as every conversion does.
      if (std::isnan(in[i]) && default_device().str().starts_with("cuda")) {
        ASSERT_TRUE(std::isnan(out[i])) << name(dtype) << " " << i;
        continue;
      }
      const int quiet = !std::isnan(in[i]) || default_device().is_cpu() ? 0 : dtype == f16 ? 0x200 : 0x40;
      ASSERT_EQ(got[i] | quiet, keep ? bits[i] | quiet : 0) << name(dtype) << " " << i;
    }
  }
}

TEST(Relu, IntegersAndTheGradientOfTheResult) {
  EXPECT_EQ(relu(tensor(Values{-3, 0, 5}, {.dtype = i32})).to_vector<double>(), (Values{0, 0, 5}));
  for (const DType dtype : {f32, f64, f16, bf16}) {
    const Tensor x = tensor(Values{-1, 0, 2, 3}, {.dtype = dtype, .requires_grad = true});
    Tensor y = x * 1;
    relu_(y);
    // The input is gone, the result is enough.
    y.backward(tensor(Values{5, 6, 7, 8}, {.dtype = dtype}));
    EXPECT_EQ(x.grad().to_vector<double>(), (Values{0, 0, 7, 8}));
  }
}

TEST(Prelu, ChannelsAndErrors) {
  const Tensor x = tensor(Values{-1, 2, -3, 4, -5, -6}, {1, 3, 2});
  EXPECT_EQ(prelu(x, tensor(Values{0.5, 2, 10})).to_vector<double>(), (Values{-0.5, 2, -6, 4, -50, -60}));
  EXPECT_THROW(prelu(x, ones({2})), ShapeError);
  EXPECT_THROW(prelu(x, ones({3, 1})), ShapeError);
}

// The fused gradients in 16 bits: one rounding of what float32 gives, which is near the float64 value.
TEST(Activations, GradientsIn16BitsAreRoundedOnce) {
  Values points;
  for (int i = -400; i <= 400; ++i) points.push_back(i / 50.0 + 0.003);
  struct Case {
    const char* name;
    Tensor (*f)(const Tensor&);
  };
  const Case cases[] = {
      {"relu", relu},
      {"sigmoid", sigmoid},
      {"silu", silu},
      {"mish", mish},
      {"logsigmoid", logsigmoid},
      {"hardswish", hardswish},
      {"gelu", [](const Tensor& x) { return gelu(x); }},
      {"gelu tanh", [](const Tensor& x) { return gelu(x, GeluForm::tanh); }},
      {"leaky_relu", [](const Tensor& x) { return leaky_relu(x); }},
      {"elu", [](const Tensor& x) { return elu(x, 0.7); }},
      {"softplus", [](const Tensor& x) { return softplus(x, 2, 5); }},
  };
  for (const Case& c : cases) {
    for (const DType dtype : {f32, f16, bf16}) {
      Tensor x = tensor(points, {.dtype = dtype});
      Tensor wide = x.to(f64);
      x.requires_grad_();
      wide.requires_grad_();
      const Shape n = x.sizes();
      const Values got = grad({c.f(x)}, {x}, {.grad_outputs = {ones(n, {.dtype = dtype})}})[0].to_vector<double>();
      const Values exact =
          grad({c.f(wide)}, {wide}, {.grad_outputs = {ones(n, {.dtype = f64})}})[0].to_vector<double>();
      // sigmoid's reads its result, which is rounded: y (1 - y) moves by at most as much as y does.
      const bool reads_result = std::string(c.name) == "sigmoid";
      const double u = finfo(dtype).eps / 2;
      for (std::size_t i = 0; i < got.size(); ++i) {
        const double own = u * std::fabs(exact[i]) + (dtype == f16 ? 0x1p-25 : 0) + 8 * finfo(f32).eps;
        ASSERT_NEAR(got[i], exact[i], own + (reads_result ? u : 0)) << c.name << " " << name(dtype) << " " << points[i];
      }
    }
  }
}

// Where a slope is next to nothing it keeps its digits, and at infinity it is 0 or 1. Expected from the formulas in
// long double; within 6 units of what the two terms of a slope are.
TEST(Activations, SlopesFarOut) {
  const double infinity = std::numeric_limits<double>::infinity();
  const Values points = {-infinity, -1e30, -125, -110, -104, -95.5, -90, -87.5, -60, -20,  -14.6,   -14,
                         -10,       -5,    -1,   1,    5,    14,    20,  87.5,  100, 1e30, infinity};
  struct Terms {
    long double first, second;
  };
  const auto silu_terms = [](long double x) -> Terms {
    if (std::isinf(x)) return {x > 0 ? 1.0L : 0.0L, 0};
    const long double s = x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x));
    return {s, x * s * (x < 0 ? 1 / (1 + std::exp(x)) : std::exp(-x) / (1 + std::exp(-x)))};
  };
  const auto gelu_terms = [](long double x) -> Terms {
    if (std::isinf(x)) return {x > 0 ? 1.0L : 0.0L, 0};
    const long double bell = std::exp(-x * x / 2) / std::sqrt(2 * std::numbers::pi_v<long double>);
    return {std::erfc(-x / std::numbers::sqrt2_v<long double>) / 2, bell == 0 ? 0 : x * bell};
  };
  for (const bool is_silu : {true, false}) {
    for (const DType dtype : {f32, f64}) {
      const Tensor x = tensor(points, {.dtype = dtype}).requires_grad_();
      const Tensor ones_like_x = ones(x.sizes(), {.dtype = dtype});
      const Values got =
          grad({is_silu ? silu(x) : gelu(x)}, {x}, {.grad_outputs = {ones_like_x}})[0].to_vector<double>();
      const double u = finfo(dtype).eps / 2, tiny = dtype == f32 ? 0x1p-149 : 0x1p-1074;
      for (std::size_t i = 0; i < got.size(); ++i) {
        // In float32 the place is the float's own.
        const long double at = dtype == f32 ? static_cast<float>(points[i]) : points[i];
        const Terms t = is_silu ? silu_terms(at) : gelu_terms(at);
        auto bound = static_cast<double>(6 * u * (std::fabs(t.first) + std::fabs(t.second)) + tiny);
        // Kernels of other devices multiply x by what may be subnormal, and round its square.
        if (!x.device().is_cpu() && std::isfinite(points[i])) {
          bound += static_cast<double>(std::fabs(at) * (tiny + std::fabs(at * t.second) * u));
        }
        EXPECT_NEAR(got[i], static_cast<double>(t.first + t.second), bound)
            << (is_silu ? "silu " : "gelu ") << name(dtype) << " " << points[i];
      }
      EXPECT_EQ(got.front(), 0);
      EXPECT_EQ(got.back(), 1);
    }
  }
}

TEST(Dropout, IsAFunctionOfSeedAndIndexOnly) {
  const Tensor x = ones({100, 1000});
  const double p = 0.3;
  manual_seed(11);
  const std::uint64_t before = default_generator().offset();
  const Tensor y = dropout(x, p);
  EXPECT_EQ(default_generator().offset() - before, 100 * 1000 / 4);
  const Values got = y.to_vector<double>();
  std::int64_t kept = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const bool drop = philox_word({11, before}, i) < bernoulli_threshold(p);
    ASSERT_EQ(got[i], drop ? 0 : static_cast<double>(1 / static_cast<float>(1 - p))) << i;
    kept += !drop;
  }
  // Binomial: five standard deviations.
  EXPECT_NEAR(static_cast<double>(kept), 1e5 * (1 - p), 5 * std::sqrt(1e5 * p * (1 - p)));
  const int threads = num_threads();
  set_num_threads(threads == 1 ? 2 : 1);
  manual_seed(11);
  EXPECT_EQ(dropout(x, p).to_vector<double>(), got);
  set_num_threads(threads);
  EXPECT_NE(dropout(x, p).to_vector<double>(), got);
  // The layout doesn't matter, nor the dtype for which elements go.
  manual_seed(11);
  EXPECT_EQ(dropout(ones({1000, 100}).t(), p).to_vector<double>(), got);
  for (const DType dtype : {f64, f16, bf16}) {
    manual_seed(11);
    const Values other = dropout(ones({100, 1000}, {.dtype = dtype}), p).to_vector<double>();
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(other[i] == 0, got[i] == 0);
  }
  // Lengths that end inside a vector and a block.
  for (const std::int64_t n : {0, 1, 3, 17, 63, 65, 131}) {
    manual_seed(11);
    const Values part = dropout(ones({n}), p).to_vector<double>();
    EXPECT_TRUE(std::equal(part.begin(), part.end(), got.begin()));
  }
}

TEST(Dropout, GradientsDrawTheSameWords) {
  manual_seed(3);
  const Tensor x = ones({6, 7}, {.dtype = f64, .requires_grad = true});
  const Tensor y = dropout(x, 0.5);
  sum(y).backward();
  EXPECT_EQ(x.grad().to_vector<double>(), y.to_vector<double>());
  const auto f = [](const std::vector<Tensor>& in) {
    manual_seed(4);
    return dropout(in[0] * in[0], 0.4);
  };
  const Tensor z = tensor(Values{0.5, -1, 2, 3, 0.25, 1}, {2, 3}, {.dtype = f64, .requires_grad = true});
  gradcheck(f, {z});
  gradgradcheck(f, {z});
}

TEST(Dropout, EdgesAndErrors) {
  const Tensor x = tensor(Values{1, -2, INFINITY, NAN});
  EXPECT_TRUE(dropout(x, 0).is_same(x));
  EXPECT_TRUE(dropout(x, 0.5, false).is_same(x));
  EXPECT_EQ(dropout(x, 1).to_vector<double>(), (Values{0, 0, 0, 0}));
  EXPECT_THROW(dropout(x, 1.5), Error);
  EXPECT_THROW(dropout(x, NAN), Error);
  EXPECT_THROW(dropout(zeros({2}, {.dtype = i64}), 0.5), DTypeError);
}

}  // namespace
}  // namespace halfstep
