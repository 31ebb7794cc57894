// SPDX-License-Identifier: Apache-2.0
// Means over whole images whose channels lie side by side, and the reverse.
#pragma once

#include "halfstep/runtime/kernel.h"

namespace halfstep::cpu {

/// y[n, c, 0, 0] = the sum of x[n, c, ., .], divided: of each row, then of the rows, in float32. x and y are float32 or
/// 16 bits, y of x's dtype or float32.
void mean_of_images(const TensorView& x, const TensorView& y, float divisor);

/// y[n, c, ., .] = row * (column * x[n, c, 0, 0]) / divisor.
void spread_over_images(const TensorView& x, const TensorView& y, float row, float column, float divisor);

}  // namespace halfstep::cpu
