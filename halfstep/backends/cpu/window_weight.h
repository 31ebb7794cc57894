// SPDX-License-Identifier: Apache-2.0
// The weights that convolve_windows() multiplies (conv_windows.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "halfstep/backends/cpu/round_up.h"
#include "halfstep/backends/cpu/window_copies.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep::cpu {

/// A weight packed for TileProduct::b: panels of 32 columns of the result, pair by pair along the sum over taps and
/// channels (of an input gradient, filters). Elements of several parts have those of 16 pairs after each other.
class WindowWeight {
 public:
  /// Of `w`, whose channels lie next to each other; `steps` pairs along the sum. `g` must outlive it.
  WindowWeight(const WindowGeometry& g, const TensorView& w, std::int64_t steps);
  std::size_t bytes() const;
  std::int64_t panels() const { return divide_up(g_.o, kWindowPanel); }
  void pack(std::uint32_t* to) const;

 private:
  void pack_pairs(std::int64_t first, std::int64_t n, std::uint32_t* to) const;
  template <class Number>
  void pack_parts(std::int64_t first, std::int64_t n, std::uint32_t* to) const;
  template <class Element>
  const Element* at_tap(std::int64_t k, std::int64_t l) const {
    return reinterpret_cast<const Element*>(data_) + g_.tap(0, k) * strides_[2] + g_.tap(1, l) * strides_[3];
  }

  const WindowGeometry& g_;
  const char* data_;
  std::int64_t strides_[4];
  std::int64_t steps_;
};

/// Copies a row-major weight [O, C, KH, KW] of 16 or 32 bits to `to` as [O, KH, KW, C].
void put_channels_last(const TensorView& weight, void* to);

}  // namespace halfstep::cpu
