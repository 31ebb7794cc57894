// SPDX-License-Identifier: Apache-2.0
// AMX's tiles in plain C++, as Intel's Software Developer's Manual describes them (volume 1, chapter 18, and the
// instructions' pages in volume 2): what kernels of tiles are tested with where no such processor is.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "halfstep/core/export.h"

namespace halfstep::cpu {

/// What LDTILECFG reads: the shapes of the tiles.
struct TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

/// What the processor answers with an exception.
struct TileFault : std::logic_error {
  using std::logic_error::logic_error;
};

/// A thread's tile registers. The instructions throw TileFault where the processor would fault. Strides are in bytes.
class HS_API TileModel {
 public:
  static constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

  /// LDTILECFG: all tiles become zero. TILERELEASE: no tile has a shape.
  void configure(const TileConfig& config);
  void release();
  bool configured() const { return configured_; }
  /// TILELOADD, TILESTORED, TILEZERO. What lies outside of a tile's shape becomes zero.
  void load(int tile, const void* from, std::int64_t stride);
  void store(int tile, void* to, std::int64_t stride) const;
  void zero(int tile);
  /// TDPBF16PS: c[m][n] += the products of all pairs a[m][k] and b[k][n]. The products of the pairs' first and of their
  /// second elements have a sum each, begun at zero and added to by fused multiplications; the two are added, then c.
  /// Each rounds to nearest even; subnormal numbers are zero wherever they are read or would come out.
  void multiply(int c, int a, int b);

  // The same with constant numbers, as the intrinsics want them.
  template <int Tile>
  void load(const void* from, std::int64_t stride) {
    load(Tile, from, stride);
  }
  template <int Tile>
  void store(void* to, std::int64_t stride) const {
    store(Tile, to, stride);
  }
  template <int Tile>
  void zero() {
    zero(Tile);
  }
  template <int C, int A, int B>
  void multiply() {
    multiply(C, A, B);
  }

 private:
  struct Tile {
    int rows = 0, row_bytes = 0;
    std::uint8_t data[kRows][kRowBytes] = {};
  };
  const Tile& shaped(int tile) const;
  Tile& shaped(int tile) { return const_cast<Tile&>(static_cast<const TileModel*>(this)->shaped(tile)); }

  bool configured_ = false;
  Tile tiles_[kTiles];
};

}  // namespace halfstep::cpu
