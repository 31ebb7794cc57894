// SPDX-License-Identifier: Apache-2.0
// Convolutions of images and sequences.
//
// Images keep their layout: where input or weight is channels-last, so is the result, and nothing is reordered on the
// way. Channels-last is the fast layout. Under autocast they run in the lower precision; sums are float32 regardless of
// the storage dtype (float64 for float64). Every result is within half a unit in the last place plus the error of a
// float32 sum of its own products, unless set_winograd() or set_float32_precision() (halfstep/runtime) has allowed
// more.
#pragma once

#include "halfstep/core/tensor.h"

namespace halfstep {

/// Options of conv1d and conv2d. Each list has one number for all dimensions, or one for each: height, then width.
struct ConvFuncOptions {
  Shape stride = {1};       ///< places between windows
  Shape padding = {0};      ///< zeros on either side
  Shape dilation = {1};     ///< places between the elements of a window
  std::int64_t groups = 1;  ///< number of independent channel groups
};

/// Options of conv_transpose1d and conv_transpose2d; lists as in ConvFuncOptions.
struct ConvTransposeFuncOptions {
  Shape stride = {1};
  Shape padding = {0};         ///< of the convolution whose gradient this is: it makes the result smaller
  Shape output_padding = {0};  ///< makes one side of the result larger, under stride or dilation
  std::int64_t groups = 1;
  Shape dilation = {1};
};

/// Cross-correlation of `input` [N, C, H, W] (or [C, H, W]) with `weight` [O, C / groups, KH, KW], plus `bias` [O]
/// where there is one: [N, O, (H + 2 padding - dilation (KH - 1) - 1) / stride + 1, ...]. Floating dtypes. Throws
/// ShapeError where sizes don't fit. Semantics: torch.nn.functional.conv2d.
HS_API Tensor conv2d(const Tensor& input, const Tensor& weight, const Tensor& bias = {},
                     const ConvFuncOptions& options = {});
/// The same for `input` [N, C, L] (or [C, L]) and `weight` [O, C / groups, K].
HS_API Tensor conv1d(const Tensor& input, const Tensor& weight, const Tensor& bias = {},
                     const ConvFuncOptions& options = {});

/// The operation of conv2d's input gradient, applied to `input` [N, C, H, W] (or [C, H, W]), with `weight` [C, O /
/// groups, KH, KW] and `bias` [O]: [N, O, (H - 1) stride - 2 padding + dilation (KH - 1) + output_padding + 1, ...].
/// Semantics: torch.nn.functional.conv_transpose2d.
HS_API Tensor conv_transpose2d(const Tensor& input, const Tensor& weight, const Tensor& bias = {},
                               const ConvTransposeFuncOptions& options = {});
/// The same for `input` [N, C, L] (or [C, L]) and `weight` [C, O / groups, K].
HS_API Tensor conv_transpose1d(const Tensor& input, const Tensor& weight, const Tensor& bias = {},
                               const ConvTransposeFuncOptions& options = {});

}  // namespace halfstep
