// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/autograd/parameter.h"
#include "halfstep/optim/optimizer.h"

namespace halfstep::optim {

/// Options of EMA.
struct EMAOptions {
  double decay = 0.999;  ///< fraction of the average retained at an update, 0 to 1
  double warmup = 0;   ///< above 0: the decay is decay * (1 - exp(-updates / warmup)), so that early updates count more
  bool equal = false;  ///< all updates weigh the same instead (stochastic weight averaging); decay is ignored
};

/// A moving average of parameters: average = decay * average + (1 - decay) * parameter, in float32 (float64 for f64)
/// whatever the parameters' dtype. As PyTorch's AveragedModel, the first update copies. Pass `state_dict()` of a module
/// instead of `parameters()` to average buffers too; what isn't floating is left out.
class HS_API EMA {
 public:
  explicit EMA(const NamedTensors& parameters, const EMAOptions& options = {});

  /// Updates the averages from the parameters, in one pass over all of them.
  void update() { update_unless({}); }
  /// The same if the step ran: the device decides, the host doesn't wait.
  void update(const amp::StepResult& result) { update_unless(result.found_inf()); }
  /// The same if `found_inf` (f32 or bool, one element; undefined for none) is 0.
  void update_unless(const Tensor& found_inf);

  /// The averages, by the parameters' names.
  const NamedTensors& averages() const { return averages_; }
  /// Updates that counted. Waits for the device.
  std::int64_t updates() const;
  /// Exchanges the parameters' values with the averages, rounded to the parameters' dtype, for an evaluation; a second
  /// call restores exactly the same values.
  void swap();
  /// Whether the parameters currently hold the averages. While they do, update() throws Error.
  bool is_swapped() const { return !kept_.empty(); }

  /// The averages (the tensors themselves, not copies) and the number of updates, for a checkpoint; the same whether
  /// the parameters are swapped or not. Waits for the device.
  OptimizerState state_dict() const;
  /// Throws Error when the state is of other parameters.
  void load_state_dict(const OptimizerState& state);

 private:
  EMAOptions options_;
  NamedTensors parameters_;
  NamedTensors averages_;
  Tensor count_;  // i64 [1], on the parameters' device
  std::vector<Tensor> kept_;
};

}  // namespace halfstep::optim
