// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/core/tensor.h"

namespace halfstep {

/// While training, zeroes each element with probability `p` and divides the others by 1 - p; `input` itself otherwise.
/// The choice depends only on the default generator's seed and offset and on the element's row-major index, not on
/// threads or layout, and no mask is kept for the backward pass, which generates the same words again. Works on f32,
/// f64, f16 and bf16. Throws Error unless 0 <= p <= 1.
HS_API Tensor dropout(const Tensor& input, double p = 0.5, bool training = true);

}  // namespace halfstep
