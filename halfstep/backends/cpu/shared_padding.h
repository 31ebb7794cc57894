// SPDX-License-Identifier: Apache-2.0
// Padding that two neighbours in memory need once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "halfstep/backends/cpu/round_up.h"

namespace halfstep::cpu {

/// One dimension of a convolution: windows of `window` places, `dilation` apart, see `places` with `before` zeros in
/// front; they begin `stride` places apart. The places that tap k sees in turn are those of phase k * dilation %
/// stride.
struct PaddedLine {
  std::int64_t results, places, window, stride, dilation, before;

  /// Places of a phase that the windows see, with the zeros before and behind them.
  std::int64_t seen() const { return results + (window - 1) * dilation / stride; }
  /// How many of its last places may also be the first ones of what follows, being zeros of every phase there and here.
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
