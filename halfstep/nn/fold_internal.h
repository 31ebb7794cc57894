// SPDX-License-Identifier: Apache-2.0
// Internal: the numbers of a batch norm that is folded into the product before it.
#pragma once

#include "halfstep/core/export.h"
#include "halfstep/core/tensor.h"

namespace halfstep::nn::detail {

/// A batch norm with constant statistics; the weight and the bias may be undefined.
struct ConstantNorm {
  Tensor weight, bias, running_mean, running_var;
  double eps = 1e-5;
};
/// It as y = factor * x + shift with `bias` (may be undefined) added to x before: both f64 [C].
struct NormFactors {
  Tensor factor, shift;
};
HS_API NormFactors norm_factors(const ConstantNorm& norm, const Tensor& bias);

/// A weight [O, ...] and a bias that compute norm(product), in the weight's dtype: rounded once.
struct FoldedWeights {
  Tensor weight, bias;
};
HS_API FoldedWeights folded_weights(const Tensor& weight, const Tensor& bias, const ConstantNorm& norm);

}  // namespace halfstep::nn::detail
