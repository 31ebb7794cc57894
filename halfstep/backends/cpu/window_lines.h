// SPDX-License-Identifier: Apache-2.0
// Windows of places cut out of the lines of an image, where a window's rows are too short for copies of their own.
#pragma once

#include <cstdint>

namespace halfstep::cpu {

/// Element (k, i) of place q's window, k < rows, i < width: lines[k * line + q * step + i].
struct WindowLines {
  static constexpr std::int64_t kBehind = 16;  ///< floats that may be read and written behind the last ones
  const float* lines;
  std::int64_t line, step;
  std::int64_t rows, width, places;
  float* to;
  std::int64_t stride;  ///< floats from one place's window to the next, at least rows * width + kBehind
};

/// to[q * stride + k * width + i] = element (k, i) of place q, and zeros behind a place's last element up to a multiple
/// of 16.
void cut_windows(const WindowLines& w);

}  // namespace halfstep::cpu
