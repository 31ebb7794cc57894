// SPDX-License-Identifier: Apache-2.0
// The conversions of plugin_numbers.h against the definitions of the formats: what a pattern means is computed from its
// sign, exponent and mantissa, and rounding takes the nearer of two neighbouring patterns. The code under test is not
// used for either.
#include "halfstep/runtime/plugin_numbers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace halfstep {
namespace {

namespace plugin = halfstep_plugin_numbers;

// IEEE 754 (binary16, and bfloat16 by its rules) and "FP8 Formats for Deep Learning" (arXiv 2209.05433), table 1.
template <class T>
struct Definition;
template <>
struct Definition<plugin::Half> {
  static constexpr int kExponentBits = 5, kMantissaBits = 10;
  static constexpr bool kInfinities = true, kQuiets = true;
};
template <>
struct Definition<plugin::BFloat16> {
  static constexpr int kExponentBits = 8, kMantissaBits = 7;
  static constexpr bool kInfinities = true, kQuiets = false;
};
template <>
struct Definition<plugin::Float8E4M3> {
  static constexpr int kExponentBits = 4, kMantissaBits = 3;
  static constexpr bool kInfinities = false, kQuiets = true;
};
template <>
struct Definition<plugin::Float8E5M2> {
  static constexpr int kExponentBits = 5, kMantissaBits = 2;
  static constexpr bool kInfinities = true, kQuiets = true;
};

template <class T>
class PluginNumbers : public ::testing::Test {
 protected:
  using D = Definition<T>;
  using Bits = decltype(T::bits);
  static constexpr int kMantissaBits = D::kMantissaBits;
  static constexpr std::uint32_t kSign = 1U << (D::kExponentBits + kMantissaBits);
  static constexpr std::uint32_t kExponentMask = (1U << D::kExponentBits) - 1,
                                 kMantissaMask = (1U << kMantissaBits) - 1;
  // Without infinities the largest exponent has numbers too, except for one pattern.
  static constexpr std::uint32_t kFirstSpecial = D::kInfinities ? kExponentMask << kMantissaBits : kSign - 1;
  static constexpr std::uint32_t kLargest = kFirstSpecial - 1;

  static bool is_nan(std::uint32_t magnitude) { return magnitude > kFirstSpecial - (D::kInfinities ? 0 : 1); }
  // What a pattern without its sign means; long double holds every value and every sum of two neighbours exactly.
  static long double value_of(std::uint32_t magnitude) {
    if (is_nan(magnitude)) return std::numeric_limits<long double>::quiet_NaN();
    if (magnitude >= kFirstSpecial) return std::numeric_limits<long double>::infinity();
    const int field = static_cast<int>(magnitude >> kMantissaBits), bias = (1 << (D::kExponentBits - 1)) - 1;
    const std::uint32_t mantissa = (magnitude & kMantissaMask) + (field == 0 ? 0 : kMantissaMask + 1);
    return std::ldexp(static_cast<long double>(mantissa), std::max(field, 1) - bias - kMantissaBits);
  }
  // The pattern of a number that is not NaN.
  static std::uint32_t rounded(long double x) {
    static const std::vector<long double> values = [] {
      std::vector<long double> v;
      for (std::uint32_t i = 0; i <= kLargest; ++i) v.push_back(value_of(i));
      return v;
    }();
    const std::uint32_t sign = std::signbit(x) ? kSign : 0;
    x = std::fabs(x);
    const auto below =
        static_cast<std::uint32_t>(std::upper_bound(values.begin(), values.end(), x) - values.begin()) - 1;
    if (below == kLargest) {
      if (!D::kInfinities) return sign | kLargest;  // saturates
      // The neighbour beyond the largest value would be as far from it as the one before.
      const long double half = (values[kLargest] - values[kLargest - 1]) / 2;
      return sign | (x < values[kLargest] + half ? kLargest : kFirstSpecial);  // the largest pattern is odd
    }
    const long double middle = (values[below] + values[below + 1]) / 2;
    if (x == middle) return sign | (below + below % 2);
    return sign | (x < middle ? below : below + 1);
  }
  template <class From>
  static void expect_rounded(From x) {
    const std::uint32_t got = plugin::convert<T>(x).bits;
    const auto exact = static_cast<long double>(x);
    if (std::isnan(exact)) {
      ASSERT_TRUE(is_nan(got & ~kSign)) << x;
      ASSERT_EQ((got & kSign) != 0, std::signbit(exact)) << x;
    } else {
      ASSERT_EQ(got, rounded(exact)) << x;
    }
  }
};
using Formats = ::testing::Types<plugin::Half, plugin::BFloat16, plugin::Float8E4M3, plugin::Float8E5M2>;
TYPED_TEST_SUITE(PluginNumbers, Formats);

TYPED_TEST(PluginNumbers, EveryPatternHasItsValue) {
  using Test = TestFixture;
  for (std::uint32_t i = 0; i < 2 * Test::kSign; ++i) {
    const auto pattern = static_cast<typename Test::Bits>(i);
    const float got = plugin::load(TypeParam{pattern});
    const bool negative = (i & Test::kSign) != 0;
    ASSERT_EQ(std::signbit(got), negative) << i;
    if (Test::is_nan(i & ~Test::kSign)) {
      ASSERT_TRUE(std::isnan(got)) << i;
      // Quiet, or, in the format that is half of a float32, as it is.
      const auto bits = std::bit_cast<std::uint32_t>(got);
      if (Test::D::kQuiets) {
        ASSERT_NE(bits & 0x400000U, 0U) << i;
      } else {
        ASSERT_EQ(bits, i << 16) << i;
      }
      continue;
    }
    ASSERT_EQ(std::fabs(static_cast<long double>(got)), Test::value_of(i & ~Test::kSign)) << i;
    // And back, for a plug-in that only moves elements.
    ASSERT_EQ(plugin::convert<TypeParam>(got).bits, pattern);
  }
}

TYPED_TEST(PluginNumbers, RoundToTheNearerNeighbourOnce) {
  using Test = TestFixture;
  // Patterns of float32 a prime apart, so that all of exponent and sign and every last bit come up.
  for (std::uint64_t i = 0; i < std::uint64_t{1} << 32; i += 4099) {
    Test::expect_rounded(std::bit_cast<float>(static_cast<std::uint32_t>(i)));
    if (this->HasFatalFailure()) return;
  }
  // Every middle between two neighbours, the one above the largest value included, and the doubles next to it: rounding
  // to a float on the way would make ties of these.
  for (std::uint32_t i = 0; i <= Test::kLargest; ++i) {
    const std::uint32_t below = std::min(i, Test::kLargest - 1);
    const long double half = (Test::value_of(below + 1) - Test::value_of(below)) / 2;
    const auto middle = static_cast<double>(Test::value_of(i) + half);
    for (const double x : {middle, std::nextafter(middle, 0.0), std::nextafter(middle, 1e300)}) {
      Test::expect_rounded(x);
      Test::expect_rounded(-x);
      if (this->HasFatalFailure()) return;
    }
  }
  std::mt19937_64 engine(1);
  for (int i = 0; i < 200000; ++i) {
    Test::expect_rounded(std::bit_cast<double>(engine()));
    // Between 2^-40 and 2^40, where the formats round.
    Test::expect_rounded(std::bit_cast<double>((engine() & 0x800fffffffffffffU) | (983 + engine() % 80) << 52));
    Test::expect_rounded(static_cast<std::int64_t>(engine()) >> engine() % 64);
    if (this->HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace halfstep
