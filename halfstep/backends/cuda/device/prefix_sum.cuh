// SPDX-License-Identifier: Apache-2.0
// Sums of what comes before.
#pragma once

#include "device/block.cuh"
#include "device/launch.cuh"

namespace hscuda {

/// The sum of the values of the threads before this one, in a block of kThreads; `total`: of all. Begins and ends as
/// block_reduce does.
template <class T>
__device__ __forceinline__ T block_scan(T value, T* total) {
  __shared__ T sums[kThreads / kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  T inclusive = value;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const T other = __shfl_up_sync(kWholeWarp, inclusive, static_cast<unsigned>(step));
    if (lane >= step) inclusive += other;
  }
  __syncthreads();
  if (lane == kWarp - 1) sums[warp] = inclusive;
  __syncthreads();
  T before = 0, all = 0;
#pragma unroll
  for (int w = 0; w < kThreads / kWarp; ++w) {
    if (w < warp) before += sums[w];
    all += sums[w];
  }
  *total = all;
  return before + inclusive - value;
}

/// counts[i] becomes the sum of those before it. One block; `total`, where it isn't null, gets the sum of all.
template <class T>
__global__ void __launch_bounds__(kThreads) scan_counts(T* counts, int64_t n, T* total_at) {
  constexpr int kEach = 8;
  T carry = 0;
  for (int64_t base = 0; base < n; base += kThreads * kEach) {
    T values[kEach], sum = 0, total;
    const int64_t first = base + int64_t{threadIdx.x} * kEach;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      values[j] = first + j < n ? counts[first + j] : T{0};
      sum += values[j];
    }
    T before = carry + block_scan(sum, &total);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (first + j < n) counts[first + j] = before;
      before += values[j];
    }
    carry += total;
  }
  if (total_at && threadIdx.x == 0) *total_at = carry;
}

}  // namespace hscuda
