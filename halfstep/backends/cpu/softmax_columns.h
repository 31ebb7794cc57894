// SPDX-License-Identifier: Apache-2.0
// softmax and log_softmax down columns that lie side by side: each pass goes along the rows, so that memory is read in
// its order. In float32; sums add 64 terms before they go on in float64.
#pragma once

#include <cstdint>

#include "halfstep/core/dtype.h"

namespace halfstep::cpu {

/// Columns that are worked on together.
inline constexpr std::int64_t kSoftmaxColumns = 256;

/// x and y: rows r < n of `width` (up to kSoftmaxColumns) elements of f32, f16 or bf16, `stride` elements apart.
void softmax_columns(DType dtype, const void* x, void* y, std::int64_t n, std::int64_t stride, std::int64_t width,
                     bool logarithm);
/// dx from the gradient g and the result y, likewise.
void softmax_columns_backward(DType dtype, const void* g, const void* y, void* dx, std::int64_t n, std::int64_t stride,
                              std::int64_t width, bool logarithm);

}  // namespace halfstep::cpu
