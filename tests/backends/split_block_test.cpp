// SPDX-License-Identifier: Apache-2.0
// float32 in parts of bfloat16: the sum of three parts is the number, that of two is within 2^-17 of it, by vectors as
// by plain loops, in every order of memory; and what isn't finite is found.
#include "halfstep/backends/cpu/split_block.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "halfstep/backends/cpu/isa.h"
#include "tests/backends/gemm_case.h"

namespace halfstep::cpu {
namespace {

using SplitBlock = ByIsa;

constexpr std::uint32_t kUntouched = 0x7FC1'7FC1;

// Numbers of all magnitudes whose parts are normal, both ends of them, and 0.
std::vector<float> numbers(std::int64_t n) {
  std::mt19937 random(1);
  std::vector<float> all = {0.0F,      -0.0F,           1.0F,      0x1.fffffep0F, -0x1.fefffep0F, 0x1.ff0002p5F,
                            0x1p-126F, 0x1.fefffep127F, 0x1.01p3F, 0x1.008001p3F, 0x1.010001p-3F, 0x1.ff8p10F};
  while (static_cast<std::int64_t>(all.size()) < n) {
    const auto exponent = static_cast<std::uint32_t>(17 + random() % 236);  // from 2^-110 to 2^126
    all.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random() % 2) << 31 | exponent << 23 |
                                       static_cast<std::uint32_t>(random() % (1U << 23))));
  }
  all.resize(static_cast<std::size_t>(n));
  return all;
}

float upper(std::uint32_t pair) { return std::bit_cast<float>(pair & 0xFFFF0000); }
float lower(std::uint32_t pair) { return std::bit_cast<float>(pair << 16); }

template <class F>
void for_floats(F&& f) {
  f(SplitFloat{});
  f(SplitFloatInTwo{});
}

// The parts of a pair's halves add up to the numbers, and each is at most 2^-8 of the one before it. Of two parts, the
// second one is rounded to 8 bits, at most 2^-9 of 2^-8.
template <class Number>
void expect_pair(const std::uint32_t* at, std::int64_t part, float first, float second) {
  for (const bool high : {false, true}) {
    const float number = high ? second : first;
    double sum = 0, before = std::numeric_limits<double>::infinity();
    for (std::int64_t p = 0; p < Number::kParts; ++p) {
      const auto value = static_cast<double>(high ? upper(at[p * part]) : lower(at[p * part]));
      ASSERT_LE(std::abs(value), 0x1p-8 * before) << number;
      before = value == 0 ? 0 : std::exp2(std::floor(std::log2(std::abs(value))) + 1);
      sum += value;
    }
    const double exact = number, lost = Number::kParts == 3 ? 0 : 0x1p-17 * std::abs(exact);
    ASSERT_LE(std::abs(sum - exact), lost) << number;
  }
}

TEST_P(SplitBlock, AddsUpAlong) {
  for_floats([&]<class Number>(Number) {
    for (const std::int64_t n : {1, 15, 16, 17, 31, 32, 33, 100, 960}) {
      const std::vector<float> from = numbers(n);
      const std::int64_t groups = (n + 31) / 32, part = 20, group = 100;
      std::vector<std::uint32_t> to(static_cast<std::size_t>(groups * group), kUntouched);
      split_along<Number>(from.data(), n, {to.data(), part}, group, 0);
      const auto at = [&](std::int64_t i) { return i < n ? from[static_cast<std::size_t>(i)] : 0.0F; };
      for (std::int64_t g = 0; g < groups; ++g) {
        for (std::int64_t i = 0; i < 16; ++i) {
          expect_pair<Number>(to.data() + g * group + i, part, at(g * 32 + i), at(g * 32 + 16 + i));
        }
        EXPECT_EQ(to[static_cast<std::size_t>(g * group + 16)], kUntouched);
        EXPECT_EQ(to[static_cast<std::size_t>(g * group + 56)], kUntouched);
      }
    }
  });
}

// All numbers of float16 but NaN and infinities, in each order of memory: two parts.
TEST_P(SplitBlock, AddsUpHalves) {
  std::vector<Half> all;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Half x = std::bit_cast<Half>(static_cast<std::uint16_t>(bits));
    if (std::isfinite(static_cast<float>(x))) all.push_back(x);
  }
  ASSERT_EQ(all.size() % 1024, 0U);
  const auto at = [&](std::size_t i) { return static_cast<float>(all[i]); };
  const auto expect = [&](const std::uint32_t* pair, std::int64_t part, float first, float second) {
    ASSERT_EQ(lower(pair[0]) + lower(pair[part]), first);
    ASSERT_EQ(upper(pair[0]) + upper(pair[part]), second);
    ASSERT_LE(std::abs(lower(pair[part])), 0x1p-8F * std::abs(lower(pair[0])));
  };
  std::vector<std::uint32_t> to(1024);
  for (std::size_t i = 0; i < all.size(); i += 1024) {
    const Half* const from = all.data() + i;
    split_along<SplitHalf>(from, 1024, {to.data(), 16}, 32, 0);
    for (std::size_t j = 0; j < 1024; ++j) {
      if (j % 32 < 16) expect(to.data() + j / 32 * 32 + j % 32, 16, at(i + j), at(i + j + 16));
    }
    split_across<SplitHalf>(from, from + 512, 500, {to.data(), 32}, 64, 0);
    for (std::size_t j = 0; j < 500; ++j) expect(to.data() + j / 32 * 64 + j % 32, 32, at(i + j), at(i + 512 + j));
    const Half* lines[32];
    for (std::size_t j = 0; j < 32; ++j) lines[j] = from + j * 32;
    split_turned<SplitHalf>(lines, 13, {to.data(), 256}, 0);
    for (std::size_t j = 0; j < 13 * 16; ++j) {
      expect(to.data() + j, 256, at(i + j % 16 * 32 + j / 16), at(i + (j % 16 + 16) * 32 + j / 16));
    }
    split_columns<SplitHalf>(from, 64, 11, 32, {to.data(), 512});
    for (std::size_t j = 0; j < 11 * 16; ++j) {
      expect(to.data() + j % 16 * 32 + j / 16, 512, at(i + j / 16 * 64 + j % 16), at(i + j / 16 * 64 + j % 16 + 16));
    }
  }
}

TEST_P(SplitBlock, AddsUpAcross) {
  for_floats([&]<class Number>(Number) {
    for (const std::int64_t n : {1, 16, 17, 32, 40, 96}) {
      const std::vector<float> from = numbers(2 * n);
      const std::int64_t part = 64, panel = 256;
      std::vector<std::uint32_t> to(static_cast<std::size_t>((n + 31) / 32 * panel), kUntouched);
      split_across<Number>(from.data(), from.data() + n, n, {to.data(), part}, panel, 0);
      for (std::int64_t j = 0; j < n; ++j) {
        expect_pair<Number>(to.data() + j / 32 * panel + j % 32, part, from[static_cast<std::size_t>(j)],
                            from[static_cast<std::size_t>(n + j)]);
      }
      EXPECT_EQ(to[32], kUntouched);
    }
  });
}

TEST_P(SplitBlock, AddsUpTurned) {
  for_floats([&]<class Number>(Number) {
    for (const std::int64_t n : {1, 7, 16, 30}) {
      const std::vector<float> from = numbers(32 * n);
      std::vector<const float*> lines;
      for (std::int64_t i = 0; i < 32; ++i) lines.push_back(from.data() + i * n);
      const std::int64_t part = 300;
      std::vector<std::uint32_t> to(900, kUntouched);
      split_turned<Number>(lines.data(), n, {to.data(), part}, 0);
      for (std::int64_t j = 0; j < 16; ++j) {
        for (std::int64_t i = 0; i < 16; ++i) {
          const auto at = [&](std::int64_t line) {
            return j < n ? from[static_cast<std::size_t>(line * n + j)] : 0.0F;
          };
          expect_pair<Number>(to.data() + j * 16 + i, part, at(i), at(i + 16));
        }
      }
      EXPECT_EQ(to[256], kUntouched);
    }
  });
}

TEST_P(SplitBlock, AddsUpColumns) {
  for_floats([&]<class Number>(Number) {
    for (const std::int64_t count : {1, 9, 16, 20}) {
      for (const std::int64_t n : {1, 16, 25, 32}) {
        const std::int64_t stride = 37, part = 600;
        const std::vector<float> from = numbers(count * stride);
        std::vector<std::uint32_t> to(1800, kUntouched);
        split_columns<Number>(from.data(), stride, count, n, {to.data(), part});
        for (std::int64_t j = 0; j < 16; ++j) {
          const auto at = [&](std::int64_t i) {
            return j < count && i < n ? from[static_cast<std::size_t>(j * stride + i)] : 0.0F;
          };
          for (std::int64_t i = 0; i < 16; ++i) expect_pair<Number>(to.data() + i * 32 + j, part, at(i), at(i + 16));
        }
        EXPECT_EQ(to[16], kUntouched);
      }
    }
  });
}

// A part at least isn't finite, so that no product with any but NaN hides it.
TEST_P(SplitBlock, KeepsWhatIsNotFinite) {
  for_floats([&]<class Number>(Number) {
    for (const std::uint32_t bits : {0x7F800000U, 0xFF800000U, 0x7FC00000U, 0x7F800001U, 0x7FFFFFFFU, 0xFFFFFFFFU,
                                     0xFFC12345U, 0x7F7FFFFFU, 0x7F7F8000U, 0xFF7FFFFFU}) {
      for (const std::int64_t at : {0, 20}) {
        std::vector<float> from(32, 1.0F);
        from[static_cast<std::size_t>(at)] = std::bit_cast<float>(bits);
        std::vector<std::uint32_t> to(48);
        split_along<Number>(from.data(), 32, {to.data(), 16}, 48, 0);
        bool found = false;
        for (std::int64_t p = 0; p < Number::kParts; ++p) {
          const std::uint32_t pair = to[static_cast<std::size_t>(p * 16 + at % 16)];
          found = found || !std::isfinite(at < 16 ? lower(pair) : upper(pair));
        }
        EXPECT_TRUE(found) << std::hex << bits;
      }
    }
  });
}

TEST_P(SplitBlock, CopiesAndFindsWhatIsNotFinite) {
  const std::int64_t rows = 5, columns = 41, panel = 200, stride = 64;
  std::vector<float> sums(400), bias(columns);
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = static_cast<float>(i);
  for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = static_cast<float>(1000 * i);
  const std::vector<std::int32_t> lines = {2, -1, 0, 4, -1};
  const auto sum = [&](std::int64_t i, std::int64_t j) {
    return sums[static_cast<std::size_t>(j / 32 * panel + i * 32 + j % 32)];
  };
  for (const bool mapped : {false, true}) {
    for (const bool stream : {false, true}) {
      std::vector<float> to(rows * stride, -1.0F);
      PanelSums from = {sums.data(), panel, rows, columns, nullptr, nullptr};
      if (mapped) from.bias = bias.data(), from.lines = lines.data();
      EXPECT_TRUE(copy_finite(from, to.data(), stride, stream));
      std::vector<float> expected(rows * stride, -1.0F);
      for (std::int64_t i = 0; i < rows; ++i) {
        const std::int64_t line = mapped ? lines[static_cast<std::size_t>(i)] : i;
        for (std::int64_t j = 0; line >= 0 && j < columns; ++j) {
          expected[static_cast<std::size_t>(line * stride + j)] =
              sum(i, j) + (mapped ? bias[static_cast<std::size_t>(j)] : 0.0F);
        }
      }
      EXPECT_EQ(to, expected);
    }
  }
  PanelSums from = {sums.data(), panel, rows, columns, nullptr, nullptr};
  std::vector<Half> halves(rows * stride);
  EXPECT_TRUE(copy_finite(from, halves.data(), stride, true));
  EXPECT_EQ(static_cast<float>(halves[2 * stride + 40]), sum(2, 40));
  EXPECT_EQ(static_cast<float>(halves[2 * stride + 41]), 0);
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    for (const std::size_t at : {0U, 31U, 4U * 32U, 200U + 8U, 200U + 3U * 32U}) {
      const float before = sums[at];
      sums[at] = bad;
      EXPECT_FALSE(copy_finite<float>(from, nullptr, 0, false)) << at;
      sums[at] = before;
    }
  }
  for (const std::size_t at : {200U + 9U, 5U * 32U, 32U}) {  // outside, and of a line that doesn't count
    const float before = sums[at];
    sums[at] = NAN;
    from.lines = at == 32U ? lines.data() : nullptr;
    EXPECT_TRUE(copy_finite<float>(from, nullptr, 0, false)) << at;
    sums[at] = before;
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, SplitBlock, testing::Values(Isa::avx2, Isa::avx512),
                         [](const auto& info) { return std::string(name(info.param)); });

}  // namespace
}  // namespace halfstep::cpu
