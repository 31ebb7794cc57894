// SPDX-License-Identifier: Apache-2.0
// Pooling of images and sequences.
//
// The result has the input's memory layout; channels-last is the fast one. Averages are accumulated in float32 (float64
// for float64) and rounded once; maxima keep the bits of the largest. All run in their input's dtype, also under
// autocast. Each list has one number for all dimensions, or one for each: height, then width.
#pragma once

#include <optional>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// Options of max_pool1d and max_pool2d.
struct MaxPoolFuncOptions {
  Shape stride = {};       ///< places between windows; none: the window's size
  Shape padding = {0};     ///< places beyond either side, never the largest; at most half of the kernel
  Shape dilation = {1};    ///< places between the elements of a window
  bool ceil_mode = false;  ///< a last window that begins inside may extend outside
};
/// The largest value of each window of `kernel` places of `input` [N, C, H, W] (or [C, H, W]):
/// [N, C, (H + 2 padding - dilation (kernel - 1) - 1) / stride + 1, ...]. NaN counts as the largest. The gradient goes
/// to the first of equal values, to the last NaN. Floating dtypes, u8 and i8. Throws ShapeError where sizes don't fit.
/// Semantics: torch.nn.functional.max_pool2d. For the backward pass one byte is kept for each result (four for windows
/// of more than 256 places), not the input.
HS_API Tensor max_pool2d(const Tensor& input, const Shape& kernel, const MaxPoolFuncOptions& options = {});
/// The same for `input` [N, C, L] (or [C, L]).
HS_API Tensor max_pool1d(const Tensor& input, const Shape& kernel, const MaxPoolFuncOptions& options = {});

/// What max_pool2d_with_indices returns.
struct MaxPoolResult {
  Tensor values;
  Tensor indices;  ///< i64: y W + x of where each value comes from, in the H x W places of its channel
};
/// max_pool2d of floating dtypes, and where the values come from.
HS_API MaxPoolResult max_pool2d_with_indices(const Tensor& input, const Shape& kernel,
                                             const MaxPoolFuncOptions& options = {});

/// Options of avg_pool1d and avg_pool2d.
struct AvgPoolFuncOptions {
  Shape stride = {};              ///< places between windows; none: the window's size
  Shape padding = {0};            ///< zeros on either side, at most half of the kernel
  bool ceil_mode = false;         ///< a last window that begins inside may extend outside
  bool count_include_pad = true;  ///< whether padding counts among the places that the sum is divided by
  std::optional<std::int64_t> divisor_override = {};  ///< what it is divided by instead; not 0
};
/// The mean of each window of `kernel` places of `input` [N, C, H, W] (or [C, H, W]). Floating dtypes. Throws
/// ShapeError where sizes don't fit. Semantics: torch.nn.functional.avg_pool2d.
HS_API Tensor avg_pool2d(const Tensor& input, const Shape& kernel, const AvgPoolFuncOptions& options = {});
/// The same for `input` [N, C, L] (or [C, L]).
HS_API Tensor avg_pool1d(const Tensor& input, const Shape& kernel, const AvgPoolFuncOptions& options = {});

/// Means of windows that divide `input` [N, C, H, W] (or [C, H, W]) evenly into `output_size` (-1: as the input):
/// window i begins at floor(i H / size) and ends before ceil((i + 1) H / size). Size 1 is the mean of the image.
/// Semantics: torch.nn.functional.adaptive_avg_pool2d.
HS_API Tensor adaptive_avg_pool2d(const Tensor& input, const Shape& output_size);
/// The same for `input` [N, C, L] (or [C, L]).
HS_API Tensor adaptive_avg_pool1d(const Tensor& input, const Shape& output_size);
/// The largest values of the windows of adaptive_avg_pool2d, otherwise as max_pool2d.
HS_API Tensor adaptive_max_pool2d(const Tensor& input, const Shape& output_size);
/// adaptive_max_pool2d of floating dtypes, and where the values come from.
HS_API MaxPoolResult adaptive_max_pool2d_with_indices(const Tensor& input, const Shape& output_size);

}  // namespace halfstep
