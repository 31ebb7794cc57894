// SPDX-License-Identifier: Apache-2.0
// The losses of ops/loss.h as modules.
#pragma once

#include "halfstep/nn/module.h"
#include "halfstep/ops/loss.h"

namespace halfstep::nn {

/// halfstep::cross_entropy as a module; the class weights are a buffer, `weight`.
class HS_API CrossEntropyLoss : public Module<CrossEntropyLoss> {
 public:
  explicit CrossEntropyLoss(const CrossEntropyOptions& options = {});
  Tensor forward(const Tensor& input, const Tensor& target) const;
  std::string kind() const override { return "CrossEntropyLoss"; }
  CrossEntropyOptions options;
  Buffer weight;
};

/// halfstep::nll_loss as a module; the class weights are a buffer, `weight`.
class HS_API NLLLoss : public Module<NLLLoss> {
 public:
  explicit NLLLoss(const NllLossOptions& options = {});
  Tensor forward(const Tensor& input, const Tensor& target) const;
  std::string kind() const override { return "NLLLoss"; }
  NllLossOptions options;
  Buffer weight;
};

/// halfstep::mse_loss as a module.
class HS_API MSELoss : public Module<MSELoss> {
 public:
  explicit MSELoss(const LossOptions& o = {}) : options(o) {}
  Tensor forward(const Tensor& input, const Tensor& target) const;
  std::string kind() const override { return "MSELoss"; }
  LossOptions options;
};

/// halfstep::l1_loss as a module.
class HS_API L1Loss : public Module<L1Loss> {
 public:
  explicit L1Loss(const LossOptions& o = {}) : options(o) {}
  Tensor forward(const Tensor& input, const Tensor& target) const;
  std::string kind() const override { return "L1Loss"; }
  LossOptions options;
};

/// halfstep::smooth_l1_loss as a module.
class HS_API SmoothL1Loss : public Module<SmoothL1Loss> {
 public:
  explicit SmoothL1Loss(const SmoothL1Options& o = {}) : options(o) {}
  Tensor forward(const Tensor& input, const Tensor& target) const;
  std::string kind() const override { return "SmoothL1Loss"; }
  SmoothL1Options options;
};

/// halfstep::huber_loss as a module.
class HS_API HuberLoss : public Module<HuberLoss> {
 public:
  explicit HuberLoss(const HuberOptions& o = {}) : options(o) {}
  Tensor forward(const Tensor& input, const Tensor& target) const;
  std::string kind() const override { return "HuberLoss"; }
  HuberOptions options;
};

/// halfstep::kl_div as a module.
class HS_API KLDivLoss : public Module<KLDivLoss> {
 public:
  explicit KLDivLoss(const KlDivOptions& o = {}) : options(o) {}
  Tensor forward(const Tensor& input, const Tensor& target) const;
  std::string kind() const override { return "KLDivLoss"; }
  KlDivOptions options;
};

/// halfstep::binary_cross_entropy_with_logits as a module; the factors are buffers, `weight` and `pos_weight`.
class HS_API BCEWithLogitsLoss : public Module<BCEWithLogitsLoss> {
 public:
  explicit BCEWithLogitsLoss(const BceWithLogitsOptions& options = {});
  Tensor forward(const Tensor& input, const Tensor& target) const;
  std::string kind() const override { return "BCEWithLogitsLoss"; }
  BceWithLogitsOptions options;
  Buffer weight;
  Buffer pos_weight;
};

/// halfstep::binary_cross_entropy as a module; the factors are a buffer, `weight`. Banned under autocast.
class HS_API BCELoss : public Module<BCELoss> {
 public:
  explicit BCELoss(const BceOptions& options = {});
  Tensor forward(const Tensor& input, const Tensor& target) const;
  std::string kind() const override { return "BCELoss"; }
  BceOptions options;
  Buffer weight;
};

}  // namespace halfstep::nn
