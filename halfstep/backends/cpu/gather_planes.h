// SPDX-License-Identifier: Apache-2.0
// Weighted sums of places of images: averages, resampling, and the backward passes of both.
#pragma once

#include "halfstep/backends/cpu/window.h"

namespace halfstep::cpu {

/// What the sums are divided by: the product of one number a row, one a column and one for all.
struct Divisors {
  const double* rows = nullptr;  ///< null: 1
  const double* columns = nullptr;
  double all = 1;
};

/// y[n, c, i, j] = sum of weights times x[n, c, ., .] over the taps of row i and of column j, divided. x and y are
/// [N, C, H, W] of floating dtypes, in any layout. Sums in float32 (float64 where x or y is).
void gather_planes(const TensorView& x, const TensorView& y, const Taps& rows, const Taps& columns,
                   const Divisors& divisors);

}  // namespace halfstep::cpu
