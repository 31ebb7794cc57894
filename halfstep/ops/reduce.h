// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/core/tensor.h"

namespace halfstep {

/// Sums what broadcasting would repeat, so that the result has `sizes`; `op` is named when it can't be done. The
/// inverse of expand.
HS_API Tensor sum_to(const Tensor& input, const Shape& sizes, const char* op = "sum_to");
/// Options of reductions.
struct ReduceOptions {
  bool keepdim = false;             ///< reduced dimensions stay, with size 1
  std::optional<DType> dtype = {};  ///< of the result; by default the input's (i64 for integers and bool)
};
/// Sum over the dimensions given (none: all). 16-bit inputs add up in float32 and are rounded once.
HS_API Tensor sum(const Tensor& input, const Shape& dims = {}, const ReduceOptions& options = {});

}  // namespace halfstep
