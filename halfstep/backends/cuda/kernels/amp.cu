// SPDX-License-Identifier: Apache-2.0
// Loss scaling: all gradients in a few launches, and nothing that the host has to read.
#include <limits>

#include "device/gradients.cuh"

namespace hscuda {
namespace {

/// f(zero) for the type that `dtype` is unscaled to: f32 for f16, whose range quotients may leave, else its own.
template <class T>
using Unscaled = std::conditional_t<std::is_same_v<T, Half>, float, T>;

__device__ __forceinline__ double inverse_of(const float* scale) { return 1.0 / static_cast<double>(*scale); }

/// A gradient divided by the scale, and whether what is stored of that is finite.
template <class T>
struct Unscale {
  Compute<T> inverse;
  bool* bad;
  double* squares;  ///< their sum; null: not wanted
  __device__ __forceinline__ Compute<T> operator()(Compute<T> value) const {
    const auto stored = value_of(convert<Unscaled<T>>(value * inverse));
    *bad |= !finite(stored);
    if (squares) *squares = fma(static_cast<double>(stored), static_cast<double>(stored), *squares);
    return stored;
  }
};

template <bool kSquares>
__global__ void __launch_bounds__(kThreads) unscale_kernel(const __grid_constant__ ChunkTable table, const float* scale,
                                                           float* found, float* found_each, double* sums) {
  const Chunk chunk = table.at(blockIdx.x);
  const double inverse = inverse_of(scale);
  bool bad = false;
  double squares = 0;
  with_floating(chunk.dtype(kFrom), [&](auto zero) {
    using T = decltype(zero);
    map_chunk(chunk, Unscale<T>{static_cast<Compute<T>>(inverse), &bad, kSquares ? &squares : nullptr},
              table.address<Unscaled<T>>(chunk, kTo), table.address<const T>(chunk, kFrom));
  });
  if (bad) *found = found_each[chunk.tensor] = 1;
  if constexpr (kSquares) {
    squares = block_reduce(squares, Sum(), 0.0);
    if (threadIdx.x == 0) sums[blockIdx.x] = squares;
  }
}

__global__ void __launch_bounds__(kThreads)
    check_kernel(const __grid_constant__ ChunkTable table, const float* scale, const float* bounds, int64_t bounds_step,
                 float* found, float* found_each) {
  const Chunk chunk = table.at(blockIdx.x);
  const double inverse = inverse_of(scale);
  const auto bound = static_cast<double>(bounds[chunk.tensor * bounds_step]);
  if (bound * inverse <= static_cast<double>(std::numeric_limits<float>::max())) return;
  bool bad = false;
  with_floating(chunk.dtype(kFrom), [&](auto zero) {
    using T = decltype(zero);
    map_chunk(chunk, Unscale<T>{static_cast<Compute<T>>(inverse), &bad, nullptr}, static_cast<Nothing*>(nullptr),
              table.address<const T>(chunk, kFrom));
  });
  if (bad) *found = found_each[chunk.tensor] = 1;
}

__global__ void set_flag(Bool* flag) { flag->bits = 1; }

__global__ void __launch_bounds__(kThreads) finite_kernel(const __grid_constant__ ChunkTable table, Bool* all) {
  const Chunk chunk = table.at(blockIdx.x);
  bool bad = false;
  with_floating(chunk.dtype(kFrom), [&](auto zero) {
    using T = decltype(zero);
    map_chunk(chunk, Unscale<T>{1, &bad, nullptr}, static_cast<Nothing*>(nullptr),
              table.address<const T>(chunk, kFrom));
  });
  if (bad) all->bits = 0;
}

halfstep_status amp_unscale(Call& call) {
  const int n = call.n - 1;
  const Tensor &norm = call.out[2], *from = call.in + 1, *to = call.out + 3;
  const auto* scale = static_cast<const float*>(call.in[0].data);
  auto* found = static_cast<float*>(call.out[0].data);
  auto* each = static_cast<float*>(call.out[1].data);
  const int64_t chunks = chunks_of(from, n);
  double* sums = nullptr;
  if (norm.defined && chunks > 0) {
    sums = call.workspace<double>(chunks);
    if (!sums) return call.no_memory();
  }
  int64_t first = 0;
  for_each_pair(from, to, n, [&](const ChunkTable& table) {
    if (sums) {
      launch_chunks(call, table, false, unscale_kernel<true>, table, scale, found, each, sums + first);
      first += table.blocks();
    } else {
      launch_chunks(call, table, true, unscale_kernel<false>, table, scale, found, each, nullptr);
    }
  });
  if (norm.defined) finish(call, sums, chunks, 2, norm);
  return call.launched();
}

halfstep_status amp_check(Call& call) {
  const int n = call.n - 2;
  const Tensor& bounds = call.in[call.n - 1];
  for_each_pair(call.in + 1, nullptr, n, [&](const ChunkTable& table) {
    launch_chunks(call, table, true, check_kernel, table, static_cast<const float*>(call.in[0].data),
                  static_cast<const float*>(bounds.data), bounds.ndim ? bounds.strides[0] : 0,
                  static_cast<float*>(call.out[0].data), static_cast<float*>(call.out[1].data));
  });
  return call.launched();
}

halfstep_status all_finite(Call& call) {
  auto* all = static_cast<Bool*>(call.out[0].data);
  launch(call, {.grid = 1, .block = 1, .alone = true}, set_flag, all);
  for_each_pair(call.in, nullptr, call.n,
                [&](const ChunkTable& table) { launch_chunks(call, table, true, finite_kernel, table, all); });
  return call.launched();
}

// ------------------------------------------------------------------------------------------------------------------

/// What optimizers found, for one launch.
struct FoundList {
  const void* found[kThreads];
  uint32_t flags[kThreads / 32];  ///< bit i: number i is a bool, else f32
  int n;
  bool last;   ///< the scale is updated
  int* carry;  ///< what the launches before this one found; null where it is the only one
  bool first;
};

__global__ void __launch_bounds__(kThreads)
    update_scale_kernel(const __grid_constant__ FoundList list, halfstep_scale_update_attributes a, float* scale_at,
                        int32_t* count) {
  const int i = static_cast<int>(threadIdx.x);
  int set = 0;
  if (i < list.n) {
    set = list.flags[i / 32] >> (i % 32) & 1u ? static_cast<const Bool*>(list.found[i])->bits != 0
                                              : *static_cast<const float*>(list.found[i]) != 0;
  }
  set = block_reduce(set, Largest(), 0);
  if (i != 0) return;
  if (list.carry) {
    if (!list.first) set |= *list.carry;
    *list.carry = set;
  }
  if (!list.last) return;
  const float scale = *scale_at;
  if (set) {
    count[HALFSTEP_SCALE_GROWTH] = a.restart;
    ++count[HALFSTEP_SCALE_IN_A_ROW];
    const int used = min(count[HALFSTEP_SCALE_USED] + 1, a.hysteresis);
    count[HALFSTEP_SCALE_USED] = used;
    if (used != a.hysteresis) return;
    const auto less = static_cast<float>(static_cast<double>(scale) * a.backoff_factor);
    const float lowest = a.floor < scale ? a.floor : scale;
    const float next = less < lowest ? lowest : less;
    count[HALFSTEP_SCALE_STUCK] += scale <= a.floor;
    count[HALFSTEP_SCALE_AT_FLOOR] += next <= a.floor;
    *scale_at = next;
    return;
  }
  count[HALFSTEP_SCALE_IN_A_ROW] = 0;
  int used = a.refill_on_good_step ? 0 : count[HALFSTEP_SCALE_USED];
  int growth = count[HALFSTEP_SCALE_GROWTH] + 1;
  // At least the interval, not equal to it: it may have been lowered meanwhile.
  if (growth >= a.growth_interval) {
    const auto grown = static_cast<float>(static_cast<double>(scale) * a.growth_factor);
    if (finite(grown)) {
      const float capped = grown < a.cap ? grown : a.cap;
      *scale_at = scale < capped ? capped : scale;
    }
    growth = used = 0;
  }
  count[HALFSTEP_SCALE_GROWTH] = growth;
  count[HALFSTEP_SCALE_USED] = used;
}

halfstep_status amp_update_scale(Call& call) {
  const int n = call.n - 2;
  FoundList list = {};
  if (n > kThreads) {
    list.carry = call.workspace<int>(1);
    if (!list.carry) return call.no_memory();
  }
  int at = 0;
  do {
    list.n = std::min(n - at, kThreads);
    list.first = at == 0;
    list.last = at + list.n == n;
    std::fill(std::begin(list.flags), std::end(list.flags), 0u);
    for (int i = 0; i < list.n; ++i, ++at) {
      list.found[i] = call.in[2 + at].data;
      if (call.in[2 + at].dtype == HALFSTEP_BOOL) list.flags[i / 32] |= 1u << (i % 32);
    }
    launch(call, {.grid = 1}, update_scale_kernel, list, call.attributes<halfstep_scale_update_attributes>(),
           static_cast<float*>(call.out[0].data), static_cast<int32_t*>(call.out[1].data));
  } while (at < n);
  return call.launched();
}

constexpr uint32_t kF32 = dtypes({HALFSTEP_F32});
constexpr KernelDef kKernels[] = {
    {.op = "amp_unscale", .dtypes = kF32, .layouts = kStrided, .attributes = false, .run = amp_unscale},
    {.op = "amp_check", .dtypes = kF32, .layouts = kStrided, .attributes = false, .run = amp_check},
    {.op = "all_finite", .dtypes = kF32, .layouts = kStrided, .attributes = false, .run = all_finite},
    {.op = "amp_update_scale", .dtypes = kF32, .layouts = kStrided, .attributes = true, .run = amp_update_scale},
};

}  // namespace

std::span<const KernelDef> amp_kernels() { return kKernels; }

}  // namespace hscuda
