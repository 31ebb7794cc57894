// SPDX-License-Identifier: Apache-2.0
// What the threads of a block do together.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace hscuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kWholeWarp = 0xffffffffu;

/// The value of the lane whose number differs in the bits of `mask`; for any type whose bytes can be copied.
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
  if constexpr (sizeof(T) <= 4) {
    uint32_t word = 0;
    memcpy(&word, &value, sizeof(T));
    word = __shfl_xor_sync(kWholeWarp, word, mask);
    memcpy(&value, &word, sizeof(T));
  } else {
    static_assert(sizeof(T) % 4 == 0);
    uint32_t words[sizeof(T) / 4];
    memcpy(words, &value, sizeof(T));
#pragma unroll
    for (auto& word : words) word = __shfl_xor_sync(kWholeWarp, word, mask);
    memcpy(&value, words, sizeof(T));
  }
  return value;
}

/// op over the values of a warp's 32 lanes, the result in every lane. The order is the same in every run.
template <class T, class Op>
__device__ __forceinline__ T warp_reduce(T value, Op op) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) value = op(value, shuffle_xor(value, mask));
  return value;
}

/// op over the values of all threads of a block (a multiple of 32, at most 1024, counted along x only), the result in
/// every thread. `identity`: op(identity, x) is x. All threads must come here; the call begins and ends with a barrier,
/// so that it can follow itself.
template <class T, class Op>
__device__ __forceinline__ T block_reduce(T value, Op op, T identity) {
  __shared__ __align__(16) unsigned char storage[kWarp * sizeof(T)];
  T* partial = reinterpret_cast<T*>(storage);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  value = warp_reduce(value, op);
  if (blockDim.x == kWarp) return value;
  __syncthreads();
  if (lane == 0) partial[warp] = value;
  __syncthreads();
  value = lane < static_cast<int>(blockDim.x) / kWarp ? partial[lane] : identity;
  return warp_reduce(value, op);
}

struct Sum {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
/// The larger; NaN wins.
struct Largest {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a > b || a != a ? a : b;
  }
};
/// The smaller; NaN wins.
struct Smallest {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a < b || a != a ? a : b;
  }
};

}  // namespace hscuda
