// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/core/tensor.h"

namespace halfstep {

/// While training, zeroes each element with probability `p` and divides the others by 1 - p; `input` itself otherwise.
/// The choice is a function of the default generator's seed and offset and of the element's row-major index only:
/// threads and layout don't matter, and no mask is kept for the backward pass, which draws the same words again. Works
/// on f32, f64, f16 and bf16. Throws Error unless 0 <= p <= 1.
HS_API Tensor dropout(const Tensor& input, double p = 0.5, bool training = true);

}  // namespace halfstep
