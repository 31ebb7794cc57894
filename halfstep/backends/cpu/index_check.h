// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/runtime/kernel.h"

namespace halfstep::cpu {

/// Whether all of `index` (i64) lies in a dimension of `size` elements: from 0, or from -size with `negative`. If not,
/// records the first that doesn't, in row-major order: its value, its position and the bound. `dim` of `ndim`
/// dimensions is named in the text; -1 when there is none to name.
bool check_indices(KernelContext* context, const TensorView& index, std::int64_t size, std::int64_t dim, int ndim,
                   bool negative);

/// Whether one of n indices lies outside [low, size), low at most 0.
bool any_outside(const std::int64_t* index, std::int64_t n, std::int64_t low, std::int64_t size);

}  // namespace halfstep::cpu
