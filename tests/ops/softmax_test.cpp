// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/softmax.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "halfstep/autograd/engine.h"
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

TEST(Softmax, ColumnsSideBySide) {
  // Beside float64, which goes row by row. Sums of n terms in float32, at most 64 at a time, and the exponential:
  // within 70 units of 2^-24; a result is rounded once more.
  for (const DType dtype : {f32, bf16, f16}) {
    const double u = (dtype == f32 ? 0x1p-24 : dtype == f16 ? 0x1p-11 : 0x1p-8) + 70 * 0x1p-24;
    for (const std::int64_t n : {1, 2, 63, 64, 65, 200}) {
      for (const std::int64_t width : {16, 17, 255, 256, 257, 530}) {
        SCOPED_TRACE(testing::Message() << name(dtype) << " " << n << " x " << width);
        Values v(static_cast<std::size_t>(2 * n * width)), w(v.size());
        for (std::size_t i = 0; i < v.size(); ++i) {
          v[i] = std::sin(static_cast<double>(i) * 1.7) * 4;
          w[i] = static_cast<double>(i % 7) / 8 - 0.25;
        }
        const Tensor x = tensor(v, {2, n, width}, {.dtype = dtype}).requires_grad_();
        const Tensor wide = x.detach().to(f64).requires_grad_();
        const Tensor g = tensor(w, {2, n, width}, {.dtype = dtype});
        for (const bool logarithm : {false, true}) {
          const auto f = [&](const Tensor& t) { return logarithm ? log_softmax(t, 1) : softmax(t, 1); };
          const Tensor y = f(x), expected = f(wide);
          const auto got = y.to_vector<double>(), exact = expected.to_vector<double>();
          const auto dx = grad({y}, {x}, {.grad_outputs = {g}})[0].to_vector<double>();
          const auto d = grad({expected}, {wide}, {.grad_outputs = {g.to(f64)}})[0].to_vector<double>();
          for (std::size_t i = 0; i < got.size(); ++i) {
            ASSERT_NEAR(got[i], exact[i], u * (logarithm ? std::abs(exact[i]) + 8 : exact[i]) + 0x1p-25) << i;
            // The gradient comes from the rounded result.
            ASSERT_NEAR(dx[i], d[i], 8 * u * (logarithm ? 1 + static_cast<double>(n) / 64 : 1) + 0x1p-24) << i;
          }
        }
      }
    }
  }
}

TEST(Softmax, SpecialValuesStayInTheirColumn) {
  Tensor x = zeros({3, 20});
  x[1][2].fill_(std::nan(""));
  x.select(1, 5).fill_(-kInfinity);
  x[0][7].fill_(-kInfinity);
  x[2][9].fill_(kInfinity);
  const auto y = softmax(x, 0).transpose(0, 1).to_vector<double>();
  for (std::size_t c = 0; c < 20; ++c) {
    const Values column(y.begin() + static_cast<std::ptrdiff_t>(3 * c),
                        y.begin() + static_cast<std::ptrdiff_t>(3 * c + 3));
    if (c == 2 || c == 5 || c == 9) {  // infinity - infinity, as in PyTorch
      for (const double p : column) EXPECT_TRUE(std::isnan(p)) << c;
    } else {
      for (std::size_t r = 0; r < 3; ++r) EXPECT_NEAR(column[r], c == 7 ? (r == 0 ? 0 : 0.5) : 1.0 / 3, 1e-7) << c;
    }
  }
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
