// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "halfstep/core/dtype.h"

namespace halfstep::cpu {

/// The place of the first largest (smallest) of n > 0 neighbouring values of f32, f64, f16 or bf16; the first NaN where
/// there is one.
std::int64_t largest_place(DType dtype, const void* row, std::int64_t n);
std::int64_t smallest_place(DType dtype, const void* row, std::int64_t n);

}  // namespace halfstep::cpu
