// SPDX-License-Identifier: Apache-2.0
// Elementwise work on tensors of any strides.
#pragma once

#include <cstdint>
#include <utility>

#include "device/launch.cuh"
#include "device/number.cuh"

namespace hscuda {

/// Elements that are read or written with one access.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T values[kWidth];
};

/// Elements that one thread moves with one access: 16 bytes of the widest type, so that no type needs two.
template <class... T>
inline constexpr int kPackWidth = static_cast<int>(16 / std::max({sizeof(T)...}));
// What a thread has under way at once. With the threads that a processor holds, two packs of every input are more than
// the memory's latency times its speed; more would leave small tensors to few processors.
inline constexpr int kPacksPerThread = 2;
inline constexpr int kElementsPerThread = 4;  // where packs don't fit

template <class T>
bool aligned(const T* data, int width) {
  return reinterpret_cast<uintptr_t>(data) % (sizeof(T) * static_cast<std::size_t>(width)) == 0;
}

/// A pack from `data` on, or kWidth times its one value.
template <int kWidth, class T>
__device__ __forceinline__ Pack<T, kWidth> load_pack(const T* data, bool repeated = false) {
  Pack<T, kWidth> pack;
  if (kWidth > 1 && repeated) {
    const T value = *data;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) pack.values[j] = value;
  } else {
    pack = *reinterpret_cast<const Pack<T, kWidth>*>(data);
  }
  return pack;
}

template <std::size_t k, class T, int kWidth>
struct Slot {
  Pack<T, kWidth> pack;
};
/// A pack of every input.
template <class Numbers, int kWidth, class... In>
struct Slots;
template <std::size_t... k, int kWidth, class... In>
struct Slots<std::index_sequence<k...>, kWidth, In...> : Slot<k, In, kWidth>... {
  static constexpr int kTensors = 1 + sizeof...(In);

  __device__ __forceinline__ void load([[maybe_unused]] const Layout<kTensors>& layout,
                                       [[maybe_unused]] const int64_t (&at)[kTensors], const In*... in) {
    ((Slot<k, In, kWidth>::pack = load_pack<kWidth>(in + at[1 + k], layout.strides[0][1 + k] == 0)), ...);
  }
  /// f of the elements number j.
  template <class F>
  __device__ __forceinline__ auto result(const F& f, [[maybe_unused]] int j) const {
    return f(value_of(Slot<k, In, kWidth>::pack.values[j])...);
  }
};

// `layout` is that of packs. All loads of a thread come before its first store. The last `rest` elements of a single
// run, less than a pack, are done one by one.
template <int kWidth, int kPacks, class F, class Out, class... In>
__global__ void __launch_bounds__(kThreads)
    map_kernel(Layout<1 + sizeof...(In)> layout, int rest, F f, Out* out, const In*... in) {
  constexpr int kTensors = 1 + sizeof...(In);
  using Numbers = std::index_sequence_for<In...>;
  const auto packs = static_cast<uint32_t>(layout.numel);
  const uint32_t first = blockIdx.x * static_cast<uint32_t>(kThreads * kPacks) + threadIdx.x;
  Slots<Numbers, kWidth, In...> inputs[kPacks];
  int64_t to[kPacks];
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const uint32_t i = first + static_cast<uint32_t>(u * kThreads);
    if (i >= packs) continue;
    int64_t at[kTensors];
    layout.places(i, at);
    to[u] = at[0];
    inputs[u].load(layout, at, in...);
  }
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const uint32_t i = first + static_cast<uint32_t>(u * kThreads);
    if (i >= packs) continue;
    Pack<Out, kWidth> result;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) result.values[j] = convert<Out>(inputs[u].result(f, j));
    *reinterpret_cast<Pack<Out, kWidth>*>(out + to[u]) = result;
  }
  if constexpr (kWidth > 1) {
    if (blockIdx.x != 0 || static_cast<int>(threadIdx.x) >= rest) return;
    const int64_t i = layout.numel * kWidth + threadIdx.x;
    int64_t at[kTensors];
    for (int k = 0; k < kTensors; ++k) at[k] = layout.strides[0][k] == 0 ? 0 : i;
    Slots<Numbers, 1, In...> single;
    single.load(layout, at, in...);
    out[i] = convert<Out>(single.result(f, 0));
  }
}

/// out = f(in...), element by element; f is a struct with a `__device__` call operator (const) that takes what the
/// inputs compute in, and whose result is converted to Out. The inputs broadcast to `out`, which may be one of them.
/// Runs of elements, also under a row or a column that is broadcast, are moved in packs.
template <class Out, class... In, class F, class... Tensors>
void map(const Call& call, const F& f, const Tensor& out, const Tensors&... in) {
  static_assert(sizeof...(In) == sizeof...(Tensors));
  if (out.numel == 0) return;
  const Tensor* const tensors[] = {&out, &in...};
  in_pieces(layout_of(tensors), [&](const auto& layout, const auto& from) {
    constexpr int kWidth = kPackWidth<Out, In...>;
    const auto go = [&]<std::size_t... k>(std::index_sequence<k...>) {
      auto* const to = static_cast<Out*>(out.data) + from[0];
      [[maybe_unused]] const auto whole = [&](const auto* data, std::size_t tensor) {
        return layout.strides[0][tensor] == 0 || aligned(data, kWidth);
      };
      if (made_of_packs(layout, kWidth) && aligned(to, kWidth) &&
          (whole(static_cast<const In*>(in.data) + from[1 + k], 1 + k) && ...)) {
        const auto packs = in_packs(layout, kWidth);
        const int rest = layout.ndim == 1 ? static_cast<int>(layout.sizes[0] % kWidth) : 0;
        launch(call, {.grid = grid_size(packs.numel, kThreads * kPacksPerThread, INT32_MAX), .alone = true},
               map_kernel<kWidth, kPacksPerThread, F, Out, In...>, packs, rest, f, to,
               static_cast<const In*>(in.data) + from[1 + k]...);
      } else {
        launch(call, {.grid = grid_size(layout.numel, kThreads * kElementsPerThread, INT32_MAX), .alone = true},
               map_kernel<1, kElementsPerThread, F, Out, In...>, layout, 0, f, to,
               static_cast<const In*>(in.data) + from[1 + k]...);
      }
    };
    go(std::index_sequence_for<In...>{});
  });
}

}  // namespace hscuda
