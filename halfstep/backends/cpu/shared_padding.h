// SPDX-License-Identifier: Apache-2.0
// How places of images with padding are numbered, and zeros that are the padding behind one line and in front of the
// next one at once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "halfstep/backends/cpu/round_up.h"

namespace halfstep::cpu {

/// What a tap sees of places that are numbered phase by phase, each line after line: from the place that a window's
/// first tap sees, the place `offset` further on in a phase.
struct TapPlace {
  std::int64_t phase, offset;
};
/// Of a tap that is y lines and x columns behind the first one. `width`: places from one line of a phase to the next.
inline TapPlace tap_place(const std::int64_t (&stride)[2], std::int64_t y, std::int64_t x, std::int64_t width) {
  return {y % stride[0] * stride[1] + x % stride[1], y / stride[0] * width + x / stride[1]};
}

/// One dimension of a convolution: `results` windows, `stride` places apart, over `places` places with `before` zeros
/// in front. A window has `window` taps, `dilation` places apart. The places that a tap sees have the same remainder by
/// the stride; places with the same remainder are a phase.
struct PaddedLine {
  std::int64_t results, places, window, stride, dilation, before;

  /// Places of a phase that the windows see, padding included.
  std::int64_t seen() const { return results + (window - 1) * dilation / stride; }
  /// How many places at the end of a line may be those at the beginning of the next one, because both are zeros in
  /// every phase.
  std::int64_t shared() const {
    const std::int64_t all = seen();
    std::int64_t least = all - results;
    for (std::int64_t k = 0; k < std::min(window, stride); ++k) {
      // Place u is number `first` + u * stride.
      const std::int64_t first = k * dilation % stride - before;
      const std::int64_t leading = std::min(all, divide_up(std::max<std::int64_t>(-first, 0), stride));
      const std::int64_t end = places > first ? divide_up(places - first, stride) : 0;
      least = std::min({least, leading, all - std::clamp<std::int64_t>(end, 0, all)});
    }
    return least;
  }
};

}  // namespace halfstep::cpu
