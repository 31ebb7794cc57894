// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/random_block.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "halfstep/core/box_muller.h"

namespace halfstep::cpu {
namespace {

// Every number of blocks up to some vectors, across the end of the counter's low word. The functions of core/ have
// their own answers to match.
TEST(RandomBlock, WordsAreTheStreams) {
  const PhiloxState state{0x123456789abcdefull, 0xfffffff0ull};
  for (std::int64_t blocks = 0; blocks < 40; ++blocks) {
    std::vector<std::uint32_t> words(static_cast<std::size_t>(4 * blocks) + 1, 77);
    random_words(state, 5, blocks, words.data());
    for (std::size_t i = 0; i + 1 < words.size(); ++i) ASSERT_EQ(words[i], philox_word(state, 20 + i)) << blocks;
    EXPECT_EQ(words.back(), 77u);
  }
}

// Logarithm, square root, series and product err by some 10 units of 2^-53 together, each side.
TEST(RandomBlock, NormalsAreTheStreams) {
  const PhiloxState state{99, ~std::uint64_t{0} - 100};
  for (const std::int64_t blocks : {1, 2, 3, 5, 8, 13, 50000}) {
    std::vector<double> normals(static_cast<std::size_t>(4 * blocks) + 1, 77);
    random_normals(state, 3, blocks, normals.data());
    for (std::size_t i = 0; i + 1 < normals.size(); ++i) {
      const double exact = normal_at(state, 12 + i);
      ASSERT_LE(std::abs(normals[i] - exact), 20 * 0x1p-53 * std::abs(exact)) << i;
    }
    EXPECT_EQ(normals.back(), 77);
  }
}

}  // namespace
}  // namespace halfstep::cpu
