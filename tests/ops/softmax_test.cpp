// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/softmax.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "halfstep/autograd/gradcheck.h"
#include "halfstep/ops/create.h"
#include "tests/support/op_golden.h"

namespace halfstep {
namespace {

using test::GoldenEntry;
using Values = std::vector<double>;
using Tensors = std::vector<Tensor>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

SoftmaxFuncOptions options_of(const GoldenEntry& e) {
  if (e.has("dtype")) return {.dtype = e.text("dtype") == "f16" ? f16 : bf16};
  return {};
}
Tensors call_softmax(const GoldenEntry& e, const Tensors& in) {
  return {softmax(in[0], e.integer("dim"), options_of(e))};
}
Tensors call_log_softmax(const GoldenEntry& e, const Tensors& in) {
  return {log_softmax(in[0], e.integer("dim"), options_of(e))};
}

TEST(Softmax, AgreesWithPyTorch) {
  test::check_op_goldens("softmax", call_softmax);
  test::check_op_goldens("log_softmax", call_log_softmax);
}
TEST(Softmax, FollowsThePolicy) {
  test::check_policy_goldens("softmax", call_softmax);
  test::check_policy_goldens("log_softmax", call_log_softmax);
}

TEST(Softmax, LargeLogitsDontOverflow) {
  const Tensor x = tensor(Values{60000, 60000, -60000}, {3}, {.dtype = f16});
  EXPECT_EQ(softmax(x, 0).to_vector<double>(), (Values{0.5, 0.5, 0}));
  EXPECT_EQ(softmax(x, 0).dtype(), f16);
}

TEST(Softmax, MaskedElementsAreZeroAndAFullyMaskedRowIsNaN) {
  const Tensor x = tensor(Values{0, -kInfinity, 0, -kInfinity, -kInfinity, -kInfinity}, {2, 3});
  const auto y = softmax(x, 1).to_vector<double>();
  EXPECT_EQ((Values{y[0], y[1], y[2]}), (Values{0.5, 0, 0.5}));
  EXPECT_TRUE(std::isnan(y[3]) && std::isnan(y[4]) && std::isnan(y[5]));
  const Tensor low = tensor(Values{lowest_finite(f32), lowest_finite(f32)}, {2});
  EXPECT_EQ(softmax(low, 0).to_vector<double>(), (Values{0.5, 0.5}));
}

TEST(Softmax, NaNSpreadsOverItsRowOnly) {
  const Tensor x = tensor(Values{0, NAN, 0, 1, 1, 1}, {2, 3});
  const auto y = softmax(x, 1).to_vector<double>();
  EXPECT_TRUE(std::isnan(y[0]) && std::isnan(y[1]) && std::isnan(y[2]));
  EXPECT_NEAR(y[3], 1.0 / 3, 1e-7);
}

// Rows longer than the kernel's block, in each storage type, against float64 sums. A result's error is the rounding of
// its storage and of the exponential and the sum in float32: a few units.
TEST(Softmax, LongRowsInEveryDtype) {
  const std::int64_t n = 10000;
  Values values;
  for (std::int64_t i = 0; i < n; ++i) values.push_back(std::sin(static_cast<double>(i)) * 4);
  for (DType dtype : {f32, f64, f16, bf16}) {
    const Tensor x = tensor(values, {1, n}, {.dtype = dtype});
    const auto rounded = x.to_vector<double>();
    double sum = 0;
    for (double v : rounded) sum += std::exp(v);
    const auto y = softmax(x, 1).to_vector<double>(), l = log_softmax(x, 1).to_vector<double>();
    const double u = dtype == f64 ? 0x1p-46 : dtype == f32 ? 0x1p-24 : dtype == f16 ? 0x1p-11 : 0x1p-8;
    const double inner = dtype == f64 ? 0 : 8 * 0x1p-24;
    for (std::int64_t i = 0; i < n; ++i) {
      const auto j = static_cast<std::size_t>(i);
      const double p = std::exp(rounded[j]) / sum, lp = rounded[j] - std::log(sum);
      ASSERT_NEAR(y[j], p, (u + inner) * p + (dtype == f16 ? 0x1p-25 : 0)) << name(dtype) << " " << i;
      ASSERT_NEAR(l[j], lp, u * std::abs(lp) + inner * 16) << name(dtype) << " " << i;
    }
  }
}

TEST(Softmax, StridedAndEmptyInputs) {
  const Tensor x = tensor(Values{1, 2, 3, 4, 5, 6}, {2, 3}, {.dtype = f64});
  EXPECT_EQ(softmax(x.t(), 0).to_vector<double>(), softmax(x, 1).t().contiguous().to_vector<double>());
  EXPECT_EQ(log_softmax(x.slice(1, 0, 3, 2), 1).to_vector<double>(),
            log_softmax(x.slice(1, 0, 3, 2).clone(MemoryFormat::contiguous), 1).to_vector<double>());
  EXPECT_EQ(softmax(empty({0, 3}), 1).sizes(), (Shape{0, 3}));
  EXPECT_EQ(softmax(empty({3, 0}), 1).sizes(), (Shape{3, 0}));
  EXPECT_EQ(softmax(full({}, 7), 0).item<double>(), 1);
}

TEST(Softmax, FirstAndSecondGradients) {
  Values values;
  for (int i = 0; i < 24; ++i) values.push_back(std::sin(i));
  const Tensor x = tensor(values, {2, 3, 4}, {.dtype = f64, .requires_grad = true});
  const Tensor t = x.detach().transpose(0, 2).requires_grad_();
  for (const Tensor& in : {x, t}) {
    for (int dim : {0, 1, 2}) {
      const auto f = [dim](const Tensors& v) { return Tensors{softmax(v[0], dim), log_softmax(v[0], dim)}; };
      gradcheck(f, {in});
      gradgradcheck(f, {in});
    }
  }
}

TEST(Softmax, Errors) {
  EXPECT_THROW(softmax(ones({2, 3}), 2), ShapeError);
  EXPECT_THROW(softmax(ones({2, 3}, {.dtype = i64}), 1), DTypeError);
  EXPECT_THROW(softmax(ones({2, 3}), 1, {.dtype = i64}), DTypeError);
  EXPECT_THROW(softmax(Tensor{}, 0), Error);
}

}  // namespace
}  // namespace halfstep
