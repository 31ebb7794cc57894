// SPDX-License-Identifier: Apache-2.0
// Square tiles turned by vectors.
#pragma once

#include <cstdint>
#include <cstring>

#include "halfstep/core/export.h"

namespace halfstep::cpu {

/// Rows and columns of a tile of elements of this size: rows are of two lines of cache, or one of single bytes.
constexpr std::int64_t tile_side(std::int64_t item_size) { return item_size == 1 ? 64 : 128 / item_size; }

/// Copies n elements of a tile's row. Most rows are whole: a few moves then, instead of a call.
template <class U>
void copy_tile_row(const U* from, std::int64_t n, U* to) {
  constexpr std::int64_t kSide = tile_side(sizeof(U));
  if (n == kSide) {
    std::memcpy(to, from, kSide * sizeof(U));
  } else {
    std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(U));
  }
}

/// to[i, j] = from[j, i], i and j below the tile's side, both dense and aligned to 32 bytes.
HS_API void transpose_tile(const std::uint8_t* from, std::uint8_t* to);
HS_API void transpose_tile(const std::uint16_t* from, std::uint16_t* to);
HS_API void transpose_tile(const std::uint32_t* from, std::uint32_t* to);
HS_API void transpose_tile(const std::uint64_t* from, std::uint64_t* to);
HS_API void transpose_tile(const float* from, float* to);

}  // namespace halfstep::cpu
