// SPDX-License-Identifier: Apache-2.0
// What a block does with its stretch of a tensor.
#pragma once

#include <tuple>

#include "device/chunks.h"
#include "device/elementwise.cuh"

namespace hscuda {

/// In place of an output: what the function returns is dropped.
struct Nothing {};

/// Elements of a block, for kernels that do little with each. All packs' widths divide it.
inline constexpr int64_t kChunkElements = 8192;

__device__ __forceinline__ bool finite(float x) { return (std::bit_cast<uint32_t>(x) & 0x7f800000u) != 0x7f800000u; }
__device__ __forceinline__ bool finite(double x) { return std::bit_cast<uint64_t>(x) << 1 < uint64_t{0x7ff} << 53; }

template <class T>
inline constexpr std::size_t kBytesOf = sizeof(T);
template <>
inline constexpr std::size_t kBytesOf<Nothing> = 1;

/// f of the elements number j of packs.
template <class F, class Packs, std::size_t... k>
__device__ __forceinline__ auto at_place(const F& f, const Packs& packs, int j, std::index_sequence<k...>) {
  return f(value_of(std::get<k>(packs).values[j])...);
}

/// out[i] = f(in[i]...) for the elements of a chunk, by all threads of a block. f takes what the inputs compute in; its
/// result is converted. `out` may be one of the inputs. 16 bytes of the widest type at a time where the chunk is
/// aligned.
template <class F, class Out, class... In>
__device__ __forceinline__ void map_chunk(const Chunk& chunk, F&& f, Out* out, const In*... in) {
  constexpr bool kWrites = !std::is_same_v<Out, Nothing>;
  constexpr int kWidth = static_cast<int>(16 / std::max({kBytesOf<Out>, sizeof(In)...}));
  // Loads before the first is used: as many bytes of 16-bit inputs that become float32 as of float32 ones.
  constexpr int kFlight = std::max(4, 64 / static_cast<int>(kWidth * (0 + ... + sizeof(In))));
  int64_t done = chunk.begin;
  if (chunk.aligned) {
    const int64_t packs = (chunk.end - chunk.begin) / kWidth;
    done += packs * kWidth;
    const int64_t first_pack = chunk.begin / kWidth;
    for (int64_t p = threadIdx.x; p < packs; p += kThreads * kFlight) {
      std::tuple<Pack<In, kWidth>...> loaded[kFlight];
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        if (p + u * kThreads < packs) {
          loaded[u] = {reinterpret_cast<const Pack<In, kWidth>*>(in)[first_pack + p + u * kThreads]...};
        }
      }
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        if (p + u * kThreads >= packs) break;
        if constexpr (kWrites) {
          Pack<Out, kWidth> result;
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            result.values[j] = convert<Out>(at_place(f, loaded[u], j, std::index_sequence_for<In...>{}));
          }
          reinterpret_cast<Pack<Out, kWidth>*>(out)[first_pack + p + u * kThreads] = result;
        } else {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) at_place(f, loaded[u], j, std::index_sequence_for<In...>{});
        }
      }
    }
  }
  for (int64_t i = done + threadIdx.x; i < chunk.end; i += kThreads) {
    if constexpr (kWrites) {
      out[i] = convert<Out>(f(value_of(in[i])...));
    } else {
      f(value_of(in[i])...);
    }
  }
}

/// Launches a kernel for a table, a block a chunk.
template <class... P, class... A>
void launch_chunks(const Call& call, const ChunkTable& table, bool alone, void (*kernel)(P...), A&&... arguments) {
  static_assert((0 + ... + sizeof(std::decay_t<P>)) + 8 * sizeof...(P) <= kParameterBytes);
  launch(call, {.grid = table.blocks(), .alone = alone}, kernel, std::forward<A>(arguments)...);
}

}  // namespace hscuda
