// SPDX-License-Identifier: Apache-2.0
// Internal: how digits are written, as pen strokes. Used by digits.cpp.
#pragma once

#include <span>
#include <vector>

namespace halfstep::data {

/// A point that the pen passes, in units of the digit's height: x to the right, y down from the top edge.
struct PenPoint {
  float x;
  float y;
  /// Whether the pen changes its direction here at once; otherwise the curve runs smoothly through the point.
  bool corner = false;
};

/// One line drawn without lifting the pen.
using PenStroke = std::vector<PenPoint>;

/// One way of writing a digit.
struct DigitStyle {
  /// How often it is chosen, relative to the digit's other styles.
  float weight;
  std::vector<PenStroke> strokes;
};

/// The styles of a digit from 0 to 9.
std::span<const DigitStyle> digit_styles(int digit);

}  // namespace halfstep::data
