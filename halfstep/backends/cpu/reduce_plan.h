// SPDX-License-Identifier: Apache-2.0
// The geometry of reductions and of ops along one dimension: dimensions are split into kept and reduced ones and merged
// where they lie behind each other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "halfstep/core/dtype.h"
#include "halfstep/core/shape.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/runtime/kernel.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {

/// Some dimensions of a tensor in row-major order; dimension 0 is the innermost.
struct DimGroup {
  int n = 0;
  std::int64_t sizes[kMaxDims];
  std::int64_t strides[kMaxDims];
  std::int64_t numel = 1;

  /// Adds a dimension outside those that are there.
  void push_outer(std::int64_t size, std::int64_t stride) {
    numel *= size;
    if (size == 1) return;
    if (n > 0 && stride == strides[n - 1] * sizes[n - 1]) {
      sizes[n - 1] *= size;
      return;
    }
    sizes[n] = size;
    strides[n++] = stride;
  }
  /// Offset of the i-th element, in elements.
  std::int64_t offset(std::int64_t i) const {
    std::int64_t at = 0;
    for (int d = 0; d < n; ++d) {
      at += i % sizes[d] * strides[d];
      i /= sizes[d];
    }
    return at;
  }
  std::int64_t inner_size() const { return n > 0 ? sizes[0] : 1; }
  std::int64_t inner_stride() const { return n > 0 ? strides[0] : 1; }
  bool contiguous() const { return n == 0 || (n == 1 && strides[0] == 1); }

  /// Calls `f(offset, n, stride)` for the runs of elements [begin, end), in order.
  template <class F>
  void for_runs(std::int64_t begin, std::int64_t end, F&& f) const {
    if (begin >= end) return;
    if (n <= 1) {
      f(begin * inner_stride(), end - begin, inner_stride());
      return;
    }
    while (begin < end) {
      const std::int64_t run = std::min(end - begin, sizes[0] - begin % sizes[0]);
      f(offset(begin), run, strides[0]);
      begin += run;
    }
  }
};

/// Kept and reduced dimensions of `x`; `dims` as in ReduceAttributes (none: all are reduced).
struct ReducePlan {
  DimGroup kept, reduced;
  ReducePlan(const TensorView& x, const IntList& dims) {
    unsigned mask = dims.size == 0 ? ~0u : 0u;
    for (int i = 0; i < dims.size; ++i) mask |= 1u << (dims.values[i] < 0 ? dims.values[i] + x.ndim : dims.values[i]);
    for (int i = x.ndim - 1; i >= 0; --i) (mask >> i & 1 ? reduced : kept).push_outer(x.sizes[i], x.strides[i]);
  }
};

/// The rows of a tensor along one dimension: `rows` of them, each of `length` elements `stride` apart.
struct RowPlan {
  DimGroup rows;
  std::int64_t length = 1, stride = 1;
  RowPlan(const TensorView& x, std::int64_t dim) {
    for (int i = x.ndim - 1; i >= 0; --i) {
      if (i == dim) {
        length = x.sizes[i];
        stride = length == 1 ? 1 : x.strides[i];
      } else {
        rows.push_outer(x.sizes[i], x.strides[i]);
      }
    }
  }
};

/// Whether rows of a few elements lie one behind the other, in the order of `rows`: kernels then take as many together
/// as their blocks hold.
inline bool short_rows_in_order(const DimGroup& rows, std::int64_t length, std::int64_t stride) {
  constexpr std::int64_t kShort = 32;
  return length <= kShort && stride == 1 && rows.n == 1 && rows.inner_stride() == length;
}

/// What an element computes in: float32 for the 16-bit types, else itself.
template <class T>
using ComputeOf = std::conditional_t<std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>, float, T>;

/// Elements of work worth a thread.
inline constexpr std::int64_t kReduceGrain = 32768;
/// Rows of `length` elements worth a thread.
inline std::int64_t row_grain(std::int64_t length) {
  return std::max<std::int64_t>(1, kReduceGrain / std::max<std::int64_t>(length, 1));
}

}  // namespace halfstep::cpu
