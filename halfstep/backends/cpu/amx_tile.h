// SPDX-License-Identifier: Apache-2.0
// Products of pairs of bfloat16 on the tile registers of processors with AMX (Sapphire Rapids and later).
#pragma once

#include <cstdint>

#include "halfstep/core/export.h"

namespace halfstep::cpu {

/// Rows of a tile, and 32-bit lanes of each.
inline constexpr std::int64_t kTileLanes = 16;

/// c[i][j] = (accumulate ? c[i][j] : 0) + the sum over all steps and both halves of a's and b's pairs, in float32.
/// Each 32 bits of a and b are a pair of bfloat16 that follow each other along the sum.
struct TileProduct {
  std::int64_t steps;      ///< a multiple of 16, with zeros behind the last one
  std::int64_t rows;       ///< of c; of a there are a multiple of 16
  std::int64_t columns;    ///< of c; of b there are a multiple of 32
  const std::uint32_t* a;  ///< 16 rows by 16 steps after each other, a row's 16 steps in a line; then the next steps
  const std::uint32_t* b;  ///< panels of 32 columns, step after step
  float* c;
  std::int64_t ldc;
  bool accumulate;
  void (*between)(void* context);  ///< called before each 32 x 32 of c, unless null
  void* context;
};

/// Ways to multiply: by the processor, or by the model of it (amx_model.h). A thread that multiplied calls release()
/// when it is done, since its tiles are otherwise saved whenever another program runs.
struct AmxKernels {
  void (*multiply)(const TileProduct& product);
  void (*release)();
};
HS_API AmxKernels amx_kernels(bool by_processor) noexcept;

/// Whether compute_isa() has AMX and Linux lets this process use the tiles, which is asked for by the first call.
HS_API bool amx_usable() noexcept;

/// to[i * 16 + j] = from[j * stride + i], i and j < 16: 16 steps of 16 rows as TileProduct::a has them.
HS_API void transpose_pairs(const std::uint32_t* from, std::int64_t stride, std::uint32_t* to);
/// Without vectors.
HS_API void transpose_pairs_plainly(const std::uint32_t* from, std::int64_t stride, std::uint32_t* to);

}  // namespace halfstep::cpu
