// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/convert_block.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "halfstep/core/float16.h"

namespace halfstep::cpu {
namespace {

template <class T>
class StoreDoubles : public testing::Test {
 public:
  static std::vector<T> stored(const std::vector<double>& values) {
    std::vector<T> result(values.size());
    const DType dtype = std::is_same_v<T, Half> ? DType::f16 : DType::bf16;
    store_doubles(dtype, result.data(), static_cast<std::int64_t>(values.size()), values.data());
    return result;
  }
};
using Types = testing::Types<Half, BFloat16>;
TYPED_TEST_SUITE(StoreDoubles, Types);

// Between two neighbours of every finite pattern: halfway is the even one's, and a double beside it the nearer one's.
// Rounding to float32 first would make a halfway case of each of the doubles beside it.
TYPED_TEST(StoreDoubles, RoundOnceToNearestEven) {
  using T = TypeParam;
  const std::uint16_t largest = std::is_same_v<T, Half> ? 0x7bff : 0x7f7f;
  std::vector<double> values;
  std::vector<std::uint16_t> expected;
  for (std::uint16_t bits = 0; bits < largest; ++bits) {
    const auto next = static_cast<std::uint16_t>(bits + 1);
    const auto low = static_cast<double>(static_cast<float>(T::from_bits(bits)));
    const auto high = static_cast<double>(static_cast<float>(T::from_bits(next)));
    const double half = (low + high) / 2;  // exact
    const std::uint16_t even = bits % 2 == 0 ? bits : next;
    for (const auto& [value, result] :
         {std::pair{low, bits}, {half, even}, {std::nextafter(half, low), bits}, {std::nextafter(half, high), next}}) {
      values.insert(values.end(), {value, -value});
      expected.insert(expected.end(), {result, static_cast<std::uint16_t>(result | 0x8000u)});
    }
  }
  const std::vector<T> results = this->stored(values);
  for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(results[i].bits, expected[i]) << values[i];
}

TYPED_TEST(StoreDoubles, EndsOfTheRange) {
  using T = TypeParam;
  const bool half = std::is_same_v<T, Half>;
  const std::uint16_t infinity = half ? 0x7c00 : 0x7f80, largest = half ? 0x7bff : 0x7f7f;
  // Halfway from the largest value to the one that would follow it.
  const double end = half ? 65520.0 : std::ldexp(511.0, 119);
  const double inf = std::numeric_limits<double>::infinity();
  const auto results = this->stored({inf, -inf, end, std::nextafter(end, 0.0), 1e300, -1e300, 1e39, 1e-300, -1e-300,
                                     0.0, -0.0, std::numeric_limits<double>::denorm_min(), std::nan("")});
  const std::vector<std::uint16_t> expected = {infinity, static_cast<std::uint16_t>(infinity | 0x8000u),
                                               infinity, largest,
                                               infinity, static_cast<std::uint16_t>(infinity | 0x8000u),
                                               infinity, 0,
                                               0x8000,   0,
                                               0x8000,   0};
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(results[i].bits, expected[i]) << i;
  EXPECT_TRUE(std::isnan(static_cast<float>(results.back())));
}

TYPED_TEST(StoreDoubles, NothingIsWrittenBehindTheEnd) {
  using T = TypeParam;
  for (std::int64_t n = 0; n < 40; ++n) {
    std::vector<double> values(static_cast<std::size_t>(n), 1.5);
    std::vector<T> result(static_cast<std::size_t>(n) + 1, T::from_bits(0x1234));
    store_doubles(std::is_same_v<T, Half> ? DType::f16 : DType::bf16, result.data(), n, values.data());
    for (std::int64_t i = 0; i < n; ++i) EXPECT_EQ(static_cast<float>(result[static_cast<std::size_t>(i)]), 1.5f);
    EXPECT_EQ(result.back().bits, 0x1234);
  }
}

// Every pattern of 16 bits, across the end of a vector: conversions to float are tested by themselves.
TYPED_TEST(StoreDoubles, AreLoadedAsTheyAre) {
  using T = TypeParam;
  const DType dtype = std::is_same_v<T, Half> ? DType::f16 : DType::bf16;
  std::vector<T> all;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) all.push_back(T::from_bits(static_cast<std::uint16_t>(bits)));
  for (const std::int64_t n : {0, 1, 7, 8, 9, 17, 0x10000}) {
    std::vector<double> loaded(static_cast<std::size_t>(n) + 1, 77);
    load_doubles(dtype, all.data(), n, loaded.data());
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
      const auto expected = static_cast<double>(all[i]);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(loaded[i])) << i;
      } else {
        ASSERT_EQ(loaded[i], expected) << i;
      }
    }
    EXPECT_EQ(loaded.back(), 77);
  }
}

// Products and sums of eighths below 2^24 are exact.
TYPED_TEST(StoreDoubles, AreAddedToFloats) {
  using T = TypeParam;
  const DType dtype = std::is_same_v<T, Half> ? DType::f16 : DType::bf16;
  for (std::int64_t n = 0; n < 70; ++n) {
    std::vector<T> values;
    std::vector<float> sums, expected;
    for (std::int64_t i = 0; i <= n; ++i) {
      values.push_back(T(static_cast<float>(i % 17 - 8) / 8));
      sums.push_back(static_cast<float>(i * 3));
      expected.push_back(sums.back() + (i < n ? 0.5f * static_cast<float>(values.back()) : 0));
    }
    add_floats(dtype, values.data(), n, 0.5f, sums.data());
    EXPECT_EQ(sums, expected) << n;
  }
}

}  // namespace
}  // namespace halfstep::cpu
