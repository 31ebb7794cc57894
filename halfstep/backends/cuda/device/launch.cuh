// SPDX-License-Identifier: Apache-2.0
// How kernels are started. They are never written with <<< >>>, so that the same sources run on the CPU
// (tests/cuda_emulator).
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "device/geometry.h"
#include "host/kernel.h"

#if !defined(__CUDACC__)
#include "cuda_emulator/launch.h"
#endif

namespace hscuda {

struct Launch {
  dim3 grid = 1;
  dim3 block = kThreads;
  std::size_t shared = 0;  ///< bytes of dynamic shared memory, at most 48 KiB
  /// Threads of a block don't talk to each other: no barrier, no shuffle, no vote, no shared memory. The emulator then
  /// runs them as a loop.
  bool alone = false;
};

/// Puts a kernel behind what is in the call's queue. Its arguments are copied.
template <class... P, class... A>
void launch(const Call& call, const Launch& how, void (*kernel)(P...), A&&... arguments) {
#if defined(__CUDACC__)
  kernel<<<how.grid, how.block, how.shared, call.stream()>>>(static_cast<std::decay_t<P>>(arguments)...);
#else
  emulator::launch(call.stream(), how.grid, how.block, how.shared, how.alone, kernel,
                   static_cast<std::decay_t<P>>(arguments)...);
#endif
}

/// The dynamic shared memory of the block, in a kernel.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
#if defined(__CUDACC__)
  extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];
  return reinterpret_cast<T*>(dynamic_shared_bytes);
#else
  return static_cast<T*>(emulator::dynamic_shared());
#endif
}

/// The thread's number in the grid and how many there are, for loops over `i < n` by `i += stride`.
__device__ __forceinline__ int64_t thread_index() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t grid_threads() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

template <class F>
__global__ void __launch_bounds__(kThreads) for_each_kernel(int64_t n, F f) {
  for (int64_t i = thread_index(); i < n; i += grid_threads()) f(i);
}
/// f(i) for i from 0 to n - 1, in any order, side by side. F is a struct with a `__device__` call operator (const).
template <class F>
void for_each(const Call& call, int64_t n, const F& f) {
  if (n == 0) return;
  launch(call, {.grid = grid_size(n, kThreads), .alone = true}, for_each_kernel<F>, n, f);
}

}  // namespace hscuda
