// SPDX-License-Identifier: Apache-2.0
// Rows with statistics of their own: what layer_norm, rms_norm and group_norm share with their backward pass.
#pragma once

#include "norm.cuh"

namespace hscuda {

/// Which parameters go with a row of `length` elements: element i of row r has number (r mod groups) per_row + i /
/// inner.
struct RowShape {
  int64_t rows, length, inner, groups;
  bool rms;
  int64_t per_row() const { return length / inner; }
  /// Of element i of the row; `first` is first_parameter(row).
  __device__ __forceinline__ int64_t parameter(int64_t first, int64_t i) const {
    return first + (inner == 1 ? i : i / inner);
  }
  __device__ __forceinline__ int64_t first_parameter(int64_t row) const {
    return groups == 1 ? 0 : row % groups * (length / inner);
  }
};
inline RowShape row_shape(const halfstep_row_norm_attributes& a, const Tensor& x) {
  return {a.rows, a.rows > 0 ? x.numel / a.rows : 0, a.inner, a.groups, a.rms != 0};
}

/// Threads of a row: a warp or the whole block.
template <bool kBlock>
struct RowThreads {
  static constexpr int kCount = kBlock ? kThreads : kWarp;
  static constexpr int kRows = kThreads / kCount;  ///< of a block
  __device__ static __forceinline__ int lane() { return kBlock ? threadIdx.x : threadIdx.x % kWarp; }
  __device__ static __forceinline__ int64_t first_row() {
    return static_cast<int64_t>(blockIdx.x) * kRows + (kBlock ? 0 : threadIdx.x / kWarp);
  }
  template <class V, class Op>
  __device__ static __forceinline__ V reduce(V value, Op op, V identity) {
    if constexpr (kBlock) {
      return block_reduce(value, op, identity);
    } else {
      return warp_reduce(value, op);
    }
  }
};

/// Two sums in what is computed in.
template <class C>
struct Pair {
  C a, b;
};
struct AddPair {
  template <class C>
  __device__ __forceinline__ Pair<C> operator()(Pair<C> x, Pair<C> y) const {
    return {x.a + y.a, x.b + y.b};
  }
};

/// The factors (or offsets) of a pack of elements: of each its own, or one for all (`shared`, where `inner` is a
/// multiple of the pack).
template <int kWidth>
__device__ __forceinline__ void load_parameters(const float* values, const RowShape& shape, int64_t first, int64_t pack,
                                                float (&to)[kWidth]) {
  if (shape.inner == 1) {
    const auto* from = reinterpret_cast<const Pack<float, 4>*>(values) + pack * (kWidth / 4);
#pragma unroll
    for (int k = 0; k < kWidth / 4; ++k) {
      const Pack<float, 4> four = from[k];
#pragma unroll
      for (int j = 0; j < 4; ++j) to[4 * k + j] = four.values[j];
    }
  } else {
    const float one = values[shape.parameter(first, pack * kWidth)];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) to[j] = one;
  }
}

/// Calls f(each, block) with the plan's choice where it is known when compiling.
template <int kMost, class F>
void with_rows_plan(const NormRowsPlan& plan, F&& f) {
  const auto with_each = [&](auto block) {
    switch (plan.each) {
      case 1:
        return f(std::integral_constant<int, 1>(), block);
      case 2:
        return f(std::integral_constant<int, 2>(), block);
      case 4:
        return f(std::integral_constant<int, 4>(), block);
      default:
        return f(std::integral_constant<int, kMost>(), block);
    }
  };
  if (plan.block) {
    with_each(std::true_type());
  } else {
    with_each(std::false_type());
  }
}

}  // namespace hscuda
