// SPDX-License-Identifier: Apache-2.0
// Norms of all gradients together, and clipping by them or by a limit.
#include <cmath>
#include <limits>

#include "device/gradients.cuh"

namespace hscuda {
namespace {

/// What is added up: squares, or else magnitudes, powers of magnitudes, or the largest magnitude.
template <bool kSquares>
struct Magnitudes {
  double exponent;
  double* total;
  template <class T>
  __device__ __forceinline__ T operator()(T value) const {
    const auto v = fabs(static_cast<double>(value));
    if constexpr (kSquares) {
      *total = fma(v, v, *total);
    } else if (exponent == 1) {
      *total += v;
    } else if (exponent == std::numeric_limits<double>::infinity()) {
      *total = Largest()(*total, v);
    } else {
      *total += pow(v, exponent);
    }
    return value;
  }
};

template <bool kSquares>
__global__ void __launch_bounds__(kThreads)
    norm_kernel(const __grid_constant__ ChunkTable table, double exponent, double* sums) {
  const Chunk chunk = table.at(blockIdx.x);
  double total = 0;
  with_floating(chunk.dtype(kFrom), [&](auto zero) {
    using T = decltype(zero);
    map_chunk(chunk, Magnitudes<kSquares>{exponent, &total}, static_cast<Nothing*>(nullptr),
              table.address<const T>(chunk, kFrom));
  });
  total = block_total(total, exponent);
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

halfstep_status multi_norm(Call& call) {
  const double exponent = call.attributes<halfstep_clip_attributes>().norm_type;
  const int64_t chunks = chunks_of(call.in, call.n);
  double* sums = nullptr;
  if (chunks > 0) {
    sums = call.workspace<double>(chunks);
    if (!sums) return call.no_memory();
  }
  // Minus infinity is the largest magnitude too, as on the CPU.
  const double kind = std::isinf(exponent) ? std::numeric_limits<double>::infinity() : exponent;
  int64_t first = 0;
  for_each_pair(call.in, nullptr, call.n, [&](const ChunkTable& table) {
    launch_chunks(call, table, false, kind == 2 ? norm_kernel<true> : norm_kernel<false>, table, kind, sums + first);
    first += table.blocks();
  });
  finish(call, sums, chunks, kind, call.out[0]);
  return call.launched();
}

template <class T>
struct Scale {
  T factor;
  __device__ __forceinline__ T operator()(T value) const { return value * factor; }
};
/// A NaN passes both comparisons and stays.
template <class T>
struct Clamp {
  T limit;
  __device__ __forceinline__ T operator()(T value) const {
    const T low = value > limit ? limit : value;
    return low < -limit ? -limit : low;
  }
};

__global__ void __launch_bounds__(kThreads)
    clip_kernel(const __grid_constant__ ChunkTable table, const void* norm, bool wide, double limit) {
  const Chunk chunk = table.at(blockIdx.x);
  double factor = 1;
  if (norm) {
    const double value =
        wide ? *static_cast<const double*>(norm) : static_cast<double>(*static_cast<const float*>(norm));
    factor = limit / (value + 1e-6);
    if (factor >= 1) return;
  }
  with_floating(chunk.dtype(kFrom), [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    T* data = table.address<T>(chunk, kFrom);
    if (norm) {
      map_chunk(chunk, Scale<C>{static_cast<C>(factor)}, data, data);
    } else {
      map_chunk(chunk, Clamp<C>{static_cast<C>(limit)}, data, data);
    }
  });
}

halfstep_status multi_clip(Call& call) {
  const Tensor& norm = call.in[0];
  for_each_pair(call.out, nullptr, call.m, [&](const ChunkTable& table) {
    launch_chunks(call, table, true, clip_kernel, table, norm.defined ? norm.data : nullptr, norm.dtype == HALFSTEP_F64,
                  call.attributes<halfstep_clip_attributes>().limit);
  });
  return call.launched();
}

constexpr uint32_t kF32 = dtypes({HALFSTEP_F32});
constexpr KernelDef kKernels[] = {
    {.op = "multi_norm", .dtypes = kF32, .layouts = kStrided, .attributes = true, .run = multi_norm},
    {.op = "multi_clip", .dtypes = kF32, .layouts = kStrided, .attributes = true, .run = multi_clip},
};

}  // namespace

std::span<const KernelDef> clip_kernels() { return kKernels; }

}  // namespace hscuda
