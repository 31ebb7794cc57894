// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/autograd/parameter.h"

namespace halfstep::optim {

class Optimizer;
struct OptimizerState;

/// How processes divide an optimizer's state among them: each has that of the parameters which it owns, and updates
/// them for all. dist::ZeroRedundancy makes one; see Optimizer::shard().
class HS_API StateSharding {
 public:
  virtual ~StateSharding() = default;
  /// Whether this process has the state of a parameter.
  virtual bool owns(const Tensor& parameter) const = 0;
  /// Whether gradients are with the parameters' owners only.
  virtual bool gradients_too() const = 0;
  /// A step has changed the parameters that this process owns: those of the others come here.
  virtual void updated(const Optimizer& optimizer) = 0;
  /// amp::OptimizerBase::share() of an optimizer whose gradients are with the owners.
  virtual void share(const Optimizer& optimizer, amp::GradientFindings& found) = 0;
  /// grad_norm() of these parameters, on all processes, with the same bits.
  virtual Tensor grad_norm(const NamedTensors& parameters, double norm_type) = 0;
  /// The optimizer's whole state. Throws Error where it isn't on this process.
  virtual OptimizerState whole_state(const Optimizer& optimizer) const = 0;
  /// The optimizer was given another state.
  virtual void state_replaced() = 0;
};

}  // namespace halfstep::optim
