// SPDX-License-Identifier: Apache-2.0
// The inner parts of the blocked float32 product, compiled for AVX2 and AVX-512 and chosen at run time.
#pragma once

#include <cstdint>

#include "halfstep/core/dtype.h"

namespace halfstep::cpu {

/// How the operand of which single values are broadcast lies in memory.
enum class GemmScalars : std::uint8_t {
  steps,        ///< contiguous along i: s(i, p) at s[p * s_stride + i]
  rows,         ///< contiguous along p: s(i, p) at s[i * s_stride + p]
  packed_rows,  ///< the same with an s_stride of kGemmRowStride
};
/// Floats between packed rows: an odd number of lines, so that rows don't share sets of the cache. A constant, since
/// rows at known distances need no index registers, with which processors take multiplications and loads apart.
constexpr std::int64_t kGemmRowStride = 400;

/// One tile: c[i][j] = (accumulate ? c[i][j] : 0) + sum over p of s(i, p) * v[p][j], in float32.
struct GemmTile {
  std::int64_t k;
  const float* s;         ///< the operand of which single values are broadcast
  std::int64_t s_stride;  ///< between rows i or steps p
  const float* v;         ///< the operand of which vectors are loaded, contiguous along j, best aligned to 64 bytes
  std::int64_t v_stride;  ///< between steps p
  float* c;
  std::int64_t ldc;
  bool accumulate;
  // Of tiles whose results are 16-bit floats: c holds the sums to add to, which are left as they are.
  void* rounded;
  std::int64_t rounded_stride;  ///< between rows
  const float* bias;            ///< along j, or null
  bool relu;
};
using GemmTileFn = void (*)(const GemmTile& tile);

/// Where the float32 results of a block go: element (i, j) of dtype `dtype` at c + i * row_stride + j * col_stride,
/// one of the strides being 1. `bias` follows i or j.
struct GemmEpilogue {
  const float* from;
  std::int64_t ld;
  std::int64_t rows, cols;
  void* c;
  DType dtype;
  std::int64_t row_stride, col_stride;
  const float* bias;  ///< or null
  bool bias_by_row;
  bool add_c;  ///< c (f32) is added before the bias
  bool relu;
};

struct GemmKernels {
  static constexpr int kMaxRows = 14;
  int lanes;     ///< floats of a vector
  int columns;   ///< of a full tile: two vectors
  int max_rows;  ///< of a tile
  /// [GemmScalars][vectors - 1][rows - 1]
  GemmTileFn tiles[3][2][kMaxRows];
  GemmTileFn tile(GemmScalars scalars, int vectors, std::int64_t rows) const {
    return tiles[static_cast<int>(scalars)][vectors - 1][rows - 1];
  }
  /// Of packed rows: rounded = activation(sums + bias) in f16 or bf16. Null where rounding is faster afterwards.
  GemmTileFn f16_tiles[2][kMaxRows], bf16_tiles[2][kMaxRows];
  GemmTileFn rounded_tile(DType dtype, int vectors, std::int64_t rows) const {
    return (dtype == DType::f16 ? f16_tiles : bf16_tiles)[vectors - 1][rows - 1];
  }
  /// to[p * columns + j] = from(j, p) for p < k, j < n, and 0 for n <= j < columns; from(j, p) at
  /// from + j * j_stride + p * p_stride in elements of dtype (f32, f16, bf16).
  void (*pack)(DType dtype, const void* from, std::int64_t j_stride, std::int64_t p_stride, std::int64_t n,
               std::int64_t k, std::int64_t columns, float* to);
  /// Elements `first` to `first` + n of each row, cut into panels of `width` (up to 32) columns: element j of panel q
  /// of row i, as a float, at to[q * size + i * stride + j]. A panel's last vector is filled up with zeros or with what
  /// follows it in the row; of the last panel only zeros.
  void (*gather)(DType dtype, const void* const* rows, std::int64_t count, std::int64_t first, std::int64_t n,
                 std::int64_t width, std::int64_t size, float* to, std::int64_t stride);
  /// n elements as floats.
  void (*widen)(DType dtype, const void* from, std::int64_t n, float* to);
  void (*finish)(const GemmEpilogue& finish);
  /// out[i * ldo + j] = sum over p of x[i * ldx + p] * w(j, p), w contiguous along p: for few rows i.
  void (*dots)(DType dtype, const void* w, std::int64_t w_stride, std::int64_t n, std::int64_t k, const float* x,
               std::int64_t ldx, std::int64_t rows, float* out, std::int64_t ldo);
  /// out[i * ldo + j] (+)= sum over p of x[i * ldx + p] * w(p, j), w contiguous along j: for few rows or few steps.
  void (*axpys)(DType dtype, const void* w, std::int64_t w_stride, std::int64_t n, std::int64_t k, const float* x,
                std::int64_t ldx, std::int64_t rows, float* out, std::int64_t ldo, bool accumulate);
};

/// Sets `tiles` and the like, and `max_rows`.
void fill_tiles(GemmKernels& kernels);

/// The kernels for compute_isa().
const GemmKernels& gemm_kernels();

}  // namespace halfstep::cpu
