// SPDX-License-Identifier: Apache-2.0
// Sums of rows whose columns lie side by side.
#pragma once

#include "halfstep/core/dtype.h"

namespace halfstep::cpu {

/// sums[c] += x[r * step + c] for r = 0, 1, ... < rows, each in float32: columns of float32 or 16 bits.
void add_rows_to_sums(DType dtype, const void* x, std::int64_t rows, std::int64_t step, std::int64_t columns,
                      float* sums);

}  // namespace halfstep::cpu
