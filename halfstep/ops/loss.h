// SPDX-License-Identifier: Apache-2.0
// Losses. All compute in float32 (float64 for float64) regardless of the storage dtype, and return float32 under
// autocast.
#pragma once

#include "halfstep/core/tensor.h"

namespace halfstep {

/// How the terms of a loss are reduced.
enum class Reduction : std::int32_t {
  none = 0,       ///< one term per element or sample
  mean = 1,       ///< their mean (weighted, where there are class weights)
  sum = 2,        ///< their sum
  batchmean = 3,  ///< kl_div only: the sum over the first size, which is the divergence's definition
};

/// Options of cross_entropy.
struct CrossEntropyOptions {
  Tensor weight = {};                     ///< a factor for each class, [C]
  Reduction reduction = Reduction::mean;  ///< what becomes of the terms
  std::int64_t ignore_index = -100;       ///< samples of this class are ignored, also in the mean
  double label_smoothing = 0;             ///< 0 to 1: the fraction of the target spread over all classes
};
/// Cross entropy between logits and targets. `input` is [C], [N, C] or [N, C, d1, ...]; `target` has class indices
/// (i64, i32 or u8; [], [N] or [N, d1, ...]) or probabilities (floating, the input's shape). The result is 0-d, or has
/// one term per sample without a reduction. The mean is over the weights of the samples' classes for indices, over the
/// number of samples for probabilities; it is NaN when all samples are ignored. One pass over the logits; they and one
/// number per sample are kept for the backward pass. As torch.nn.functional.cross_entropy. Throws ShapeError,
/// DTypeError, and Error for an index that is not a class, naming the sample.
HS_API Tensor cross_entropy(const Tensor& input, const Tensor& target, const CrossEntropyOptions& options = {});

/// Options of nll_loss.
struct NllLossOptions {
  Tensor weight = {};                     ///< a factor for each class, [C]
  Reduction reduction = Reduction::mean;  ///< what becomes of the terms
  std::int64_t ignore_index = -100;       ///< samples of this class count nothing
};
/// Negative log likelihood: -input[n, target[n]], from log probabilities. Shapes and errors as cross_entropy with class
/// indices.
HS_API Tensor nll_loss(const Tensor& input, const Tensor& target, const NllLossOptions& options = {});

/// Options of the losses of two tensors of one shape.
struct LossOptions {
  Reduction reduction = Reduction::mean;  ///< what becomes of the terms
};
/// (input - target)^2. `target` must have the input's shape: PyTorch broadcasts with a warning, which hides the mistake
/// of [N, 1] against [N]; expand it explicitly if that is intended. Mixed dtypes follow type promotion. The same
/// applies to the losses below.
HS_API Tensor mse_loss(const Tensor& input, const Tensor& target, const LossOptions& options = {});
/// |input - target|.
HS_API Tensor l1_loss(const Tensor& input, const Tensor& target, const LossOptions& options = {});

/// Options of smooth_l1_loss.
struct SmoothL1Options {
  Reduction reduction = Reduction::mean;  ///< what becomes of the terms
  double beta = 1;                        ///< where the parabola ends; 0 gives l1_loss
};
/// d^2 / (2 beta) for |d| < beta, else |d| - beta / 2, with d = input - target.
HS_API Tensor smooth_l1_loss(const Tensor& input, const Tensor& target, const SmoothL1Options& options = {});

/// Options of huber_loss.
struct HuberOptions {
  Reduction reduction = Reduction::mean;  ///< what becomes of the terms
  double delta = 1;                       ///< where the parabola ends; above 0
};
/// d^2 / 2 for |d| <= delta, else delta (|d| - delta / 2).
HS_API Tensor huber_loss(const Tensor& input, const Tensor& target, const HuberOptions& options = {});

/// Options of kl_div.
struct KlDivOptions {
  Reduction reduction = Reduction::mean;  ///< batchmean is the divergence as it is defined
  bool log_target = false;                ///< whether the target is log probabilities too
};
/// target * (log(target) - input): `input` has log probabilities.
HS_API Tensor kl_div(const Tensor& input, const Tensor& target, const KlDivOptions& options = {});

/// Options of binary_cross_entropy_with_logits.
struct BceWithLogitsOptions {
  Tensor weight = {};                     ///< a factor for each term; broadcast
  Tensor pos_weight = {};                 ///< a factor for the positive part of each term; broadcast
  Reduction reduction = Reduction::mean;  ///< what becomes of the terms
};
/// Binary cross entropy of sigmoid(input), computed from the logits: no logarithm of a rounded probability.
HS_API Tensor binary_cross_entropy_with_logits(const Tensor& input, const Tensor& target,
                                               const BceWithLogitsOptions& options = {});

/// Options of binary_cross_entropy.
struct BceOptions {
  Tensor weight = {};                     ///< a factor for each term; broadcast
  Reduction reduction = Reduction::mean;  ///< what becomes of the terms
};
/// -(target log(input) + (1 - target) log(1 - input)) with logarithms of at least -100, as in PyTorch. Banned under
/// autocast. Throws Error for an input outside 0 to 1.
HS_API Tensor binary_cross_entropy(const Tensor& input, const Tensor& target, const BceOptions& options = {});

/// Options of cosine_similarity.
struct CosineSimilarityOptions {
  std::int64_t dim = 1;  ///< the vectors lie along it
  double eps = 1e-8;     ///< each norm counts at least this much
};
/// sum(a b) / (max(|a|, eps) max(|b|, eps)) along `dim`; the inputs broadcast.
HS_API Tensor cosine_similarity(const Tensor& input, const Tensor& other, const CosineSimilarityOptions& options = {});

}  // namespace halfstep
