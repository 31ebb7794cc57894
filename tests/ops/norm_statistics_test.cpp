// SPDX-License-Identifier: Apache-2.0
// The statistics that batch_norm and batch_norm_act take in one pass, against two passes in float64; what has no
// variance, in layer_norm and group_norm too.
#include <gtest/gtest.h>

#include <cmath>

#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/norm.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"

namespace halfstep {
namespace {

using Values = std::vector<double>;
constexpr double kFloat = 0x1p-24;  // a rounding of float32

Tensor values(const Shape& sizes, DType dtype, double mean = 0) {
  return (randn(sizes, {.dtype = f64}) + mean).to(dtype);
}

// Mean and deviation of channels [N, C, H, W] by the op, against sums in float64: the deviation to 16 roundings (sums
// of some dozens of terms, the square root), whatever the mean.
void check_statistics(const Tensor& x, double bound) {
  const std::int64_t channels = x.size(1);
  const Tensor mean = zeros({channels}, {.dtype = f64}), var = zeros({channels}, {.dtype = f64});
  batch_norm(x, {.running_mean = mean, .running_var = var, .training = true, .momentum = 1});
  const Values data = x.to_vector<double>(), m = mean.to_vector<double>(), v = var.to_vector<double>();
  const std::int64_t n = x.size(0), inner = x.numel() / n / channels;
  for (std::int64_t c = 0; c < channels; ++c) {
    const auto at = [&](std::int64_t i) {
      return data[static_cast<std::size_t>((i / inner * channels + c) * inner + i % inner)];
    };
    double exact = 0, squares = 0;
    const auto count = static_cast<double>(n * inner);
    for (std::int64_t i = 0; i < n * inner; ++i) exact += at(i) / count;
    for (std::int64_t i = 0; i < n * inner; ++i) squares += (at(i) - exact) * (at(i) - exact) / (count - 1);
    ASSERT_NEAR(m[static_cast<std::size_t>(c)], exact, kFloat * std::abs(exact) + 4 * kFloat * std::sqrt(squares)) << c;
    ASSERT_NEAR(v[static_cast<std::size_t>(c)], squares, bound * squares) << c;
  }
}
TEST(BatchNormStatistics, LargeMeansKeepTheVariance) {
  manual_seed(5);
  for (const MemoryFormat format : {MemoryFormat::channels_last, MemoryFormat::contiguous}) {
    for (const Shape& sizes : {Shape{4, 16, 20, 20}, Shape{8, 3, 32, 32}, Shape{2, 300, 14, 15}, Shape{3, 2100, 5, 5},
                               Shape{2, 2049, 5, 5}, Shape{5, 1, 40, 41}, Shape{1, 40, 1, 3}}) {
      for (const double mean : {0.0, 1000.0, -1e5}) {
        check_statistics(values(sizes, f32, mean).contiguous(format), 16 * kFloat);
      }
    }
    // 2^-6 around 8: f16 and bf16 have the numbers exactly, the statistics are float32.
    check_statistics((floor(rand({4, 24, 15, 15}) * 2) * 0x1p-6 + 8).to(f16).contiguous(format), 16 * kFloat);
    check_statistics((floor(rand({4, 24, 15, 15}) * 2) * 0x1p-4 + 8).to(bf16).contiguous(format), 16 * kFloat);
  }
}
// Samples with means of their own, the first ones far from all others: a shift that is taken from the first values only
// would lose what the others vary by.
TEST(BatchNormStatistics, UnlikeSamples) {
  manual_seed(6);
  for (const MemoryFormat format : {MemoryFormat::channels_last, MemoryFormat::contiguous}) {
    for (const std::int64_t channels : {8, 64, 500}) {
      Tensor x = values({6, channels, 16, 16}, f32);
      x[0].add_(1e4);
      x[3].add_(-300);
      check_statistics(x.contiguous(format), 32 * kFloat);
    }
    // A single value that is far off, at the very start.
    Tensor x = values({4, 16, 32, 32}, f32);
    x[0].select(1, 0).select(1, 0).fill_(3e4);
    check_statistics(x.contiguous(format), 32 * kFloat);
  }
}
TEST(BatchNormStatistics, ConstantsHaveNoVariance) {
  for (const MemoryFormat format : {MemoryFormat::channels_last, MemoryFormat::contiguous}) {
    const Tensor mean = zeros({32}), var = ones({32}), bias = full({32}, 0.75);
    const Tensor x = full({4, 32, 24, 24}, 1234.567).contiguous(format);
    const Tensor y =
        batch_norm(x, {.bias = bias, .running_mean = mean, .running_var = var, .training = true, .momentum = 1});
    for (const float v : var.to_vector<float>()) EXPECT_EQ(v, 0);
    for (const float v : mean.to_vector<float>()) EXPECT_EQ(v, 1234.567f);
    for (const float v : y.to_vector<float>()) ASSERT_EQ(v, 0.75f);
    // Whatever the number and however many there are.
    for (const Shape& sizes : {Shape{3, 1, 37, 41}, Shape{7, 3, 13, 11}, Shape{2, 2049, 5, 3}, Shape{1, 40, 1, 3}}) {
      for (const float value : {0.1f, -1.0f / 3, 98765.43f, 3e-5f}) {
        const Tensor own_mean = zeros({sizes[1]}), own_var = ones({sizes[1]});
        batch_norm(full(sizes, value).contiguous(format),
                   {.running_mean = own_mean, .running_var = own_var, .training = true, .momentum = 1});
        for (const float v : own_var.to_vector<float>()) ASSERT_EQ(v, 0) << value;
        for (const float v : own_mean.to_vector<float>()) ASSERT_EQ(v, value);
      }
    }
  }
}
// Rows of equal or nearly equal elements, of all the lengths that kernels tell apart: the mean that is rounded leaves a
// variance that must not come out below 0.
TEST(RowNormStatistics, ConstantRowsAreTheBias) {
  manual_seed(7);
  for (const DType dtype : {f32, f64, f16, bf16}) {
    const DType parameters = dtype == f64 ? f64 : f32;
    for (const std::int64_t n : {1, 7, 32, 1000, 1536, 8192, 8200, 20001}) {
      const Tensor bias = rand({n}, {.dtype = parameters});
      const auto expected = bias.to(dtype).to_vector<double>();
      for (const double value : {1e8, -3.3e9, 1234.567, 0.0}) {
        if (dtype == f16 && std::abs(value) > 65504) continue;
        const Tensor x = full({3, n}, value, {.dtype = dtype});
        const Tensor y = layer_norm(x, {n}, {.bias = bias});
        for (int row = 0; row < 3; ++row) ASSERT_EQ(y[row].to_vector<double>(), expected) << name(dtype) << n << value;
        const Tensor shared = group_norm(x.view({3, 1, n}), 1, {.bias = full({1}, 0.75, {.dtype = parameters})});
        for (const double v : shared.to_vector<double>()) ASSERT_EQ(v, 0.75) << name(dtype) << n << value;
      }
    }
  }
}
// One element a little larger than the others, with an epsilon too small to hide a variance below 0.
TEST(RowNormStatistics, NearlyConstantRowsHaveNoNaN) {
  for (const std::int64_t n : {24, 500, 1024, 4096, 8192, 8195, 20001}) {
    for (const float value : {1.1f, 3.3f, 1e8f, 7.77e9f}) {
      for (const std::int64_t place : {std::int64_t{0}, n / 3, n - 1}) {
        Tensor x = full({2, n}, value);
        x[0][place].fill_(std::nextafter(value, 1e30f));
        for (const float v : layer_norm(x, {n}, {.eps = 1e-30}).to_vector<float>()) {
          ASSERT_TRUE(std::isfinite(v)) << n << ", " << value << ", " << place;
        }
      }
    }
  }
}

}  // namespace
}  // namespace halfstep
