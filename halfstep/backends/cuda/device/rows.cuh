// SPDX-License-Identifier: Apache-2.0
// Rows of a tensor in kernels: where they begin, and what the threads of one do together.
#pragma once

#include "device/block.cuh"
#include "device/elementwise.cuh"
#include "device/reduce_plan.h"

namespace hscuda {

/// Layout::places() as a loop that stays one: little code where it stands in loops that are unrolled.
template <int N>
__device__ __forceinline__ void walk_places(const Layout<N>& layout, int64_t i, int64_t (&at)[N]) {
  const int last = layout.ndim - 1;
#pragma unroll
  for (int k = 0; k < N; ++k) at[k] = 0;
  if (layout.numel < (int64_t{1} << 31)) {
    auto rest = static_cast<uint32_t>(i);
#pragma unroll 1
    for (int d = 0; d < last; ++d) {
      const uint32_t next = layout.divisors[d].divide(rest), index = rest - next * layout.divisors[d].divisor;
#pragma unroll
      for (int k = 0; k < N; ++k) at[k] += static_cast<int64_t>(index) * layout.strides[d][k];
      rest = next;
    }
    i = rest;
  } else {
#pragma unroll 1
    for (int d = 0; d < last; ++d) {
      const int64_t next = i / layout.sizes[d], index = i - next * layout.sizes[d];
#pragma unroll
      for (int k = 0; k < N; ++k) at[k] += index * layout.strides[d][k];
      i = next;
    }
  }
#pragma unroll
  for (int k = 0; k < N; ++k) at[k] += i * layout.strides[last][k];
}
__device__ __forceinline__ int64_t walk_place(const Layout<1>& layout, int64_t i) {
  int64_t at[1];
  walk_places(layout, i, at);
  return at[0];
}

/// The value of another lane of the warp; for any type whose bytes can be copied.
template <class T>
__device__ __forceinline__ T shuffle_from(T value, int lane) {
  static_assert(sizeof(T) % 4 == 0);
  uint32_t words[sizeof(T) / 4];
  memcpy(words, &value, sizeof(T));
#pragma unroll
  for (auto& word : words) word = __shfl_sync(kWholeWarp, word, lane);
  memcpy(&value, words, sizeof(T));
  return value;
}

/// op over the values of the `lanes` threads (a power of two up to 32, or the whole block) that share a row; the result
/// in each of them. All threads of the block must come here.
template <class T, class Op>
__device__ __forceinline__ T row_reduce(T value, Op op, T identity, int lanes) {
  if (lanes > kWarp) return block_reduce(value, op, identity);
  for (int mask = lanes / 2; mask > 0; mask /= 2) value = op(value, shuffle_xor(value, mask));
  return value;
}

/// Blocks for rows that `lanes` threads share.
inline unsigned row_blocks(int64_t rows, int threads, int lanes) {
  return static_cast<unsigned>(divide_up(rows, threads / lanes));
}
/// The row of this thread, and its number among those that share it.
__device__ __forceinline__ int64_t row_of_thread(int lanes) {
  return int64_t{blockIdx.x} * (static_cast<int>(blockDim.x) / lanes) + static_cast<int>(threadIdx.x) / lanes;
}
__device__ __forceinline__ int lane_of_thread(int lanes) { return static_cast<int>(threadIdx.x) & (lanes - 1); }

/// Stores a number in a tensor of any floating dtype, rounded once.
template <class C>
__device__ __forceinline__ void store_floating(void* data, int dtype, int64_t at, C v) {
  with_floating(dtype, [&](auto zero) {
    using T = decltype(zero);
    static_cast<T*>(data)[at] = convert<T>(v);
  });
}
/// Reads one.
template <class C>
__device__ __forceinline__ C load_floating(const void* data, int dtype, int64_t at) {
  C v = 0;
  with_floating(dtype, [&](auto zero) { v = static_cast<C>(value_of(static_cast<const decltype(zero)*>(data)[at])); });
  return v;
}

}  // namespace hscuda
