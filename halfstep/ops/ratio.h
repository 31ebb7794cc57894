// SPDX-License-Identifier: Apache-2.0
// Internal to the ops' .cpp files: gradients that are a gradient times a ratio, each in one pass and rounded once. What
// is representable comes out right: products and squares on the way have more range than the dtype. Recorded.
#pragma once

#include "halfstep/core/tensor.h"

namespace halfstep::detail {

/// x times a factor in float64 (which broadcasts), in the dtype of x: the factor may be out of its range.
Tensor mul_wide(const Tensor& x, const Tensor& factor);
/// grad a / b.
Tensor scaled_ratio(const Tensor& grad, const Tensor& a, const Tensor& b);
/// -grad a / b^2, the gradient that a / b has in b.
Tensor div_backward(const Tensor& grad, const Tensor& a, const Tensor& b);
/// grad a / sqrt(a^2 + b^2), the gradient that hypot(a, b) has in a; NaN at the origin.
Tensor hypot_backward(const Tensor& grad, const Tensor& a, const Tensor& b);
/// grad b / (a^2 + b^2), the gradient that atan2(a, b) has in a; 0 at the origin.
Tensor atan2_backward(const Tensor& grad, const Tensor& a, const Tensor& b);

}  // namespace halfstep::detail
