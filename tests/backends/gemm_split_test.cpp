// SPDX-License-Identifier: Apache-2.0
// Products of float32 and of float16 in parts of bfloat16, on the tiles of AMX or by their model.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/backends/gemm_case.h"
#include "tests/support/threads.h"

namespace halfstep::cpu {
namespace {

using GemmSplit = ByIsa;

// Both orders of each operand in memory, with what is left over of each tile, panel, block and piece of the sum;
// results of each dtype, with and without what follows the sum.
TEST_P(GemmSplit, EveryLayoutAndEpilogue) {
  for (const std::string a : {"rows", "padded", "cols", "cols padded"}) {
    for (const std::string b : {"rows", "padded", "cols", "cols padded"}) {
      for (const auto& [m, n, k] : {std::array{3, 5, 2}, std::array{16, 32, 32}, std::array{17, 33, 34},
                                    std::array{47, 65, 62}, std::array{70, 40, 96}, std::array{5, 100, 7}}) {
        Case t{.m = m, .n = n, .k = k, .layout_a = a, .layout_b = b, .padding = m % 3};
        EXPECT_TRUE(check(t, By::split));
        t.high = true;
        EXPECT_TRUE(check(t, By::split));
        t.a = t.b = t.c = f16;
        EXPECT_TRUE(check(t, By::split));
        if (m % 2 == 0) t.a = t.b = f32;
        t.c = m % 2 == 0 ? f16 : bf16, t.bias = true, t.bias_dtype = n % 2 == 0 ? f32 : bf16, t.relu = n > 60;
        EXPECT_TRUE(check(t, By::split));
        t.c = f32, t.add = true;
        EXPECT_TRUE(check(t, By::split));
      }
    }
  }
  // Sums in several goes, blocks of rows and chunks of columns, of a batch.
  EXPECT_TRUE(check({.m = 40, .n = 50, .k = 1501, .layout_a = "cols", .add = true}, By::split));
  EXPECT_TRUE(check({.m = 560, .n = 70, .k = 600, .layout_b = "cols"}, By::split));
  EXPECT_TRUE(check({.m = 33, .n = 420, .k = 530, .layout_a = "cols"}, By::split));
  EXPECT_TRUE(check({.m = 420, .n = 33, .k = 530, .layout_b = "cols", .bias = true}, By::split));
  EXPECT_TRUE(check({.m = 300, .n = 410, .k = 512}, By::split));
  EXPECT_TRUE(check({.m = 70, .n = 420, .k = 700, .a = f16, .b = f16, .layout_a = "cols"}, By::split));
  EXPECT_TRUE(check({.m = 420, .n = 33, .k = 160, .a = f16, .b = f16, .c = f16, .layout_b = "cols"}, By::split));
  EXPECT_TRUE(check({.m = 20, .n = 40, .k = 64, .layout_b = "cols", .batch = 5}, By::split));
  EXPECT_TRUE(check({.m = 420, .n = 33, .k = 530, .layout_b = "cols", .bias = true, .high = true}, By::split));
  EXPECT_TRUE(check({.m = 40, .n = 50, .k = 1501, .layout_a = "cols", .add = true, .high = true}, By::split));
  EXPECT_FALSE(check({.m = 20, .n = 40, .k = 64, .b = bf16}, By::split));
  EXPECT_FALSE(check({.m = 20, .n = 40, .k = 64, .layout_a = "strided"}, By::split));
}

// Whatever their number and share, threads add up the same, beside what isn't finite too.
TEST_P(GemmSplit, TheSameBitsForAnyThreads) {
  const std::int64_t side = 200, k = 96;
  Matrix a(side, k, f32, "rows", 1), b(k, side, f32, "cols", 2);
  reinterpret_cast<float*>(a.bytes.data())[70 * k] = std::nanf("");
  std::vector<std::uint32_t> before;
  for (const int threads : {1, 2, 3, 4}) {
    const test::ThreadsGuard guard(threads);
    std::vector<std::uint32_t> c(static_cast<std::size_t>(side * side));
    GemmArgs g;
    g.m = g.n = g.ldc = side, g.k = k;
    g.a = a.operand(), g.b = b.operand(), g.c = c.data();
    Context context;
    ASSERT_EQ(gemm_by(GemmPath::split, &context, g), Status::ok);
    if (threads > 1) {
      EXPECT_EQ(c, before) << threads;
    }
    before = c;
  }
  for (const Case& t :
       {Case{.m = 300, .n = 260, .k = 1060, .layout_a = "cols"}, Case{.m = 64, .n = 512, .k = 96, .layout_b = "cols"},
        Case{.m = 520, .n = 97, .k = 96, .layout_b = "cols"},
        // One thread has three blocks of rows for each of two chunks of columns.
        Case{.m = 160, .n = 300, .k = 512, .layout_b = "cols"},
        Case{.m = 300, .n = 260, .k = 1060, .layout_a = "cols", .high = true}}) {
    std::vector<unsigned char> first, again;
    for (const int threads : {1, 2, 3, 4}) {
      const test::ThreadsGuard guard(threads);
      EXPECT_TRUE(check(t, By::split, threads == 1 ? &first : &again));
      if (threads > 1) {
        EXPECT_EQ(first, again) << threads;
      }
    }
  }
}

// Infinities, NaN, numbers that round to an infinity in bfloat16, and sums that overflow come through as in float32;
// what they don't touch has its value.
TEST_P(GemmSplit, WhatIsNotFiniteComesThrough) {
  constexpr std::int64_t m = 176, n = 100;  // 176 is five panels and a half
  constexpr float kLargest = std::numeric_limits<float>::max(), kInfinity = std::numeric_limits<float>::infinity();
  const auto run = [](std::int64_t k, bool add, Float32Precision precision, double unit) {
    std::vector<float> a(static_cast<std::size_t>(m * k), 0.5F), b(static_cast<std::size_t>(k * n), 0.25F);
    a[static_cast<std::size_t>(3 * k + 5)] = kInfinity;
    a[static_cast<std::size_t>(40 * k + 6)] = std::nanf("");
    a[static_cast<std::size_t>(41 * k + 7)] = kLargest;  // times 0.25: finite
    a[static_cast<std::size_t>(175 * k + 39)] = -kInfinity;
    b[static_cast<std::size_t>(5 * n + 9)] = 0;  // times an infinity: NaN
    b[static_cast<std::size_t>(8 * n + 70)] = 0x1p100F;
    a[static_cast<std::size_t>(90 * k + 8)] = 0x1p100F;  // an infinite product
    b[static_cast<std::size_t>(11 * n + 99)] = -kLargest;
    std::vector<float> turned(b.size());
    for (std::int64_t i = 0; i < k * n; ++i) {
      turned[static_cast<std::size_t>(i % n * k + i / n)] = b[static_cast<std::size_t>(i)];
    }
    const auto solve = [&](GemmPath path, bool by_columns) {
      std::vector<float> c(static_cast<std::size_t>(m * n), add ? 2.0F : std::nanf(""));
      GemmArgs g;
      g.m = m, g.n = n, g.k = k;
      g.a = {a.data(), f32, k, 1};
      g.b = by_columns ? GemmOperand{turned.data(), f32, 1, k} : GemmOperand{b.data(), f32, n, 1};
      g.c = c.data(), g.ldc = n, g.beta = add ? 1 : 0;
      g.precision = precision;
      Context context;
      EXPECT_EQ(gemm_by(path, &context, g), Status::ok) << context.error;
      return c;
    };
    const std::vector<float> expected = solve(GemmPath::blocked, false), got = solve(GemmPath::split, false),
                             by_columns = solve(GemmPath::split, true);
    int infinite = 0, not_numbers = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      const bool same = by_columns[i] == expected[i] || (std::isnan(by_columns[i]) && std::isnan(expected[i]));
      ASSERT_TRUE(same || std::abs(by_columns[i] - expected[i]) <= unit * std::abs(expected[i])) << i;
      infinite += std::isinf(expected[i]), not_numbers += std::isnan(expected[i]);
      if (std::isnan(expected[i])) {
        ASSERT_TRUE(std::isnan(got[i])) << i;
      } else if (std::isinf(expected[i])) {
        ASSERT_EQ(got[i], expected[i]) << i;
      } else {
        ASSERT_NEAR(got[i], expected[i], unit * std::abs(expected[i])) << i;
      }
    }
    EXPECT_EQ(infinite, 2 * n) << "two rows but for a NaN, and a product";
    EXPECT_EQ(not_numbers, n + 1);
  };
  for (const std::int64_t k : {40, 700}) {
    for (const bool add : {false, true}) {
      run(k, add, Float32Precision::highest, 0x1p-20);
      run(k, add, Float32Precision::high, kLostByHigh + 0x1p-20);  // terms are positive
    }
  }
}

// The bound grows with the length of the sum, the error hardly does: few numbers are added one after another. With
// Float32Precision::high what is lost of k products has any sign. Of normal numbers it is 2^-17.75 of a product in root
// mean square (of the second parts' product 2^-18.45, of each factor's rounding 2^-18.6), so 1.6 / sqrt(k) times that
// of the sum of magnitudes. Of the results none is beyond five times that.
TEST_P(GemmSplit, ErrsByLittleMoreThanARounding) {
  for (const Float32Precision precision : {Float32Precision::highest, Float32Precision::high}) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    constexpr std::int64_t side = 48;
    for (const std::int64_t k : {32, 64, 512, 4096}) {
      std::vector<float> a(static_cast<std::size_t>(side * k)), b(a.size()), c(side * side);
      for (float& x : a) x = normal(random);
      for (float& x : b) x = normal(random);
      GemmArgs g;
      g.m = g.n = g.ldc = side, g.k = k;
      g.a = {a.data(), f32, k, 1}, g.b = {b.data(), f32, 1, k};
      g.c = c.data();
      g.precision = precision;
      Context context;
      ASSERT_EQ(gemm_by(GemmPath::split, &context, g), Status::ok);
      double most = 0;
      for (std::int64_t i = 0; i < side; ++i) {
        for (std::int64_t j = 0; j < side; ++j) {
          double exact = 0, size = 0;
          for (std::int64_t p = 0; p < k; ++p) {
            const double term = static_cast<double>(a[static_cast<std::size_t>(i * k + p)]) *
                                static_cast<double>(b[static_cast<std::size_t>(j * k + p)]);
            exact += term, size += std::abs(term);
          }
          most =
              std::max(most, std::abs(static_cast<double>(c[static_cast<std::size_t>(i * side + j)]) - exact) / size);
        }
      }
      const bool high = precision == Float32Precision::high;
      const double lost = high ? 5 * 1.6 * 0x1.3p-18 / std::sqrt(static_cast<double>(k)) : 0;
      EXPECT_LE(most, 2 * 0x1p-24 + lost) << k << ": " << most * 0x1p24;
      RecordProperty((high ? "high_units_of_2^-24_k" : "units_of_2^-24_k") + std::to_string(k),
                     std::to_string(most * 0x1p24));
    }
  }
}

// Numbers near the smallest ones: what is less than 2^-126 while it is computed counts as 0.
TEST_P(GemmSplit, SmallProductsAreZero) {
  constexpr std::int64_t m = 32, k = 32;
  for (const auto& [exponent, high] : {std::pair{-40, false}, std::pair{-51, false}, std::pair{-60, false},
                                       std::pair{-64, false}, std::pair{-90, false}, std::pair{-40, true},
                                       std::pair{-51, true}, std::pair{-60, true}, std::pair{-90, true}}) {
    const std::vector<float> a(m * k, std::ldexp(1.2345678F, exponent));
    std::vector<float> c(m * m);
    GemmArgs g;
    g.m = m, g.n = m, g.k = k;
    g.a = g.b = {a.data(), f32, k, 1};
    g.c = c.data(), g.ldc = m;
    g.precision = high ? Float32Precision::high : Float32Precision::highest;
    Context context;
    ASSERT_EQ(gemm_by(GemmPath::split, &context, g), Status::ok);
    const double exact = k * std::pow(static_cast<double>(a[0]), 2);
    // Each of the parts' six products, and each sum of these, may lose as much.
    const double bound = ((k + 4) * 0x1p-24 + (high ? kLostByHigh : 0)) * exact + 12 * k * 0x1p-126;
    for (const float x : c) ASSERT_NEAR(x, exact, bound) << exponent;
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, GemmSplit, testing::Values(Isa::avx2, Isa::avx512, Isa::amx),
                         [](const auto& info) { return std::string(name(info.param)); });

}  // namespace
}  // namespace halfstep::cpu
