// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/loss.h"

namespace halfstep::nn {

CrossEntropyLoss::CrossEntropyLoss(const CrossEntropyOptions& o) : options(o), weight(buffer("weight", o.weight)) {}
Tensor CrossEntropyLoss::forward(const Tensor& input, const Tensor& target) const {
  CrossEntropyOptions o = options;
  o.weight = weight;
  return cross_entropy(input, target, o);
}

NLLLoss::NLLLoss(const NllLossOptions& o) : options(o), weight(buffer("weight", o.weight)) {}
Tensor NLLLoss::forward(const Tensor& input, const Tensor& target) const {
  NllLossOptions o = options;
  o.weight = weight;
  return nll_loss(input, target, o);
}

Tensor MSELoss::forward(const Tensor& input, const Tensor& target) const { return mse_loss(input, target, options); }
Tensor L1Loss::forward(const Tensor& input, const Tensor& target) const { return l1_loss(input, target, options); }
Tensor SmoothL1Loss::forward(const Tensor& input, const Tensor& target) const {
  return smooth_l1_loss(input, target, options);
}
Tensor HuberLoss::forward(const Tensor& input, const Tensor& target) const {
  return huber_loss(input, target, options);
}
Tensor KLDivLoss::forward(const Tensor& input, const Tensor& target) const { return kl_div(input, target, options); }

BCEWithLogitsLoss::BCEWithLogitsLoss(const BceWithLogitsOptions& o)
    : options(o), weight(buffer("weight", o.weight)), pos_weight(buffer("pos_weight", o.pos_weight)) {}
Tensor BCEWithLogitsLoss::forward(const Tensor& input, const Tensor& target) const {
  BceWithLogitsOptions o = options;
  o.weight = weight;
  o.pos_weight = pos_weight;
  return binary_cross_entropy_with_logits(input, target, o);
}

BCELoss::BCELoss(const BceOptions& o) : options(o), weight(buffer("weight", o.weight)) {}
Tensor BCELoss::forward(const Tensor& input, const Tensor& target) const {
  BceOptions o = options;
  o.weight = weight;
  return binary_cross_entropy(input, target, o);
}

}  // namespace halfstep::nn
