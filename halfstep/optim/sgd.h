// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/ops/attributes.h"
#include "halfstep/optim/optimizer.h"

namespace halfstep::optim {

/// Options of SGD; the defaults are PyTorch's.
struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;  ///< needs momentum above 0 and no dampening
  bool maximize = false;
  LowPrecision low_precision = LowPrecision::master_weights;
};

/// Stochastic gradient descent with momentum: g += weight_decay p; b = momentum b + (1 - dampening) g (b = g at first);
/// p -= lr (nesterov ? g + momentum b : b). PyTorch's torch.optim.SGD.
class HS_API SGD : public Optimizer {
 public:
  SGD(const NamedTensors& parameters, const SGDOptions& options = {});
  /// More parameters under options of their own.
  void add_param_group(const NamedTensors& parameters, const SGDOptions& options);
  double momentum(int group = 0) const override;
  void set_momentum(int group, double value) override;
  std::string kind() const override { return "SGD"; }

 protected:
  std::vector<std::string> state_names(int group) const override;
  const KernelTable* kernel() const override;
  const char* kernel_name() const override { return "sgd_step"; }
  std::span<const std::byte> attributes(int group) override;
  std::map<std::string, double> numbers(int group) const override;
  void load_numbers(int group, const std::map<std::string, double>& numbers) override;

 private:
  std::vector<SgdAttributes> options_;
};

}  // namespace halfstep::optim
