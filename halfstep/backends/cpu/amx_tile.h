// SPDX-License-Identifier: Apache-2.0
// Products of pairs of bfloat16 on the tile registers of processors with AMX (Sapphire Rapids and later).
#pragma once

#include <cstddef>
#include <cstdint>

#include "halfstep/core/export.h"

namespace halfstep::cpu {

/// Rows of a tile, and 32-bit lanes of each.
inline constexpr std::int64_t kTileLanes = 16;

/// Bytes of rows, or of a panel of columns, from which on it pays to load them so that they don't take the first-level
/// cache from the other operand, which is read again (TileProduct::rows_once, and by_rows of windows): 1x1
/// convolutions in bf16 with 256 or more channels took 0.90 to 1.04 of the time so, those with 64 or 128, whose rows
/// fit, 1.05 to 1.24 (Granite Rapids, layers of ResNet-50, 64 rows a panel). Windows of 3x3 by rows took 0.94 to 1.00
/// of it with 64 to 512 channels and operands in memory, 1.11 and 1.14 with 32 channels.
inline constexpr std::int64_t kBytesReadOnce = 32 << 10;

/// How many bfloat16 numbers an element is the sum of (split_block.h), and which of their products are computed.
enum class TileParts : std::uint8_t {
  one,
  two,          ///< all four products
  leading_two,  ///< the first two parts of three, without the product of both second parts: three products
  three,        ///< products of parts i and j with i + j <= 2: six; the other three are less than 2^-24 of the whole
};
constexpr std::int64_t count_parts(TileParts parts) {
  return parts == TileParts::one ? 1 : parts == TileParts::three ? 3 : 2;
}
constexpr std::int64_t count_products(TileParts parts) {
  constexpr std::int64_t kProducts[] = {1, 4, 3, 6};
  return kProducts[static_cast<std::size_t>(parts)];
}

/// c[i][j] = (accumulate ? c[i][j] : 0) + the sum over all steps and both halves of a's and b's pairs, in float32.
/// Each 32 bits of a and b are a pair of bfloat16 that follow each other along the sum.
struct TileProduct {
  std::int64_t steps;    ///< a multiple of 16, with zeros behind the last one
  std::int64_t rows;     ///< of c and of a
  std::int64_t columns;  ///< of c; of b there are a multiple of 32
  /// Row i's step s at a[i / 16 * a_rows + i % 16 * a_row + s / 16 * a_steps + s % 16]. As packed by turn_places(): 16
  /// rows by 16 steps after each other, a row's 16 steps in a line; then the next steps.
  const std::uint32_t* a;
  std::int64_t a_row, a_steps, a_rows;
  /// Where steps of a are in several places: each run of `run_steps`, a multiple of 16, begins `runs[...]` behind a.
  const std::int64_t* runs = nullptr;
  std::int64_t run_steps = 0;
  bool rows_once = false;  ///< hints that rows needn't stay in the first-level cache, see kBytesReadOnce
  /// Each 32 rows are multiplied by all columns, which are loaded so that they leave the first-level cache to the rows.
  /// Otherwise all rows are multiplied by each 32 columns. A rest of less than 32 columns always comes last.
  bool by_rows = false;
  /// Panels of 32 columns, step after step. Of elements of several parts, each 16 steps have those of all parts after
  /// each other.
  const std::uint32_t* b;
  /// For b that isn't packed so, of at most 32 columns: the distance between parts, and between groups of 16 steps.
  std::int64_t b_part = 2 * kTileLanes * kTileLanes, b_steps = 0;
  float* c;
  std::int64_t ldc;
  bool accumulate;
  TileParts parts = TileParts::one;  ///< multiply_rounded() takes only one
  std::int64_t a_part = 0;           ///< distance between the parts of a
  /// Memory that multiply_rounded() prefetches into the second-level cache, because the next product reads it.
  const void* next = nullptr;
  std::int64_t next_bytes = 0;
  /// Of elements of several parts: what multiply() calls after each four products of tiles, or fewer at the edges. It
  /// must neither use nor release tiles (side_work.h).
  void (*beside)(void* state) = nullptr;
  void* beside_state = nullptr;

  /// How often multiply() calls `beside`.
  std::int64_t count_beside() const {
    const std::int64_t side = 2 * kTileLanes;
    return (rows + side - 1) / side * ((columns + side - 1) / side) * (steps / kTileLanes) * count_products(parts);
  }
  /// Sets a as packed memory, when `steps` and `parts` are set: each 16 steps have those of all parts after each other.
  void set_packed(const std::uint32_t* packed) {
    a = packed;
    a_row = kTileLanes, a_part = kTileLanes * kTileLanes, a_steps = count_parts(parts) * a_part;
    a_rows = steps * kTileLanes * count_parts(parts);
  }
};

/// What becomes of sums that are not stored as float32: element (i, j) + bias[j], activated and rounded to nearest even
/// as bfloat16, at to[i * stride + j]. Magnitudes below 2^-126 are 0.
struct TileResults {
  std::uint16_t* to;
  std::int64_t stride;
  const float* bias;  ///< or null
  bool relu;
  /// Row i of the sums belongs to row rows[i] of the results, or nowhere if that is negative; null: to row i.
  const std::int32_t* rows;
  /// Whole cache lines are written with non-temporal stores. The thread must call fence() before it signals others.
  bool stream;
};

/// Ways to multiply: by the processor, or by the model of it (amx_model.h). A thread that multiplied calls release()
/// when it is done, since its tiles are otherwise saved whenever another program runs.
struct AmxKernels {
  void (*multiply)(const TileProduct& product);
  /// With `c`, `ldc` and `accumulate` unused. A block's sums are rounded while the next block's are made.
  void (*multiply_rounded)(const TileProduct& product, const TileResults& results);
  void (*fence)();  ///< after results with `stream`
  void (*release)();
};
HS_API AmxKernels amx_kernels(bool by_processor) noexcept;

/// Products of tiles in registers, of numbers other than zero, four a round; returns their operations, a multiply-add
/// being two. By the processor, which must have them.
HS_API double run_tile_products(std::int64_t rounds);

/// Whether compute_isa() has AMX and Linux lets this process use the tiles, which is asked for by the first call.
HS_API bool amx_usable() noexcept;

/// Most channels that turn_places() takes at a time.
inline constexpr std::int64_t kMostTurned = 256;

/// 32 places of `n` channels of 16 bits, `first` and the next ones, as 16 steps of TileProduct::a with as many rows,
/// and zeros up to a multiple of 16: places 2 j in the lower and 2 j + 1 in the upper half of step j.
struct PlacesToTurn {
  const void* const* places;
  std::int64_t first;
  std::int64_t n;      ///< at most kMostTurned
  std::int64_t steps;  ///< TileProduct::steps
  std::uint32_t* to;   ///< the first row's first of these steps
  std::int64_t ahead;  ///< bytes behind each place that will be wanted soon
};
HS_API void turn_places(const PlacesToTurn& p);
/// Without vectors.
HS_API void turn_places_plainly(const PlacesToTurn& p);

}  // namespace halfstep::cpu
