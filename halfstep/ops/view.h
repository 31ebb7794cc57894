// SPDX-License-Identifier: Apache-2.0
// Views: other sizes and strides on the same storage. All are recorded; see the methods of Tensor for the forms with a
// dot.
#pragma once

#include "halfstep/core/tensor.h"

namespace halfstep {

/// Joins dimensions start to end (both included, counted from the end when negative) into one.
HS_API Tensor flatten(const Tensor& input, std::int64_t start = 0, std::int64_t end = -1);
HS_API Tensor reshape(const Tensor& input, const Shape& sizes);
HS_API Tensor transpose(const Tensor& input, std::int64_t dim0, std::int64_t dim1);
HS_API Tensor permute(const Tensor& input, const Shape& dims);
/// The last two dimensions exchanged (the gradient rules' matrix transpose).
HS_API Tensor matrix_transpose(const Tensor& input);
/// Any sizes, strides and offset (in elements) on the input's storage; throws ShapeError when they leave it.
HS_API Tensor as_strided(const Tensor& input, const Shape& sizes, const Shape& strides, std::int64_t offset);
/// Zeros of `sizes` with `gradient` written where slice(dim, start, end, step) would read: the gradient of slice.
HS_API Tensor slice_backward(const Tensor& gradient, const Shape& sizes, std::int64_t dim, std::int64_t start,
                             std::int64_t end, std::int64_t step);

}  // namespace halfstep
