// SPDX-License-Identifier: Apache-2.0
// Products of pairs of bfloat16 on the tile registers of processors with AMX (Sapphire Rapids and later).
#pragma once

#include <cstdint>

#include "halfstep/core/export.h"

namespace halfstep::cpu {

/// Rows of a tile, and 32-bit lanes of each.
inline constexpr std::int64_t kTileLanes = 16;

/// What an element is made of: one bfloat16, or several whose sum it is (see split_block.h), largest first.
enum class TileParts : std::uint8_t {
  one,
  two,    ///< all four products
  three,  ///< six products: without those of parts whose numbers add up to more than 2, less than 2^-24 of the whole
};
constexpr std::int64_t count_parts(TileParts parts) { return static_cast<std::int64_t>(parts) + 1; }

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
  const std::uint32_t* b;  ///< panels of 32 columns, step after step; 16 steps of a part, then those of the next one
  /// Where that is not how parts and groups of 16 steps lie: from one's to the next one's, of one panel.
  std::int64_t b_part = 2 * kTileLanes * kTileLanes, b_steps = 0;
  float* c;  ///< element (i, j) is c[i * ldc + j / 32 * c_panel + j % 32]
  std::int64_t ldc;
  std::int64_t c_panel = 2 * kTileLanes;
  bool accumulate;
  TileParts parts = TileParts::one;  ///< multiply_rounded() takes elements of one part
  std::int64_t a_part = 0;           ///< from a part's steps to the next one's
  /// Memory that multiply_rounded() prefetches into the second-level cache, because the next product reads it.
  const void* next = nullptr;
  std::int64_t next_bytes = 0;

  /// After `steps` and `parts` are known. Parts of 16 steps lie after each other.
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
