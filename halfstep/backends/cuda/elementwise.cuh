// SPDX-License-Identifier: Apache-2.0
// Elementwise work on tensors of any strides.
#pragma once

#include <cstdint>
#include <tuple>
#include <utility>

#include "launch.cuh"
#include "number.cuh"

namespace hscuda {

template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T values[kWidth];
};

/// Elements that one thread moves with one access: 16 bytes of the widest type.
template <class... T>
inline constexpr int kPackWidth = static_cast<int>(16 / std::max({sizeof(T)...}));
inline constexpr int kPacksPerThread = 4;

/// f of the elements number j of packs.
template <class F, class Packs, std::size_t... k>
__device__ __forceinline__ auto at_place(const F& f, const Packs& packs, [[maybe_unused]] int j,
                                         std::index_sequence<k...>) {
  return f(value_of(std::get<k>(packs).values[j])...);
}

// One run of elements: whole packs, all loads before the first store; what is left over goes element by element.
template <class F, class Out, class... In>
__global__ void __launch_bounds__(kThreads) map_linear(int64_t n, F f, Out* out, const In*... in) {
  constexpr int kWidth = kPackWidth<Out, In...>;
  const int64_t packs = n / kWidth;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kPacksPerThread + threadIdx.x;
  std::tuple<Pack<In, kWidth>...> loaded[kPacksPerThread];
#pragma unroll
  for (int u = 0; u < kPacksPerThread; ++u) {
    const int64_t i = first + u * kThreads;
    if (i < packs) loaded[u] = {reinterpret_cast<const Pack<In, kWidth>*>(in)[i]...};
  }
#pragma unroll
  for (int u = 0; u < kPacksPerThread; ++u) {
    const int64_t i = first + u * kThreads;
    if (i >= packs) continue;
    Pack<Out, kWidth> result;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      result.values[j] = convert<Out>(at_place(f, loaded[u], j, std::index_sequence_for<In...>{}));
    }
    reinterpret_cast<Pack<Out, kWidth>*>(out)[i] = result;
  }
  const int64_t rest = packs * kWidth + threadIdx.x;
  if (blockIdx.x == 0 && rest < n) out[rest] = convert<Out>(f(value_of(in[rest])...));
}

template <class I, class F, class Out, class... In>
__global__ void __launch_bounds__(kThreads)
    map_strided(Layout<1 + sizeof...(In)> layout, F f, Out* out, const In*... in) {
  for (int64_t i = thread_index(); i < layout.numel; i += grid_threads()) {
    int64_t at[1 + sizeof...(In)];
    layout.places(static_cast<I>(i), at);
    int k = 0;
    out[at[0]] = convert<Out>(f(value_of(in[at[++k]])...));
  }
}

template <class T>
bool aligned(const T* data, int width) {
  return reinterpret_cast<uintptr_t>(data) % (sizeof(T) * static_cast<std::size_t>(width)) == 0;
}

/// out = f(in...), element by element; f is a struct with a `__device__` call operator (const) that takes what the
/// inputs compute in, and whose result is converted to Out. The inputs broadcast to `out`, which may be one of them.
template <class Out, class... In, class F, class... Tensors>
void map(const Call& call, const F& f, const Tensor& out, const Tensors&... in) {
  static_assert(sizeof...(In) == sizeof...(Tensors));
  if (out.numel == 0) return;
  const Tensor* const tensors[] = {&out, &in...};
  const auto layout = layout_of(tensors);
  constexpr int kWidth = kPackWidth<Out, In...>;
  auto* to = static_cast<Out*>(out.data);
  if (layout.linear() && aligned(to, kWidth) && (aligned(static_cast<const In*>(in.data), kWidth) && ...)) {
    const unsigned blocks =
        grid_size(divide_up(layout.numel, kWidth), int64_t{kThreads} * kPacksPerThread, int64_t{1} << 31);
    launch(call, {.grid = blocks, .alone = true}, map_linear<F, Out, In...>, layout.numel, f, to,
           static_cast<const In*>(in.data)...);
    return;
  }
  const Launch how{.grid = grid_size(layout.numel, kThreads), .alone = true};
  if (layout.narrow()) {
    launch(call, how, map_strided<uint32_t, F, Out, In...>, layout, f, to, static_cast<const In*>(in.data)...);
  } else {
    launch(call, how, map_strided<int64_t, F, Out, In...>, layout, f, to, static_cast<const In*>(in.data)...);
  }
}

}  // namespace hscuda
