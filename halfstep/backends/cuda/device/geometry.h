// SPDX-License-Identifier: Apache-2.0
// Sizes of launches and the places of elements: plain arithmetic, which tests check on the host.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <utility>

#include "halfstep/runtime/plugin.h"

#if defined(__CUDACC__)
#define HSCUDA_BOTH __host__ __device__
#else
#define HSCUDA_BOTH
#endif

namespace hscuda {

inline constexpr int kThreads = 256;  ///< of a block, where nothing else is said

HSCUDA_BOTH constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Blocks for `work` pieces, `each` to a block, but no more than `most`: kernels walk on by the grid's size.
constexpr unsigned grid_size(int64_t work, int64_t each, int64_t most = int64_t{1} << 20) {
  return static_cast<unsigned>(std::clamp<int64_t>(divide_up(work, each), 1, most));
}

/// Division of numbers below 2^31 by one number, as a product and a shift: Granlund and Montgomery, "Division by
/// invariant integers using multiplication" (PLDI 1994).
struct Divisor {
  uint32_t divisor = 1, magic = 1, shift = 0;
  Divisor() = default;
  explicit constexpr Divisor(uint32_t d) : divisor(d), shift(static_cast<uint32_t>(std::bit_width(d - 1))) {
    const uint64_t one = 1;
    magic = static_cast<uint32_t>(((one << 32) * ((one << shift) - d)) / d + 1);
  }
  HSCUDA_BOTH uint32_t divide(uint32_t n) const {
#if defined(__CUDA_ARCH__)
    const uint32_t high = __umulhi(n, magic);
#else
    const auto high = static_cast<uint32_t>((uint64_t{n} * magic) >> 32);
#endif
    return (high + n) >> shift;
  }
};

/// Where the elements of N tensors that are walked together lie. Tensor 0 is the result, whose shape the others
/// broadcast to. Dimensions are in the order of the result's memory, the fastest first, merged where all tensors lie
/// straight across them, so that most calls have one. A plain struct: kernels get it by value.
template <int N>
struct Layout {
  int64_t numel = 0;
  int ndim = 0;  ///< at least 1
  int64_t sizes[HALFSTEP_MAX_DIMS] = {};
  int64_t strides[HALFSTEP_MAX_DIMS][N] = {};
  Divisor divisors[HALFSTEP_MAX_DIMS];

  /// Whether every tensor is one run of elements without gaps.
  bool linear() const {
    if (ndim != 1) return false;
    for (int k = 0; k < N; ++k) {
      if (strides[0][k] != 1 && numel != 1) return false;
    }
    return true;
  }
  /// Whether indices fit 31 bits.
  bool narrow() const { return numel < (int64_t{1} << 31); }

  /// To be called when sizes have been set.
  void make_divisors() {
    if (!narrow() || numel == 0) return;
    for (int d = 0; d < ndim; ++d) divisors[d] = Divisor(static_cast<uint32_t>(sizes[d]));
  }

  /// The places of element i, in elements. `I` is uint32_t where narrow().
  template <class I>
  HSCUDA_BOTH void places(I i, int64_t (&at)[N]) const {
    for (int k = 0; k < N; ++k) at[k] = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
    for (int d = 0; d < ndim; ++d) {
      I next, index;
      if (d == ndim - 1) {
        next = 0, index = i;
      } else if constexpr (sizeof(I) == 4) {
        next = divisors[d].divide(i);
        index = i - next * divisors[d].divisor;
      } else {
        next = i / static_cast<I>(sizes[d]);
        index = i - next * static_cast<I>(sizes[d]);
      }
      for (int k = 0; k < N; ++k) at[k] += static_cast<int64_t>(index) * strides[d][k];
      i = next;
    }
  }
};

/// The layout of tensors[0] and those that broadcast to it. `row_major`: its elements are numbered in row-major order
/// instead of that of its memory.
template <int N>
Layout<N> layout_of(const halfstep_tensor* const (&tensors)[N], bool row_major = false) {
  Layout<N> layout;
  const halfstep_tensor& result = *tensors[0];
  layout.numel = result.numel;
  int order[HALFSTEP_MAX_DIMS], n = 0;
  for (int d = result.ndim - 1; d >= 0; --d) {
    if (result.sizes[d] != 1) order[n++] = d;
  }
  if (!row_major) {
    // By insertion: there are few, mostly in order, and nothing is allocated. Equal strides keep their order.
    for (int i = 1; i < n; ++i) {
      for (int j = i; j > 0 && result.strides[order[j]] < result.strides[order[j - 1]]; --j) {
        std::swap(order[j], order[j - 1]);
      }
    }
  }
  for (int i = 0; i < n; ++i) {
    const int64_t size = result.sizes[order[i]];
    int64_t stride[N];
    for (int k = 0; k < N; ++k) {
      const halfstep_tensor& t = *tensors[k];
      const int d = order[i] - (result.ndim - t.ndim);
      stride[k] = d < 0 || t.sizes[d] == 1 ? 0 : t.strides[d];
    }
    const int last = layout.ndim - 1;
    bool straight = last >= 0;
    for (int k = 0; straight && k < N; ++k) straight = stride[k] == layout.strides[last][k] * layout.sizes[last];
    if (straight) {
      layout.sizes[last] *= size;
    } else {
      layout.sizes[layout.ndim] = size;
      for (int k = 0; k < N; ++k) layout.strides[layout.ndim][k] = stride[k];
      ++layout.ndim;
    }
  }
  if (layout.ndim == 0) {
    layout.ndim = 1;
    layout.sizes[0] = 1;
    for (int k = 0; k < N; ++k) layout.strides[0][k] = 1;
  }
  layout.make_divisors();
  return layout;
}

/// Whether the layout can be walked in packs of `width` elements: every tensor has runs along the first dimension (or
/// one value for all of it) that are made of whole packs, the last of a single run excepted. That the tensors' own
/// addresses are those of packs is asked elsewhere.
template <int N>
bool made_of_packs(const Layout<N>& layout, int width) {
  if (layout.strides[0][0] != 1 || (layout.ndim > 1 && layout.sizes[0] % width != 0)) return false;
  for (int k = 0; k < N; ++k) {
    if (layout.strides[0][k] == 0) continue;
    if (layout.strides[0][k] != 1) return false;
    for (int d = 1; d < layout.ndim; ++d) {
      if (layout.strides[d][k] % width != 0) return false;
    }
  }
  return true;
}

/// The layout of its packs (see made_of_packs()): places are still in elements. What is left over of a single run, less
/// than a pack, is not in it.
template <int N>
Layout<N> in_packs(Layout<N> layout, int width) {
  layout.numel = layout.numel / layout.sizes[0] * (layout.sizes[0] / width);
  layout.sizes[0] /= width;
  for (int64_t& stride : layout.strides[0]) stride *= width;
  layout.make_divisors();
  return layout;
}

/// Calls run(piece, from) for parts of the layout whose indices fit 31 bits, most often for all of it at once. Tensor k
/// of a piece begins from[k] elements further on.
template <int N, class Run>
void in_pieces(const Layout<N>& layout, Run&& run, const std::array<int64_t, std::size_t{N}>& from = {}) {
  if (layout.narrow()) return run(layout, from);
  const auto longest = std::max_element(layout.sizes, layout.sizes + layout.ndim) - layout.sizes;
  // Halves that packs fit into.
  const int64_t size = layout.sizes[longest];
  const int64_t half = size >= 128 ? size / 128 * 64 : size / 2;
  Layout<N> piece = layout;
  auto at = from;
  for (const int64_t part : {half, size - half}) {
    piece.sizes[longest] = part;
    piece.numel = layout.numel / size * part;
    piece.make_divisors();
    in_pieces(piece, run, at);
    for (int k = 0; k < N; ++k) at[static_cast<std::size_t>(k)] += half * layout.strides[longest][k];
  }
}

}  // namespace hscuda
