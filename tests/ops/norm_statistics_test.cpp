// SPDX-License-Identifier: Apache-2.0
// The statistics that batch_norm and batch_norm_act take in one pass, against two passes in float64.
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
    for (const Shape& sizes :
         {Shape{4, 16, 20, 20}, Shape{8, 3, 32, 32}, Shape{2, 300, 14, 15}, Shape{3, 2100, 5, 5}}) {
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
  }
}

}  // namespace
}  // namespace halfstep
