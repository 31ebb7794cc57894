// SPDX-License-Identifier: Apache-2.0
// Tensors with other strides than they have, to have elements numbered and coordinates counted by geometry.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/geometry.h"
#include "halfstep/runtime/plugin.h"

namespace hscuda {

/// A tensor whose sizes and strides can be changed.
struct View : halfstep_tensor {
  int64_t own_sizes[HALFSTEP_MAX_DIMS] = {}, own_strides[HALFSTEP_MAX_DIMS] = {};

  explicit View(const halfstep_tensor& t) : halfstep_tensor(t) {
    std::copy_n(t.sizes, t.ndim, own_sizes);
    std::copy_n(t.strides, t.ndim, own_strides);
    sizes = own_sizes;
    strides = own_strides;
  }
  View(const View& other) : View(static_cast<const halfstep_tensor&>(other)) {}
  View& operator=(const View&) = delete;

  /// Moves the first element.
  void advance(int64_t elements, uint64_t item_size) {
    data = static_cast<char*>(data) + elements * static_cast<int64_t>(item_size);
  }
};

/// Of `t`'s shape: the index along dimension `dim` as the place. None for a dimension that isn't there.
struct Coordinate : View {
  Coordinate(const halfstep_tensor& t, int dim) : View(t) {
    std::fill(std::begin(own_strides), std::end(own_strides), 0);
    if (dim >= 0 && dim < t.ndim) own_strides[dim] = 1;
  }
};

/// The places of N tensors for elements that are numbered in row-major order over `ndim` dimensions.
template <int N>
Layout<N> row_major(int ndim, const int64_t* sizes, const int64_t* const (&strides)[N]) {
  Layout<N> layout;
  layout.numel = 1;
  for (int d = ndim - 1; d >= 0; --d) {
    layout.numel *= sizes[d];
    if (sizes[d] == 1) continue;
    const int last = layout.ndim - 1;
    bool straight = last >= 0;
    for (int k = 0; straight && k < N; ++k) straight = strides[k][d] == layout.strides[last][k] * layout.sizes[last];
    if (straight) {
      layout.sizes[last] *= sizes[d];
    } else {
      layout.sizes[layout.ndim] = sizes[d];
      for (int k = 0; k < N; ++k) layout.strides[layout.ndim][k] = strides[k][d];
      ++layout.ndim;
    }
  }
  if (layout.ndim == 0) {
    layout.ndim = 1;
    layout.sizes[0] = 1;
    for (int k = 0; k < N; ++k) layout.strides[0][k] = 1;
  }
  if (layout.narrow() && layout.numel > 0) {
    for (int d = 0; d < layout.ndim; ++d) layout.divisors[d] = Divisor(static_cast<uint32_t>(layout.sizes[d]));
  }
  return layout;
}

/// The places of element i, by 32-bit arithmetic where that is enough.
template <int N>
HSCUDA_BOTH void places_of(const Layout<N>& layout, int64_t i, int64_t (&at)[N]) {
  if (layout.numel < int64_t{1} << 31) {
    layout.places(static_cast<uint32_t>(i), at);
  } else {
    layout.places(i, at);
  }
}

/// Division of numbers by one number, by 32-bit arithmetic where that is enough.
struct Split {
  Divisor narrow;
  int64_t size = 1;
  bool wide = false;
  Split() = default;
  /// For numbers below `end`.
  Split(int64_t size, int64_t end) : size(size), wide(end >= int64_t{1} << 31) {
    if (!wide && size > 0) narrow = Divisor(static_cast<uint32_t>(size));
  }
  /// i / size, and the rest.
  HSCUDA_BOTH int64_t divide(int64_t i, int64_t* rest) const {
    const int64_t quotient = wide ? i / size : static_cast<int64_t>(narrow.divide(static_cast<uint32_t>(i)));
    *rest = i - quotient * size;
    return quotient;
  }
};

/// 16 bytes that are moved at once.
struct alignas(16) Word16 {
  uint64_t low, high;
};
/// The largest power of two, up to 16, that divides all of a number's bits so far.
constexpr int64_t word_bytes(uint64_t ored) {
  return static_cast<int64_t>(16 | ored) & -static_cast<int64_t>(16 | ored);
}
/// Calls f(word) with a word of 1, 2, 4, 8 or 16 bytes.
template <class F>
void with_bytes(int64_t bytes, F&& f) {
  switch (bytes) {
    case 1:
      return f(uint8_t{});
    case 2:
      return f(uint16_t{});
    case 4:
      return f(uint32_t{});
    case 8:
      return f(uint64_t{});
    default:
      return f(Word16{});
  }
}

/// A dimension from 0 on; that of a 0-d tensor is 0.
constexpr int wrapped(int64_t dim, int ndim) { return static_cast<int>(dim < 0 ? dim + std::max(ndim, 1) : dim); }
/// The size of a dimension; a 0-d tensor has one of 1.
constexpr int64_t size_along(const halfstep_tensor& t, int dim) { return t.ndim == 0 ? 1 : t.sizes[dim]; }
constexpr int64_t stride_along(const halfstep_tensor& t, int dim) { return t.ndim == 0 ? 0 : t.strides[dim]; }

}  // namespace hscuda
