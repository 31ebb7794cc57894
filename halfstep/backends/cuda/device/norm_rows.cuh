// SPDX-License-Identifier: Apache-2.0
// Rows with statistics of their own: what layer_norm, rms_norm and group_norm share with their backward pass.
#pragma once

#include <initializer_list>

#include "device/norm.cuh"

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

/// The same for any `inner`, which `by_inner` divides by, and parameters that lie anywhere.
template <int kWidth>
__device__ __forceinline__ void load_parameters(const float* values, const RowShape& shape, const Divisor& by_inner,
                                                int64_t first, int pack, float (&to)[kWidth]) {
  const auto begin = static_cast<uint32_t>(pack * kWidth);
  const float* from = values + first;
  if (shape.inner == 1) {
#pragma unroll
    for (uint32_t j = 0; j < kWidth; ++j) to[j] = from[begin + j];
    return;
  }
  const uint32_t number = by_inner.divide(begin);
  if (by_inner.divide(begin + kWidth - 1) == number) {
    const float one = from[number];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) to[j] = one;
  } else {
#pragma unroll
    for (uint32_t j = 0; j < kWidth; ++j) to[j] = from[by_inner.divide(begin + j)];
  }
}

/// Two sums for each place of a pack, in float32 for some packs at a time and in float64 of these, as reductions have
/// them.
template <int kWidth>
struct PackSums {
  static constexpr int kMost = 32;  ///< packs before flush() must come
  float a[kWidth] = {}, b[kWidth] = {};
  Two total{0, 0};
  int packs = 0;
  __device__ __forceinline__ void flush() {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      total.a += static_cast<double>(a[j]);
      total.b += static_cast<double>(b[j]);
      a[j] = b[j] = 0;
    }
    packs = 0;
  }
  __device__ __forceinline__ void count() {
    if (++packs == kMost) flush();
  }
};

/// Whether kernels may read rows of tensors pack by pack, and count their elements in 31 bits.
inline bool rows_of_packs(const RowShape& shape, int width, std::initializer_list<const Tensor*> tensors) {
  if (shape.length % width != 0 || shape.length >= int64_t{1} << 31) return false;
  for (const Tensor* t : tensors) {
    if (!is_fast(t->dtype) || !starts_even(*t, width)) return false;
  }
  return true;
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
