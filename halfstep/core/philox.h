// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>

/// Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1,
/// 2, 3" (SC11), and the conversion of its words into numbers.
///
/// A random tensor's element i is a function of (seed, offset, i) only: it does not matter which thread or device
/// computes it, and skipping ahead costs nothing. Words, uniforms, integers and bernoullis are integer arithmetic and
/// exact conversions, so they are the same bits on every device; normals are in core/box_muller.h.
namespace halfstep {

/// Four random words, one evaluation of the generator.
using PhiloxBlock = std::array<std::uint32_t, 4>;

/// The position of a stream of random numbers. `offset` counts blocks. A plain struct, so that a kernel can be given a
/// pointer to it and a captured graph can be replayed with another.
struct PhiloxState {
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  friend constexpr bool operator==(const PhiloxState&, const PhiloxState&) = default;
};

/// The block function: ten rounds of `counter` under `key`.
constexpr PhiloxBlock philox4x32_10(PhiloxBlock counter, std::array<std::uint32_t, 2> key) noexcept {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xd2511f53u} * counter[0];
    const std::uint64_t product1 = std::uint64_t{0xcd9e8d57u} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(product0)};
    // Weyl sequences: the golden ratio and sqrt(3) - 1.
    key[0] += 0x9e3779b9u;
    key[1] += 0xbb67ae85u;
  }
  return counter;
}

/// Block `index` of the stream that starts at `state`. `attempt` selects an independent block for the same index: the
/// next draw of rejection sampling.
constexpr PhiloxBlock philox_block(PhiloxState state, std::uint64_t index, std::uint32_t attempt = 0) noexcept {
  const std::uint64_t block = state.offset + index;
  return philox4x32_10({static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32), attempt, 0},
                       {static_cast<std::uint32_t>(state.seed), static_cast<std::uint32_t>(state.seed >> 32)});
}

/// Word `i` of the stream: four words a block.
constexpr std::uint32_t philox_word(PhiloxState state, std::uint64_t i) noexcept {
  return philox_block(state, i / 4)[i % 4];
}

/// 64-bit word `i` of the stream: two a block.
constexpr std::uint64_t philox_word64(PhiloxState state, std::uint64_t i, std::uint32_t attempt = 0) noexcept {
  const PhiloxBlock block = philox_block(state, i / 2, attempt);
  const auto at = static_cast<std::size_t>(i % 2) * 2;
  return std::uint64_t{block[at + 1]} << 32 | block[at];
}

/// Blocks to reserve for `n` elements of one word (of 64 bits, for the second) each.
constexpr std::uint64_t philox_blocks(std::uint64_t n) noexcept { return n / 4 + (n % 4 != 0); }
constexpr std::uint64_t philox_blocks64(std::uint64_t n) noexcept { return n / 2 + n % 2; }

/// Uniform in [0, 1): a multiple of 2^-24, the largest 1 - 2^-24. The same number from the same word in f16 and bf16
/// needs fewer bits, or it would round up to 1: `uniform_bits(word, 11)` and `uniform_bits(word, 8)`.
constexpr float uniform_bits(std::uint32_t word, int digits) noexcept {
  return static_cast<float>(word >> (32 - digits)) / static_cast<float>(std::uint32_t{1} << digits);
}
constexpr float uniform_f32(std::uint32_t word) noexcept { return uniform_bits(word, 24); }
/// Uniform in [0, 1): a multiple of 2^-53.
constexpr double uniform_f64(std::uint64_t word) noexcept { return static_cast<double>(word >> 11) * 0x1p-53; }
/// Uniform in (0, 1], for logarithms.
constexpr float uniform_open_f32(std::uint32_t word) noexcept { return static_cast<float>((word >> 8) + 1) * 0x1p-24f; }
constexpr double uniform_open_f64(std::uint64_t word) noexcept {
  return static_cast<double>((word >> 11) + 1) * 0x1p-53;
}

/// A word is below the threshold with probability `p`, to within 2^-33: `philox_word(state, i) < threshold`. 0 and 1
/// are exact. `p` outside [0, 1] is clamped, NaN counts as 0.
constexpr std::uint64_t bernoulli_threshold(double p) noexcept {
  if (!(p > 0)) return 0;
  if (p >= 1) return std::uint64_t{1} << 32;
  return static_cast<std::uint64_t>(p * 0x1p32 + 0.5);
}

namespace detail {
/// Maps a uniform 64-bit word to [0, n): the upper half of the product. False if the word is one of the few that would
/// bias the result and must be rejected (Lemire, "Fast random integer generation in an interval", TOMACS 2019).
constexpr bool map_below(std::uint64_t word, std::uint64_t n, std::uint64_t& result) noexcept {
  __extension__ using Wide = unsigned __int128;
  const Wide product = Wide{word} * n;
  const auto low = static_cast<std::uint64_t>(product);
  result = static_cast<std::uint64_t>(product >> 64);
  return low >= n || low >= (std::uint64_t{0} - n) % n;
}
}  // namespace detail

/// Element `i` of a stream of integers in [0, n), n > 0, each with probability exactly 1 / n. A rejected word is
/// replaced from another counter of the same element, so that the stream needs philox_blocks64(count) blocks in any
/// case.
constexpr std::uint64_t integer_below(PhiloxState state, std::uint64_t i, std::uint64_t n) noexcept {
  std::uint64_t result = 0;
  for (std::uint32_t attempt = 0; !detail::map_below(philox_word64(state, i, attempt), n, result);) ++attempt;
  return result;
}

/// A seed derived from `seed` for the pair (a, b), such as epoch and sample.
constexpr std::uint64_t derive_seed(std::uint64_t seed, std::uint64_t a, std::uint64_t b = 0) noexcept {
  // The key differs from the seed's, so that derived seeds are not part of the seed's stream.
  const PhiloxBlock block = philox4x32_10({static_cast<std::uint32_t>(a), static_cast<std::uint32_t>(a >> 32),
                                           static_cast<std::uint32_t>(b), static_cast<std::uint32_t>(b >> 32)},
                                          {~static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
  return std::uint64_t{block[1]} << 32 | block[0];
}

}  // namespace halfstep
