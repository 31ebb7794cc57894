// SPDX-License-Identifier: Apache-2.0
// For AVX2 alone: it keeps up with the memory that tiles come from.
#include "halfstep/backends/cpu/transpose_tile.h"

#include <hwy/highway.h>

#include <array>

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// Vectors of two blocks of 128 bits, in each of which elements are interleaved.
template <class U>
using TileTag = hn::FixedTag<U, 32 / sizeof(U)>;

// Of vectors whose blocks each hold a row of a square: after it each holds a column. Rows k and k + kSide / 2 are
// interleaved, which moves the lowest bit of an element's column to the lowest of its row; once for each bit.
template <class U, std::size_t kSide>
HWY_INLINE void turn_blocks(std::array<hn::Vec<TileTag<U>>, kSide>& rows) {
  const TileTag<U> d;
  for (std::size_t bit = 1; bit < kSide; bit *= 2) {
    const auto before = rows;
    for (std::size_t k = 0; k < kSide / 2; ++k) {
      rows[2 * k] = hn::InterleaveLower(d, before[k], before[k + kSide / 2]);
      rows[2 * k + 1] = hn::InterleaveUpper(d, before[k], before[k + kSide / 2]);
    }
  }
}

// A square of a vector's lanes on a side.
template <class U>
HWY_INLINE void turn_square(const U* from, U* to, std::int64_t step) {
  constexpr std::size_t kSide = 16 / sizeof(U);
  const TileTag<U> d;
  std::array<hn::Vec<TileTag<U>>, kSide> lower, upper;
  for (std::size_t i = 0; i < kSide; ++i) {
    const auto a = hn::Load(d, from + static_cast<std::int64_t>(i) * step);
    const auto b = hn::Load(d, from + static_cast<std::int64_t>(i + kSide) * step);
    lower[i] = hn::ConcatLowerLower(d, b, a);
    upper[i] = hn::ConcatUpperUpper(d, b, a);
  }
  turn_blocks<U>(lower);
  turn_blocks<U>(upper);
  for (std::size_t i = 0; i < kSide; ++i) {
    hn::Store(lower[i], d, to + static_cast<std::int64_t>(i) * step);
    hn::Store(upper[i], d, to + static_cast<std::int64_t>(i + kSide) * step);
  }
}

template <class U>
void turn_tile(const U* from, U* to) {
  constexpr std::int64_t kSide = tile_side(sizeof(U)), kSquare = 32 / sizeof(U);
  for (std::int64_t i = 0; i < kSide; i += kSquare) {
    for (std::int64_t j = 0; j < kSide; j += kSquare) turn_square(from + j * kSide + i, to + i * kSide + j, kSide);
  }
}

}  // namespace

void transpose_tile(const std::uint8_t* from, std::uint8_t* to) { turn_tile(from, to); }
void transpose_tile(const std::uint16_t* from, std::uint16_t* to) { turn_tile(from, to); }
void transpose_tile(const std::uint32_t* from, std::uint32_t* to) { turn_tile(from, to); }
void transpose_tile(const std::uint64_t* from, std::uint64_t* to) { turn_tile(from, to); }
void transpose_tile(const float* from, float* to) { turn_tile(from, to); }

}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();
