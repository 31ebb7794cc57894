// SPDX-License-Identifier: Apache-2.0
// A matrix product as it is asked for, and as cuBLASLt is asked for it: plain arithmetic, which tests check on the
// host.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>

#include "halfstep/runtime/plugin.h"

namespace hscuda {

/// Matrices that lie alike. Strides in elements.
struct Matrices {
  void* data = nullptr;
  int64_t row = 0;     ///< from one row to the next
  int64_t column = 0;  ///< from one column to the next
  int64_t batch = 0;   ///< from one matrix to the next; 0 repeats one
};

/// c = a b + bias, or c += a b: a [m, k], b [k, n], c [m, n], bias [n], `batch` times.
struct Product {
  int dtype = HALFSTEP_F32;      ///< of a and b
  int out_dtype = HALFSTEP_F32;  ///< of c, of the kind of `dtype`
  int64_t m = 0, n = 0, k = 0, batch = 1;
  Matrices a, b, c;
  const void* bias = nullptr;
  int bias_dtype = HALFSTEP_F32;
  int64_t bias_stride = 1;
  bool accumulate = false;  ///< c += a b. Not with a bias
};

/// A matrix of `rows` and `columns` as a library takes it that knows matrices with one stride of 1: as it is (rows lie
/// behind each other, `ld` elements apart), or turned (columns do).
struct Side {
  bool fits = false;
  bool turned = false;
  int64_t ld = 0;
};
inline Side side_of(int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
  // The stride of a dimension of one is of no meaning, and is anything in views.
  if ((column_stride == 1 || columns == 1) && (row_stride >= columns || rows == 1)) {
    return {true, false, rows == 1 ? columns : row_stride};
  }
  if ((row_stride == 1 || rows == 1) && (column_stride >= rows || columns == 1)) {
    return {true, true, columns == 1 ? rows : column_stride};
  }
  return {};
}

/// All that the choice of an algorithm may depend on; what is in it fits cuBLASLt. Row-major c is column-major c
/// transposed, which is b transposed times a transposed: cuBLASLt's A is b, and its B is a.
struct PlanKey {
  int64_t m = 0, n = 0, k = 0, batch = 1;
  int64_t a_ld = 0, b_ld = 0, c_ld = 0;
  int64_t a_batch = 0, b_batch = 0, c_batch = 0;
  uint8_t dtype = 0, out_dtype = 0;
  uint8_t a_turned = 0, b_turned = 0;  ///< columns lie behind each other: cuBLASLt has to transpose
  uint8_t bias = 0, accumulate = 0, tf32 = 0;
  uint8_t a_align = 0, b_align = 0,
          c_align = 0;  ///< the logarithm (base 2) of what every matrix's address is a multiple of
  uint8_t zeros[6] = {};

  bool operator==(const PlanKey&) const = default;
};
static_assert(std::has_unique_object_representations_v<PlanKey>);

struct PlanKeyHash {
  std::size_t operator()(const PlanKey& key) const {
    uint64_t words[sizeof(PlanKey) / sizeof(uint64_t)];
    std::memcpy(words, &key, sizeof key);
    uint64_t hash = 0x9e3779b97f4a7c15u;
    for (const uint64_t word : words) {
      hash = (hash ^ word) * 0xff51afd7ed558ccdu;  // the multiplier of MurmurHash3's last step
      hash ^= hash >> 32;
    }
    return static_cast<std::size_t>(hash);
  }
};

inline constexpr int kMostAlignment = 8;   // 256 bytes: cuBLASLt asks for no more
inline constexpr int kBiasAlignment = 16;  // bytes; kernels read a bias in packs

/// See PlanKey::a_align. A batch's second matrix may lie worse than the first.
inline uint8_t alignment_of(const void* data, int64_t batch_stride, int64_t item) {
  const auto bits = reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(batch_stride * item);
  return static_cast<uint8_t>(std::min(std::countr_zero(bits | uintptr_t{1} << kMostAlignment), kMostAlignment));
}

inline int64_t float_size(int dtype) { return dtype == HALFSTEP_F64 ? 8 : dtype == HALFSTEP_F32 ? 4 : 2; }

/// Whether cuBLASLt has products of these dtypes with sums of float32 (float64): the table "regular" of
/// cublasLtMatmul().
inline bool dtypes_fit(int dtype, int out_dtype) {
  switch (dtype) {
    case HALFSTEP_F32:
    case HALFSTEP_F64:
      return out_dtype == dtype;
    case HALFSTEP_F16:
    case HALFSTEP_BF16:
      return out_dtype == dtype || out_dtype == HALFSTEP_F32;
    default:
      return false;
  }
}
/// Whether the sizes do: cuBLASLt's are of 32 bits, and not 0.
inline bool sizes_fit(const Product& p) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const auto fits = [](int64_t size) { return size > 0 && size <= kMost; };
  return fits(p.m) && fits(p.n) && fits(p.k) && fits(p.batch);
}
inline bool bias_fits(const Product& p) {
  return p.bias == nullptr || (p.bias_dtype == p.out_dtype && (p.bias_stride == 1 || p.n == 1) &&
                               reinterpret_cast<uintptr_t>(p.bias) % kBiasAlignment == 0);
}

/// What cuBLASLt is asked for; nothing where it isn't.
inline std::optional<PlanKey> plan_key(const Product& p, bool tf32) {
  if (!dtypes_fit(p.dtype, p.out_dtype) || !sizes_fit(p) || !bias_fits(p)) return {};
  const Side a = side_of(p.m, p.k, p.a.row, p.a.column), b = side_of(p.k, p.n, p.b.row, p.b.column),
             c = side_of(p.m, p.n, p.c.row, p.c.column);
  if (!a.fits || !b.fits || !c.fits || c.turned) return {};
  const bool one = p.batch == 1;
  // Results must not lie over each other: they lie behind each other, or next to each other within rows.
  const bool behind = p.c.batch >= (p.m - 1) * c.ld + p.n;
  const bool beside = p.c.batch >= p.n && (p.m == 1 || (p.batch - 1) * p.c.batch + p.n <= c.ld);
  if (!one && !behind && !beside) return {};
  const int64_t item = float_size(p.dtype);
  PlanKey key;
  key.m = p.m, key.n = p.n, key.k = p.k, key.batch = p.batch;
  key.a_ld = a.ld, key.b_ld = b.ld, key.c_ld = c.ld;
  key.a_batch = one ? 0 : p.a.batch, key.b_batch = one ? 0 : p.b.batch, key.c_batch = one ? 0 : p.c.batch;
  key.dtype = static_cast<uint8_t>(p.dtype), key.out_dtype = static_cast<uint8_t>(p.out_dtype);
  key.a_turned = a.turned, key.b_turned = b.turned;
  key.bias = p.bias != nullptr, key.accumulate = p.accumulate;
  key.tf32 = tf32 && p.dtype == HALFSTEP_F32;
  key.a_align = alignment_of(p.a.data, key.a_batch, item);
  key.b_align = alignment_of(p.b.data, key.b_batch, item);
  key.c_align = alignment_of(p.c.data, key.c_batch, float_size(p.out_dtype));
  return key;
}

}  // namespace hscuda
