// SPDX-License-Identifier: Apache-2.0
// What loss scaling and clipping share: many tensors in few launches, and the end of a norm. A norm is a sum in float64
// for each block, and one block adds those up in their order.
#pragma once

#include <limits>

#include "device/block.cuh"
#include "device/chunks.cuh"

namespace hscuda {

inline constexpr int kFrom = 0, kTo = 1;  // columns

__device__ inline double block_total(double value, double exponent) {
  if (exponent == std::numeric_limits<double>::infinity()) return block_reduce(value, Largest(), 0.0);
  return block_reduce(value, Sum(), 0.0);
}

inline constexpr int kFinishThreads = 1024;
static __global__ void __launch_bounds__(kFinishThreads)
    finish_norm(const double* sums, int64_t n, double exponent, void* norm, bool wide) {
  double total = 0;
  const bool largest = exponent == std::numeric_limits<double>::infinity();
  for (int64_t i = threadIdx.x; i < n; i += kFinishThreads)
    total = largest ? Largest()(total, sums[i]) : total + sums[i];
  total = block_total(total, exponent);
  if (threadIdx.x != 0) return;
  if (!largest) total = exponent == 2 ? sqrt(total) : pow(total, 1 / exponent);
  if (wide) {
    *static_cast<double*>(norm) = total;
  } else {
    *static_cast<float*>(norm) = static_cast<float>(total);
  }
}

inline int64_t chunks_of(const Tensor* tensors, int n) {
  int64_t chunks = 0;
  for (int i = 0; i < n; ++i) chunks += divide_up(tensors[i].numel, kChunkElements);
  return chunks;
}

inline void finish(const Call& call, const double* sums, int64_t n, double exponent, const Tensor& norm) {
  launch(call, {.grid = 1, .block = kFinishThreads}, finish_norm, sums, n, exponent, norm.data,
         norm.dtype == HALFSTEP_F64);
}

/// Calls run(table) for tables of `from` and, where it isn't null, `to`.
template <class Run>
void for_each_pair(const Tensor* from, const Tensor* to, int n, Run&& run) {
  const auto describe = [&](int i, ChunkColumns& columns) {
    columns.add(kFrom, from[i]);
    if (to) columns.add(kTo, to[i]);
    return from[i].numel;
  };
  for_each_table(n, kChunkElements, describe, run);
}

}  // namespace hscuda
