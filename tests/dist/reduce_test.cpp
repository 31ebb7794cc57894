// SPDX-License-Identifier: Apache-2.0
// The arithmetic of reductions between ranks, without ranks.
#include "halfstep/dist/reduce.h"

#include <gtest/gtest.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "halfstep/core/tensor.h"

namespace halfstep::dist {
namespace {

constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::mean, ReduceOp::min, ReduceOp::max, ReduceOp::product};

template <class T>
std::vector<T> reduced(ReduceOp op, const std::vector<std::vector<T>>& inputs, int divisor = 0) {
  std::vector<const void*> pointers;
  for (const auto& in : inputs) pointers.push_back(in.data());
  std::vector<T> output(inputs[0].size());
  reduce_in_order(op, dtype_of<T>, pointers, output.data(), static_cast<std::int64_t>(output.size()), divisor);
  return output;
}

template <class T>
class ReduceInOrderTyped : public testing::Test {};
using FloatingTypes = testing::Types<float, double, Half, BFloat16, Float8E4M3, Float8E5M2>;
TYPED_TEST_SUITE(ReduceInOrderTyped, FloatingTypes);

// Sizes around the blocks in which the loops go.
TYPED_TEST(ReduceInOrderTyped, FloatingValuesAreAccumulatedAndRoundedOnce) {
  using T = TypeParam;
  using C = std::conditional_t<std::is_same_v<T, double>, double, float>;
  std::mt19937 random(5);
  std::uniform_real_distribution<double> uniform(-2, 2);
  for (const std::size_t n : {0, 1, 3, 17, 1023, 1024, 1025, 2047, 2048, 5000}) {
    for (const std::size_t ranks : {1, 2, 3, 4, 7}) {
      std::vector<std::vector<T>> inputs(ranks, std::vector<T>(n));
      for (auto& in : inputs) {
        for (T& v : in) v = convert<T>(uniform(random));
      }
      for (const ReduceOp op : kOps) {
        const std::vector<T> got = reduced(op, inputs);
        for (std::size_t i = 0; i < n; ++i) {
          C expected = convert<C>(inputs[0][i]);
          for (std::size_t r = 1; r < ranks; ++r) {
            const C next = convert<C>(inputs[r][i]);
            expected = op == ReduceOp::min       ? std::min(expected, next)
                       : op == ReduceOp::max     ? std::max(expected, next)
                       : op == ReduceOp::product ? expected * next
                                                 : expected + next;
          }
          if (op == ReduceOp::mean) expected /= static_cast<C>(ranks);
          const T rounded = convert<T>(expected);
          ASSERT_EQ(std::memcmp(&got[i], &rounded, sizeof(T)), 0)
              << name(op) << " of " << ranks << " at " << i << ": " << convert<double>(got[i]) << ", expected "
              << expected;
        }
      }
    }
  }
}

// Against float64, whose sum of 4 float32 is exact here (24 + 2 bits, exponents within 2^20): 3 additions err by at
// most 3 * 2^-24 of the sum of magnitudes.
TEST(ReduceInOrder, Float32IsWithinItsBoundOfFloat64) {
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> inputs(4, std::vector<float>(10000));
  for (auto& in : inputs) {
    for (float& v : in) v = normal(random);
  }
  const auto got = reduced(ReduceOp::sum, inputs);
  for (std::size_t i = 0; i < got.size(); ++i) {
    double sum = 0, magnitude = 0;
    for (const auto& in : inputs) {
      sum += in[i];
      magnitude += std::abs(in[i]);
    }
    ASSERT_LE(std::abs(got[i] - sum), 3 * 0x1p-24 * magnitude) << i;
  }
}

TEST(ReduceInOrder, SixteenBitsKeepWhatEachRankAdds) {
  // 2048 + 0.75 + 0.75 + 0.75 = 2050.25: rounded at each step it would stay 2048 (f16) or go wrong by more.
  EXPECT_EQ(
      convert<double>(reduced<Half>(ReduceOp::sum, {{Half(2048.F)}, {Half(.75F)}, {Half(.75F)}, {Half(.75F)}})[0]),
      2050);
  // A sum beyond f16's range whose mean is inside it.
  EXPECT_EQ(convert<double>(reduced<Half>(ReduceOp::mean, {{Half(60000.F)}, {Half(60000.F)}})[0]),
            convert<double>(Half(60000.F)));
  EXPECT_TRUE(std::isinf(convert<double>(reduced<Half>(ReduceOp::sum, {{Half(60000.F)}, {Half(60000.F)}})[0])));
}

TEST(ReduceInOrder, IntegersWrapAround) {
  using I64 = std::int64_t;
  const I64 most = std::numeric_limits<I64>::max();
  EXPECT_EQ(reduced<I64>(ReduceOp::sum, {{most}, {2}})[0], std::numeric_limits<I64>::min() + 1);
  EXPECT_EQ(reduced<std::int32_t>(ReduceOp::product, {{1 << 20}, {1 << 20}, {3}})[0], 0);
  EXPECT_EQ(reduced<std::int8_t>(ReduceOp::sum, {{100}, {100}})[0], -56);
  EXPECT_EQ(reduced<std::uint8_t>(ReduceOp::product, {{200}, {200}})[0], (200 * 200) % 256);
  EXPECT_EQ(reduced<std::uint8_t>(ReduceOp::max, {{1}, {200}, {7}})[0], 200);
  EXPECT_EQ(reduced<std::int8_t>(ReduceOp::min, {{1}, {-128}, {7}})[0], -128);
}

TEST(ReduceInOrder, MinAndMaxPropagateNaN) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
    for (std::size_t bad = 0; bad < 3; ++bad) {
      std::vector<std::vector<float>> inputs = {{1, 1}, {2, 2}, {3, 3}};
      inputs[bad][1] = nan;
      const auto got = reduced(op, inputs);
      EXPECT_EQ(got[0], op == ReduceOp::min ? 1 : 3);
      EXPECT_TRUE(std::isnan(got[1])) << name(op) << " " << bad;
      std::vector<std::vector<double>> wide = {{1}, {2}, {3}};
      wide[bad][0] = std::numeric_limits<double>::quiet_NaN();
      EXPECT_TRUE(std::isnan(reduced(op, wide)[0]));
    }
  }
  // The first of equal values: -0 and 0.
  EXPECT_TRUE(std::signbit(reduced<float>(ReduceOp::max, {{-0.F}, {0.F}})[0]));
  EXPECT_FALSE(std::signbit(reduced<float>(ReduceOp::min, {{0.F}, {-0.F}})[0]));
}

TEST(ReduceInOrder, TheOutputMayBeAnyInput) {
  for (std::size_t which = 0; which < 3; ++which) {
    std::vector<std::vector<float>> inputs(3, std::vector<float>(5000));
    for (std::size_t r = 0; r < 3; ++r) {
      for (std::size_t i = 0; i < 5000; ++i) inputs[r][i] = static_cast<float>(r * 10000 + i);
    }
    const void* pointers[] = {inputs[0].data(), inputs[1].data(), inputs[2].data()};
    reduce_in_order(ReduceOp::sum, f32, pointers, inputs[which].data(), 5000);
    for (std::size_t i = 0; i < 5000; ++i) ASSERT_EQ(inputs[which][i], static_cast<float>(30000 + 3 * i));
  }
}

TEST(ReduceInOrder, RefusesWhatHasNoMeaning) {
  const std::int32_t one = 1;
  std::int32_t out = 0;
  const void* inputs[] = {&one, &one};
  EXPECT_THROW(reduce_in_order(ReduceOp::mean, i32, inputs, &out, 1), DTypeError);
  EXPECT_THROW(reduce_in_order(ReduceOp::sum, boolean, inputs, &out, 1), DTypeError);
  EXPECT_THROW(reduce_in_order(ReduceOp::sum, i32, {}, &out, 1), Error);
}

// Not a test of speed, which other programs on the machine change: the figure is for who looks.
TEST(ReduceInOrder, SaysHowFastItIs) {
  constexpr std::int64_t kCount = 25 << 18;  // 25 MiB of float32
  for (const DType dtype : {f32, f16}) {
    const auto bytes = static_cast<std::size_t>(kCount) * item_size(dtype);
    std::vector<std::vector<char>> inputs(4, std::vector<char>(bytes, 0));
    std::vector<char> output(bytes, 0);
    const void* pointers[] = {inputs[0].data(), inputs[1].data(), inputs[2].data(), inputs[3].data()};
    double best = 1e9, copy = 1e9;
    for (int i = 0; i < 5; ++i) {
      auto begin = std::chrono::steady_clock::now();
      reduce_in_order(ReduceOp::sum, dtype, pointers, output.data(), kCount);
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
      begin = std::chrono::steady_clock::now();
      std::memcpy(output.data(), inputs[static_cast<std::size_t>(i) % 4].data(), bytes);
      copy = std::min(copy, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    const double total = 5 * static_cast<double>(bytes);
    std::printf("%s, 4 x 2^18 x 25 elements: %.1f ms, %.1f GB/s (memcpy: %.1f GB/s)\n", halfstep::name(dtype),
                best * 1e3, total / best / 1e9, 2 * static_cast<double>(bytes) / copy / 1e9);
    EXPECT_GT(best, 0);
  }
}

}  // namespace
}  // namespace halfstep::dist
