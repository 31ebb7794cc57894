// SPDX-License-Identifier: Apache-2.0
#include "halfstep/core/philox.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "halfstep/core/box_muller.h"
#include "halfstep/core/dtype.h"
#include "halfstep/core/error.h"
#include "halfstep/core/random.h"

#if __has_include(<Random123/philox.h>)
#include <Random123/philox.h>
#define HALFSTEP_HAVE_RANDOM123
#endif

namespace halfstep {
namespace {

// Statistical bounds below are 6 standard deviations: with a right generator a fixed seed fails one in 5e8 times.
constexpr double kSigmas = 6;

TEST(Philox, GivesTheKnownAnswers) {
  // The answers that the authors publish for philox4x32 with 10 rounds: all zeros, all ones, digits of pi.
  EXPECT_EQ(philox4x32_10({0, 0, 0, 0}, {0, 0}), (PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const std::uint32_t ones = 0xffffffff;
  EXPECT_EQ(philox4x32_10({ones, ones, ones, ones}, {ones, ones}),
            (PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
  static_assert(philox4x32_10({0, 0, 0, 0}, {0, 0})[0] == 0x6627e8d5);
}

#if defined(HALFSTEP_HAVE_RANDOM123)
TEST(Philox, AgreesWithRandom123) {
  const PhiloxState state{0x0123456789abcdef, 0xfffffff0};
  for (std::uint64_t i = 0; i < 4096; ++i) {
    // The offset crosses 2^32, so that the carry is seen.
    const std::uint64_t block = state.offset + i;
    const r123array4x32 counter = {{static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32), 7, 0}};
    const r123array2x32 key = {{0x89abcdef, 0x01234567}};
    const r123array4x32 expected = philox4x32_R(10, counter, key);
    const PhiloxBlock actual = philox_block(state, i, 7);
    for (std::size_t k = 0; k < 4; ++k) ASSERT_EQ(actual[k], expected.v[k]) << i;
  }
}
#endif

TEST(Philox, ElementsDependOnlyOnSeedOffsetAndIndex) {
  const PhiloxState state{42, 1000};
  for (std::uint64_t i = 0; i < 64; ++i) {
    EXPECT_EQ(philox_word(state, i), philox_block(state, i / 4)[i % 4]);
    EXPECT_EQ(philox_word(state, i), philox_word({42, 1000 + i / 4}, i % 4));
    EXPECT_EQ(philox_word64(state, i), std::uint64_t{philox_word(state, 2 * i + 1)} << 32 | philox_word(state, 2 * i));
    EXPECT_NE(philox_block(state, i), philox_block({43, 1000}, i));
    EXPECT_NE(philox_block(state, i), philox_block(state, i, 1));
  }
  // The counter is 64 bits wide, the seed too.
  EXPECT_EQ(philox_block({0x500000006, 0xffffffff}, 1), philox4x32_10({0, 1, 0, 0}, {6, 5}));
  EXPECT_EQ(philox_blocks(0), 0u);
  EXPECT_EQ(philox_blocks(1), 1u);
  EXPECT_EQ(philox_blocks(4), 1u);
  EXPECT_EQ(philox_blocks(5), 2u);
  EXPECT_EQ(philox_blocks64(3), 2u);
  EXPECT_EQ(philox_blocks64(4), 2u);
}

TEST(Philox, UniformsStayInTheirIntervals) {
  const std::uint32_t top = 0xffffffff;
  const std::uint64_t top64 = ~std::uint64_t{0};
  EXPECT_EQ(uniform_f32(0), 0.0f);
  EXPECT_EQ(uniform_f32(top), 1 - 0x1p-24f);
  EXPECT_EQ(uniform_f64(0), 0.0);
  EXPECT_EQ(uniform_f64(top64), 1 - 0x1p-53);
  EXPECT_EQ(uniform_open_f32(0), 0x1p-24f);
  EXPECT_EQ(uniform_open_f32(top), 1.0f);
  EXPECT_EQ(uniform_open_f64(0), 0x1p-53);
  EXPECT_EQ(uniform_open_f64(top64), 1.0);
  // With the digits of their type the 16-bit numbers are exact and never round up to 1.
  EXPECT_EQ(static_cast<float>(Half(uniform_bits(top, 11))), 1 - 0x1p-11f);
  EXPECT_EQ(static_cast<float>(BFloat16(uniform_bits(top, 8))), 1 - 0x1p-8f);
  EXPECT_EQ(uniform_bits(0x80000000, 8), 0.5f);
}

TEST(Philox, UniformsAreUniformAndUncorrelated) {
  const int n = 1 << 20, bins = 256;
  const PhiloxState state{1, 0}, other_seed{2, 0};
  std::vector<double> count(bins);
  double sum = 0, squares = 0, lag1 = 0, lag4 = 0, seeds = 0;
  std::vector<double> x(n);
  for (int i = 0; i < n; ++i) {
    const auto at = static_cast<std::uint64_t>(i);
    x[at] = static_cast<double>(uniform_f32(philox_word(state, at))) - 0.5;
    sum += x[at];
    squares += x[at] * x[at];
    ++count[static_cast<std::size_t>((x[at] + 0.5) * bins)];
    if (i >= 4) lag1 += x[at] * x[at - 1], lag4 += x[at] * x[at - 4];
    seeds += x[at] * (static_cast<double>(uniform_f32(philox_word(other_seed, at))) - 0.5);
  }
  // x has variance 1/12 and x^2 1/180; a product of two independent ones has standard deviation 1/12.
  EXPECT_LE(std::fabs(sum / n), kSigmas * std::sqrt(1 / 12.0 / n));
  EXPECT_LE(std::fabs(squares / n - 1 / 12.0), kSigmas * std::sqrt(1 / 180.0 / n));
  for (const double product : {lag1, lag4, seeds}) EXPECT_LE(std::fabs(product / n), kSigmas / 12 / std::sqrt(n));
  double chi_squared = 0;
  for (const double c : count) chi_squared += (c - n / bins) * (c - n / bins) / (n / bins);
  EXPECT_LE(std::fabs(chi_squared - (bins - 1)), kSigmas * std::sqrt(2.0 * (bins - 1)));
}

TEST(Philox, IntegersHaveNoModuloBias) {
  const PhiloxState state{3, 0};
  const int n = 1 << 18;
  // Two thirds of 2^64 (rounded up): mapping words without refusing any would give even results twice as often as odd
  // ones.
  const std::uint64_t two_thirds = 0xaaaaaaaaaaaaaaab;
  int even = 0;
  double sum = 0;
  for (int i = 0; i < n; ++i) {
    const std::uint64_t x = integer_below(state, static_cast<std::uint64_t>(i), two_thirds);
    ASSERT_LT(x, two_thirds);
    even += x % 2 == 0;
    sum += static_cast<double>(x) / static_cast<double>(two_thirds) - 0.5;
  }
  EXPECT_LE(std::fabs(even - n / 2), kSigmas * std::sqrt(n / 4.0));
  EXPECT_LE(std::fabs(sum / n), kSigmas * std::sqrt(1 / 12.0 / n));
  std::vector<int> count(10);
  for (int i = 0; i < n; ++i) ++count.at(integer_below(state, static_cast<std::uint64_t>(i), 10));
  for (const int c : count) EXPECT_LE(std::fabs(c - n / 10.0), kSigmas * std::sqrt(n * 0.09));
  EXPECT_EQ(integer_below(state, 5, 1), 0u);
  // Powers of two refuse nothing: the result is the top of the word.
  EXPECT_EQ(integer_below(state, 5, std::uint64_t{1} << 20), philox_word64(state, 5) >> 44);
}

TEST(Philox, BernoulliThresholds) {
  EXPECT_EQ(bernoulli_threshold(0), 0u);
  EXPECT_EQ(bernoulli_threshold(1), std::uint64_t{1} << 32);
  EXPECT_EQ(bernoulli_threshold(0.25), std::uint64_t{1} << 30);
  EXPECT_EQ(bernoulli_threshold(-1), 0u);
  EXPECT_EQ(bernoulli_threshold(2), std::uint64_t{1} << 32);
  EXPECT_EQ(bernoulli_threshold(std::nan("")), 0u);
  EXPECT_LE(bernoulli_threshold(std::nextafter(1.0, 0.0)), std::uint64_t{1} << 32);
  for (const double p : {0.1, 1 / 3.0, 0.9}) {
    EXPECT_LE(std::fabs(static_cast<double>(bernoulli_threshold(p)) * 0x1p-32 - p), 0x1p-33);
    const int n = 1 << 18;
    int hits = 0;
    for (std::uint64_t i = 0; i < n; ++i) hits += philox_word({4, 0}, i) < bernoulli_threshold(p);
    EXPECT_LE(std::fabs(hits - n * p), kSigmas * std::sqrt(n * p * (1 - p)));
  }
}

TEST(Philox, DerivedSeedsDiffer) {
  std::set<std::uint64_t> seen{5};
  for (std::uint64_t epoch = 0; epoch < 100; ++epoch) {
    for (std::uint64_t sample = 0; sample < 1000; ++sample) seen.insert(derive_seed(5, epoch, sample));
  }
  EXPECT_EQ(seen.size(), 100001u);
  EXPECT_NE(derive_seed(5, 1, 2), derive_seed(5, 2, 1));
  EXPECT_NE(derive_seed(5, 1, 2), derive_seed(6, 1, 2));
  EXPECT_NE(derive_seed(5, 0, 0), philox_word64({5, 0}, 0));
}

// The pair from the same words in extended precision: u in (0, 1], and the angle as a fraction of a turn from its
// nearest quarter, which is exact.
struct LongPair {
  long double first, second;
};
LongPair exact_pair(long double u, long double turn) {
  const long double pi = 3.14159265358979323846264338327950288L;
  const long double radius = std::sqrt(-2 * std::log(u));
  const long double quarter = std::nearbyint(4 * turn);
  const long double rest = 2 * pi * (turn - quarter / 4);
  const long double c = std::cos(rest), s = std::sin(rest);
  switch (static_cast<int>(quarter) % 4) {
    case 0:
      return {radius * c, radius * s};
    case 1:
      return {-radius * s, radius * c};
    case 2:
      return {-radius * c, -radius * s};
    default:
      return {radius * s, -radius * c};
  }
}

template <class T>
long double ulps(T value, long double exact) {
  if (value == 0 && exact == 0) return 0;
  const T at = std::fabs(static_cast<T>(exact));
  const long double ulp = static_cast<long double>(std::nextafter(at, std::numeric_limits<T>::infinity())) - at;
  return std::fabs(static_cast<long double>(value) - exact) / ulp;
}

TEST(BoxMuller, FloatsAreWithinOneUlpOfTheExactValue) {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> words;
  for (std::uint64_t i = 0; i < 200000; ++i) {
    words.emplace_back(philox_word({6, 0}, 2 * i), philox_word({6, 0}, 2 * i + 1));
  }
  // The ends of the logarithm's range, and angles at and next to the zeros and extrema of sine and cosine.
  for (const std::uint32_t a : {0u, 1u, 2u, 0x7fffffffu, 0xfffffffdu, 0xfffffffeu}) {
    for (std::uint32_t eighth = 0; eighth < 8; ++eighth) {
      for (int d = -3; d <= 3; ++d) words.emplace_back(a, (eighth << 29) + static_cast<std::uint32_t>(d));
    }
  }
  long double worst = 0;
  for (const auto& [a, b] : words) {
    const NormalPair pair = normal_pair(a, b);
    const LongPair exact = exact_pair((a + 1.0L) * 0x1p-32L, b * 0x1p-32L);
    worst = std::max(worst, ulps(static_cast<float>(pair.first), exact.first));
    worst = std::max(worst, ulps(static_cast<float>(pair.second), exact.second));
  }
  // Half a unit of the one rounding, and next to nothing of the double evaluation.
  EXPECT_LE(worst, 0.5001L);
  EXPECT_EQ(normal_pair(0xffffffff, 123).first, 0.0);
  EXPECT_NEAR(normal_pair(0, 0).first, std::sqrt(64 * std::log(2.0)), 1e-14);
}

TEST(BoxMuller, DoublesAreWithinTwoUlpsOfTheExactValue) {
  if (std::numeric_limits<long double>::digits < 64) GTEST_SKIP() << "long double is no wider than double here";
  std::vector<std::pair<std::uint64_t, std::uint64_t>> words;
  for (std::uint64_t i = 0; i < 200000; ++i) {
    words.emplace_back(philox_word64({7, 0}, 2 * i), philox_word64({7, 0}, 2 * i + 1));
  }
  for (std::uint64_t eighth = 0; eighth < 8; ++eighth) {
    for (std::uint64_t d = 0; d < 5; ++d) {
      words.emplace_back(d << 11, (eighth << 61) + (d << 11));
      words.emplace_back(~(d << 12), (eighth << 61) - (d << 11));
    }
  }
  long double worst = 0;
  for (const auto& [a, b] : words) {
    const NormalPair pair = normal_pair64(a, b);
    const LongPair exact =
        exact_pair((static_cast<long double>(a >> 11) + 1) * 0x1p-53L, static_cast<long double>(b >> 11) * 0x1p-53L);
    worst = std::max({worst, ulps(pair.first, exact.first), ulps(pair.second, exact.second)});
  }
  // The final rounding is half a unit; the errors of log (halved by the square root) and of cos or sin, each little
  // more than half a unit of its own, count up to double where the result lies low in its binade and theirs don't.
  EXPECT_LE(worst, 2.0L);
  RecordProperty("worst_ulps", std::to_string(worst));
}

TEST(BoxMuller, NormalsAreNormal) {
  const int n = 1 << 20;
  for (const bool wide : {false, true}) {
    std::vector<double> x(n);
    double sum = 0, second = 0, fourth = 0, pairs = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = wide ? normal_at64({8, 0}, i) : normal_at({8, 0}, i);
      sum += x[i];
      second += x[i] * x[i];
      fourth += x[i] * x[i] * x[i] * x[i];
      if (i % 2 == 1) pairs += x[i] * x[i - 1];
    }
    // Variances of x, x^2, x^4 and of the product of two: 1, 2, 96 and 1.
    EXPECT_LE(std::fabs(sum / n), kSigmas / std::sqrt(n));
    EXPECT_LE(std::fabs(second / n - 1), kSigmas * std::sqrt(2.0 / n));
    EXPECT_LE(std::fabs(fourth / n - 3), kSigmas * std::sqrt(96.0 / n));
    EXPECT_LE(std::fabs(pairs / (n / 2)), kSigmas / std::sqrt(n / 2));
    // Kolmogorov and Smirnov: the largest distance from the distribution function exceeds 3 / sqrt(n) with
    // probability 2 exp(-18).
    std::sort(x.begin(), x.end());
    double distance = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double cdf = std::erfc(-x[i] / std::sqrt(2.0)) / 2;
      distance = std::max({distance, cdf - static_cast<double>(i) / n, static_cast<double>(i + 1) / n - cdf});
    }
    EXPECT_LE(distance, 3 / std::sqrt(n));
  }
}

TEST(Generator, ReservesDisjointPartsOfOneStream) {
  Generator generator(9);
  EXPECT_EQ(generator.reserve(10), (PhiloxState{9, 0}));
  EXPECT_EQ(generator.reserve(1), (PhiloxState{9, 10}));
  EXPECT_EQ(generator.offset(), 11u);
  const PhiloxState saved = generator.state();
  generator.reserve(5);
  generator.set_state(saved);
  EXPECT_EQ(generator.reserve(1), (PhiloxState{9, 11}));
  generator.manual_seed(10);
  EXPECT_EQ(generator.state(), (PhiloxState{10, 0}));
  EXPECT_EQ(generator.seed(), 10u);
}

TEST(Generator, ThreadsNeverShareABlock) {
  Generator generator(9);
  const int threads = 4, calls = 2000;
  std::vector<std::vector<std::uint64_t>> starts(threads);
  {
    std::vector<std::jthread> running;
    for (int t = 0; t < threads; ++t) {
      running.emplace_back([&generator, &mine = starts[static_cast<std::size_t>(t)]] {
        for (int i = 0; i < calls; ++i) mine.push_back(generator.reserve(3).offset);
      });
    }
  }
  std::set<std::uint64_t> all;
  for (const auto& mine : starts) all.insert(mine.begin(), mine.end());
  EXPECT_EQ(all.size(), static_cast<std::size_t>(threads * calls));
  EXPECT_EQ(*all.rbegin(), 3u * (threads * calls - 1));
  EXPECT_EQ(generator.offset(), 3u * threads * calls);
}

TEST(Generator, DefaultOneIsSeeded) {
  const PhiloxState saved = default_generator().state();
  manual_seed(77);
  EXPECT_EQ(default_generator().reserve(2), (PhiloxState{77, 0}));
  EXPECT_EQ(default_generator().offset(), 2u);
  default_generator().set_state(saved);
}

TEST(RandPerm, IsAPermutationAndAllAreEquallyLikely) {
  for (const std::int64_t n : {0, 1, 2, 1000}) {
    std::vector<std::int64_t> out(static_cast<std::size_t>(n)), expected(out.size());
    randperm({10, 0}, n, out.data());
    std::iota(expected.begin(), expected.end(), 0);
    if (n == 1000) {
      EXPECT_NE(out, expected);
    }
    std::sort(out.begin(), out.end());
    EXPECT_EQ(out, expected);
  }
  std::map<std::vector<std::int64_t>, int> count;
  const int draws = 60000;
  for (std::uint64_t i = 0; i < draws; ++i) {
    std::vector<std::int64_t> out(3);
    randperm({11, i * randperm_blocks(3)}, 3, out.data());
    ++count[out];
  }
  EXPECT_EQ(count.size(), 6u);
  for (const auto& [order, c] : count) EXPECT_LE(std::fabs(c - draws / 6), kSigmas * std::sqrt(draws * 5 / 36.0));
  EXPECT_THROW(randperm({0, 0}, -1, nullptr), Error);
  EXPECT_EQ(randperm_blocks(5), 3u);
}

TEST(RandomStream, FollowsTheStreamOfItsSeed) {
  RandomStream stream(12);
  for (std::uint64_t i = 0; i < 40; ++i) EXPECT_EQ(stream(), philox_word({12, 0}, i));
  EXPECT_EQ(stream.next64(), philox_word64({12, 0}, 20));
  EXPECT_EQ(RandomStream(12, 5)(), philox_word({12, 0}, 20));
  std::vector<int> order(52);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), stream);
}

// Each member is a function of the words that it takes, in this order: runs and augmentations of another version or
// device are repeated by it.
TEST(RandomStream, MembersAreFunctionsOfTheWordsInOrder) {
  constexpr PhiloxState kState{0x123456789abcdef0, 7};
  RandomStream stream(kState);
  std::uint64_t at = 0;
  const auto word = [&] { return philox_word(kState, at++); };
  const auto word64 = [&] {
    const std::uint64_t low = word();
    return std::uint64_t{word()} << 32 | low;
  };
  for (int round = 0; round < 50; ++round) {
    EXPECT_EQ(stream(), word());
    EXPECT_EQ(stream.uniform(), static_cast<float>(word() >> 8) / 16777216.0f);
    EXPECT_EQ(stream.uniform64(), static_cast<double>(word64() >> 11) / 9007199254740992.0);
    EXPECT_EQ(stream.uniform(-3, 5), -3 + 8 * (static_cast<double>(word64() >> 11) / 9007199254740992.0));
    EXPECT_EQ(stream.bernoulli(0.25), word() < 0x40000000u);
    EXPECT_EQ(stream.bernoulli(0.8), word() < 3435973837u);  // round(0.8 * 2^32)
    EXPECT_EQ(stream.next64(), word64());
    // The upper half of word times n; no word is refused for a power of two.
    EXPECT_EQ(stream.below(1024), word64() >> 54);
    const std::uint64_t radius = word64(), angle = word64();
    const double u = (static_cast<double>(radius >> 11) + 1) / 9007199254740992.0;
    const double turn = static_cast<double>(angle >> 11) / 9007199254740992.0;
    EXPECT_NEAR(stream.normal(), std::sqrt(-2 * std::log(u)) * std::cos(2 * 3.14159265358979323846 * turn), 1e-14);
  }
  EXPECT_FALSE(RandomStream(1).bernoulli(0));
  EXPECT_TRUE(RandomStream(1).bernoulli(1));
  EXPECT_EQ(RandomStream(1).below(1), 0u);
}

TEST(RandomStream, NumbersKeepToTheirIntervals) {
  RandomStream stream(13);
  const double next = std::nextafter(1.0, 2.0);
  double sum = 0, squares = 0;
  const int n = 1 << 16;
  int hits = 0;
  double narrow = 0, wide = 0;
  std::vector<int> count(7);
  for (int i = 0; i < n; ++i) {
    // Rounding would give the upper end half of the time.
    ASSERT_EQ(stream.uniform(1.0, next), 1.0);
    const double x = stream.uniform(-2.0, 3.0);
    ASSERT_TRUE(x >= -2 && x < 3);
    const float f = stream.uniform();
    const double d = stream.uniform64();
    ASSERT_TRUE(f >= 0 && f < 1.0f && d >= 0 && d < 1.0);
    narrow += f;
    wide += d;
    ++count.at(stream.below(7));
    hits += stream.bernoulli(0.3);
    const double z = stream.normal();
    sum += z;
    squares += z * z;
  }
  EXPECT_LE(std::fabs(narrow / n - 0.5), kSigmas / std::sqrt(12.0 * n));
  EXPECT_LE(std::fabs(wide / n - 0.5), kSigmas / std::sqrt(12.0 * n));
  int even = 0;
  for (int i = 0; i < n; ++i) even += stream.below(0xaaaaaaaaaaaaaaab) % 2 == 0;
  EXPECT_LE(std::fabs(even - n / 2), kSigmas * std::sqrt(n / 4.0));
  for (const int c : count) EXPECT_LE(std::fabs(c - n / 7.0), kSigmas * std::sqrt(n * 6 / 49.0));
  EXPECT_LE(std::fabs(hits - 0.3 * n), kSigmas * std::sqrt(n * 0.21));
  EXPECT_LE(std::fabs(sum / n), kSigmas / std::sqrt(n));
  EXPECT_LE(std::fabs(squares / n - 1), kSigmas * std::sqrt(2.0 / n));
}

}  // namespace
}  // namespace halfstep
