// SPDX-License-Identifier: Apache-2.0
// The moving average of parameters, all of them in a few launches.
#include "device/chunks.cuh"

namespace hscuda {
namespace {

constexpr int kValue = 0, kAverage = 1;  // columns

// The share that the new values get, and the new count.
__global__ void begin_average(const float* unless, const double* hyper, int64_t* count, double* share) {
  if (unless && *unless != 0) return;
  const auto before = static_cast<double>(*count);
  double part = 1 - hyper[0];
  if (hyper[1] > 0) part = 1 - hyper[0] * (1 - exp(-before / hyper[1]));
  if (hyper[2] != 0) part = 1 / (before + 1);
  if (*count == 0) part = 1;
  *share = part;
  ++*count;
}

/// The difference is scaled, not the two values, so that an average of equal values is that value.
template <class A>
struct MoveTowards {
  A share;
  __device__ __forceinline__ A operator()(A value, A average) const {
    // Also where the value is infinite, a share of 0 of it is none.
    return share == A{1} ? value : share == A{0} ? average : fma(share, value - average, average);
  }
};

__global__ void __launch_bounds__(kThreads)
    average_kernel(const __grid_constant__ ChunkTable table, const float* unless, const double* share) {
  if (unless && *unless != 0) return;
  const Chunk chunk = table.at(blockIdx.x);
  with_floating(chunk.dtype(kValue), [&](auto zero) {
    using T = decltype(zero);
    using A = Compute<T>;  // averages are f32, or f64 as their values are
    auto* average = table.address<A>(chunk, kAverage);
    map_chunk(chunk, MoveTowards<A>{static_cast<A>(*share)}, average, table.address<const T>(chunk, kValue), average);
  });
}

halfstep_status ema_update(Call& call) {
  const auto* unless = call.in[0].defined ? static_cast<const float*>(call.in[0].data) : nullptr;
  auto* share = call.workspace<double>(1);
  if (!share) return call.no_memory();
  launch(call, {.grid = 1, .block = 1, .alone = true}, begin_average, unless,
         static_cast<const double*>(call.in[1].data), static_cast<int64_t*>(call.out[0].data), share);
  const auto describe = [&](int i, ChunkColumns& columns) {
    columns.add(kValue, call.in[2 + i]);
    columns.add(kAverage, call.out[1 + i]);
    return call.in[2 + i].numel;
  };
  for_each_table(call.n - 2, kChunkElements, describe, [&](const ChunkTable& table) {
    launch_chunks(call, table, true, average_kernel, table, unless, share);
  });
  return call.launched();
}

constexpr KernelDef kKernels[] = {
    {.op = "ema_update", .dtypes = dtypes({HALFSTEP_F32}), .layouts = kStrided, .attributes = false, .run = ema_update},
};

}  // namespace

std::span<const KernelDef> ema_kernels() { return kKernels; }

}  // namespace hscuda
