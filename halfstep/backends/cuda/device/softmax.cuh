// SPDX-License-Identifier: Apache-2.0
// What softmax and the losses over classes share: a row's largest element and the sum of exponentials above it, in one
// pass over memory.
#pragma once

#include <cmath>

#include "device/rows.cuh"

namespace hscuda {

__device__ __forceinline__ float exponential(float x) { return std::exp(x); }
__device__ __forceinline__ double exponential(double x) { return std::exp(x); }

/// Of some elements: the largest (NaN where there is one), and the sum of exp(x - top).
template <class C>
struct Exponentials {
  double sum = 0;
  C top = static_cast<C>(-INFINITY);

  /// Takes n more elements in. Places without one are -infinity.
  template <int n>
  __device__ __forceinline__ void add(const C (&v)[n]) {
    C most = v[0];
#pragma unroll
    for (int k = 1; k < n; ++k) most = Largest{}(most, v[k]);
    if (most > top || most != most) {
      if (top != static_cast<C>(-INFINITY)) sum *= static_cast<double>(exponential(top - most));
      top = most;
    }
    if (top == static_cast<C>(-INFINITY)) return;
    C part = 0;
#pragma unroll
    for (int k = 0; k < n; ++k) part += exponential(v[k] - top);
    sum += static_cast<double>(part);
  }
  /// The sum as the formula has it: NaN where all are -infinity.
  __device__ __forceinline__ double total() const {
    return top == static_cast<C>(-INFINITY) ? static_cast<double>(NAN) : sum;
  }
};
struct JoinExponentials {
  template <class C>
  __device__ __forceinline__ Exponentials<C> operator()(const Exponentials<C>& a, const Exponentials<C>& b) const {
    Exponentials<C> r;
    r.top = Largest{}(a.top, b.top);
    // Equal tops may be infinite: no difference is taken then.
    const double left = a.top == r.top ? a.sum : a.sum * static_cast<double>(exponential(a.top - r.top));
    const double right = b.top == r.top ? b.sum : b.sum * static_cast<double>(exponential(b.top - r.top));
    r.sum = left + right;
    return r;
  }
};

/// The share of thread `lane` of `lanes` in a row; JoinExponentials joins them.
template <class C, class T>
__device__ __forceinline__ Exponentials<C> exponentials_of(const T* row, int64_t stride, int64_t length, int lane,
                                                           int lanes) {
  constexpr int kWidth = static_cast<int>(16 / sizeof(T)), kChunk = 8;
  Exponentials<C> result;
  const auto one_by_one = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin + lane; i < end; i += lanes * kChunk) {
      C v[kChunk];
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        const int64_t at = i + k * lanes;
        v[k] = at < end ? static_cast<C>(value_of(row[at * stride])) : static_cast<C>(-INFINITY);
      }
      result.add(v);
    }
  };
  if (stride != 1 || length < 4 * kWidth) {
    one_by_one(0, length);
    return result;
  }
  // The elements before the first whole pack and behind the last one go one by one.
  const auto misplaced = static_cast<int64_t>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kWidth);
  const int64_t head = misplaced == 0 ? 0 : kWidth - misplaced, packs = (length - head) / kWidth;
  const auto* from = reinterpret_cast<const Pack<T, kWidth>*>(row + head);
  one_by_one(0, head);
  constexpr int kUnroll = 2;
  for (int64_t i = lane; i < packs; i += lanes * kUnroll) {
    Pack<T, kWidth> loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (i + u * lanes < packs) loaded[u] = from[i + u * lanes];
    }
    C v[kUnroll * kWidth];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        v[u * kWidth + j] =
            i + u * lanes < packs ? static_cast<C>(value_of(loaded[u].values[j])) : static_cast<C>(-INFINITY);
      }
    }
    result.add(v);
  }
  one_by_one(head + packs * kWidth, length);
  return result;
}

}  // namespace hscuda
