// SPDX-License-Identifier: Apache-2.0
// Internal to the reductions' .cpp files.
#pragma once

#include "halfstep/ops/attributes.h"
#include "halfstep/ops/op.h"

namespace halfstep::detail {

/// The sizes after reduction over `dims` (none: all). Throws ShapeError for a dimension that isn't there or comes
/// twice.
Shape reduced_sizes(const Shape& sizes, const Shape& dims, bool keepdim, const char* op);
/// The number of elements that go into one result.
std::int64_t reduced_numel(const Shape& sizes, const Shape& dims, const char* op);
/// A gradient of the reduced shape, seen with the reduced dimensions as size 1.
Tensor kept(const Tensor& gradient, const Shape& sizes, const Shape& dims);
/// a / b in float64, and 0 where b is 0. Recorded.
Tensor div_or_zero(const Tensor& a, const Tensor& b);

}  // namespace halfstep::detail
