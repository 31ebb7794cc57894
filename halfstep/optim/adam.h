// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/ops/attributes.h"
#include "halfstep/optim/optimizer.h"

namespace halfstep::optim {

/// Options of Adam; the defaults are PyTorch's.
struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;  ///< added to the gradient
  bool amsgrad = false;
  bool maximize = false;
  LowPrecision low_precision = LowPrecision::master_weights;
};

/// Options of AdamW; the defaults are PyTorch's.
struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;  ///< decoupled: p -= lr weight_decay p
  bool amsgrad = false;
  bool maximize = false;
  LowPrecision low_precision = LowPrecision::master_weights;
};

/// Adam (Kingma and Ba, 2015), with AMSGrad (Reddi et al., 2018) as an option. PyTorch's torch.optim.Adam: moments in
/// float32 (f64 for f64), eps added after the bias correction of the root.
class HS_API Adam : public Optimizer {
 public:
  Adam(const NamedTensors& parameters, const AdamOptions& options = {});
  /// More parameters under options of their own.
  void add_param_group(const NamedTensors& parameters, const AdamOptions& options);
  double momentum(int group = 0) const override;
  void set_momentum(int group, double value) override;
  std::string kind() const override { return "Adam"; }

 protected:
  explicit Adam(LowPrecision low_precision) : Optimizer(low_precision) {}
  void add(const NamedTensors& parameters, double lr, const AdamAttributes& options);
  std::vector<std::string> state_names(int group) const override;
  const KernelTable* kernel() const override;
  const char* kernel_name() const override { return "adam_step"; }
  std::span<const std::byte> attributes(int group) override;
  std::map<std::string, double> numbers(int group) const override;
  void load_numbers(int group, const std::map<std::string, double>& numbers) override;

 private:
  std::vector<AdamAttributes> options_;
};

/// Adam with decoupled weight decay (Loshchilov and Hutter, 2019). PyTorch's torch.optim.AdamW.
class HS_API AdamW : public Adam {
 public:
  AdamW(const NamedTensors& parameters, const AdamWOptions& options = {});
  /// More parameters under options of their own.
  void add_param_group(const NamedTensors& parameters, const AdamWOptions& options);
  std::string kind() const override { return "AdamW"; }
};

}  // namespace halfstep::optim
