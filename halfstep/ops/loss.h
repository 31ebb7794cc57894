// SPDX-License-Identifier: Apache-2.0
// Losses. All compute in float32 (float64 for float64) whatever the storage, and under autocast give float32.
#pragma once

#include "halfstep/core/tensor.h"

namespace halfstep {

/// What becomes of the terms of a loss.
enum class Reduction : std::int32_t {
  none = 0,       ///< one term an element or sample
  mean = 1,       ///< their mean (weighted, where there are class weights)
  sum = 2,        ///< their sum
  batchmean = 3,  ///< kl_div only: the sum over the first size, which is the divergence's definition
};

/// Options of cross_entropy.
struct CrossEntropyOptions {
  Tensor weight = {};  ///< a factor for each class, [C]
  Reduction reduction = Reduction::mean;
  std::int64_t ignore_index = -100;  ///< samples of this class count nothing, in the mean neither
  double label_smoothing = 0;        ///< 0 to 1: the share of the target that is spread over all classes
};
/// Cross entropy between logits and targets. `input` is [C], [N, C] or [N, C, d1, ...]; `target` has class indices
/// (i64, i32 or u8; [], [N] or [N, d1, ...]) or probabilities (floating, the input's shape). The result is a number, or
/// has one term a sample without a reduction. The mean is over the weights of the samples' classes for indices, over
/// the number of samples for probabilities; it is NaN when all samples are ignored. One pass over the logits; the
/// backward pass keeps them and one number a sample. As torch.nn.functional.cross_entropy. Throws ShapeError,
/// DTypeError, and Error for an index that is no class, naming the sample.
HS_API Tensor cross_entropy(const Tensor& input, const Tensor& target, const CrossEntropyOptions& options = {});

/// Options of nll_loss.
struct NllLossOptions {
  Tensor weight = {};  ///< a factor for each class, [C]
  Reduction reduction = Reduction::mean;
  std::int64_t ignore_index = -100;
};
/// Negative log likelihood: -input[n, target[n]], from log probabilities. Shapes and errors as cross_entropy with class
/// indices.
HS_API Tensor nll_loss(const Tensor& input, const Tensor& target, const NllLossOptions& options = {});

}  // namespace halfstep
