// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/core/tensor.h"

namespace halfstep {

/// Options of softmax and log_softmax.
struct SoftmaxFuncOptions {
  std::optional<DType> dtype = {};  ///< of the result; by default the input's (float32 under autocast)
};

/// exp(x) / sum(exp(x)) along `dim`; same shape as the input, which is f32, f64, f16 or bf16. 16-bit inputs compute in
/// float32 and are rounded once. A row of -infinity only (a fully masked one) gives NaN, as in PyTorch: mask with
/// lowest_finite(dtype) if such rows can occur. Throws ShapeError for a dimension that isn't there, DTypeError for
/// integers.
HS_API Tensor softmax(const Tensor& input, std::int64_t dim, const SoftmaxFuncOptions& options = {});
/// log(softmax(x)) along `dim`, without computing small probabilities. As softmax otherwise.
HS_API Tensor log_softmax(const Tensor& input, std::int64_t dim, const SoftmaxFuncOptions& options = {});

}  // namespace halfstep
