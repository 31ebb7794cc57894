// SPDX-License-Identifier: Apache-2.0
// Padding and cropping of tensors.
#pragma once

#include <vector>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// What pad writes into the new elements.
enum class PadMode {
  constant,   ///< a value
  reflect,    ///< the elements before the edge, mirrored; the edge itself isn't repeated
  replicate,  ///< the element at the edge
  circular,   ///< the elements from the other edge
};

/// `input` with pads[0] elements before and pads[1] after those of the last dimension, pads[2] and pads[3] of the one
/// before it, and so on: up to all dimensions for `constant`, and the last three for the other modes. Negative numbers
/// cut elements off. Any dtype; `value` is for `constant`. `reflect` takes less than a dimension's size, `circular` at
/// most the size. The result has the input's memory layout. Throws ShapeError where sizes don't fit. Semantics:
/// torch.nn.functional.pad.
HS_API Tensor pad(const Tensor& input, const std::vector<std::int64_t>& pads, PadMode mode = PadMode::constant,
                  Scalar value = 0);

}  // namespace halfstep
