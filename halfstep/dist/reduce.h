// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "halfstep/core/dtype.h"
#include "halfstep/core/export.h"
#include "halfstep/dist/process_group.h"

namespace halfstep::dist {

/// `output`[i] = the reduction of `inputs`[0][i], `inputs`[1][i], ..., taken in this order, for n elements in the
/// host's memory. `output` may be one of the inputs, exactly. Values are added up in float32 (float64 for f64, the
/// integer's own size, wrapping around, for integers) and rounded once. `mean` divides the sum by `divisor` (0: by the
/// number of inputs). min and max give NaN where any input is NaN, and the first of equal values. The process groups'
/// reductions.
///
/// Throws DTypeError for bool, and for the mean of integers.
HS_API void reduce_in_order(ReduceOp op, DType dtype, std::span<const void* const> inputs, void* output, std::int64_t n,
                            int divisor = 0);

}  // namespace halfstep::dist
