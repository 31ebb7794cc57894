// SPDX-License-Identifier: Apache-2.0
// Resizing of images.
#pragma once

#include <vector>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// Where interpolate takes its values from.
enum class InterpolateMode {
  nearest,        ///< the pixel floor(i / scale), as OpenCV's INTER_NEAREST
  nearest_exact,  ///< the pixel floor((i + 0.5) / scale), the nearest one
  bilinear,       ///< the four pixels around, by their distance
};

/// Options of interpolate: `size` or `scale_factor` is required, with one number or one each for height and width.
struct InterpolateOptions {
  Shape size = {};                        ///< of the result
  std::vector<double> scale_factor = {};  ///< the result is floor(scale times the input's size)
  InterpolateMode mode = InterpolateMode::nearest;
  /// For bilinear: the corner pixels' centres are the ends, so that their values stay; else the pixels' edges are.
  bool align_corners = false;
  /// With scale_factor: coordinates use the quotient of the sizes instead of the factor, which matters if the size had
  /// to be rounded down.
  bool recompute_scale_factor = false;
};
/// `input` [N, C, H, W] (or [C, H, W]) with another height and width, in the input's layout. Floating dtypes (u8 and i8
/// for the nearest modes, which only move values); weights and sums are float32 (float64 for float64), rounded once.
/// Under autocast it runs in float32. Throws ShapeError or Error for options that don't fit. Semantics:
/// torch.nn.functional.interpolate.
HS_API Tensor interpolate(const Tensor& input, const InterpolateOptions& options);

}  // namespace halfstep
