// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

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
  /// Number of this process among those that share the state, and their number.
  virtual int rank() const = 0;
  virtual int ranks() const = 0;
  /// The process that has the state of a parameter; -1: each has it.
  virtual int owner(const Tensor& parameter) const = 0;
  /// Whether this process has the state of a parameter.
  virtual bool owns(const Tensor& parameter) const = 0;
  /// Whether gradients are with the parameters' owners only.
  virtual bool gradients_too() const = 0;
  /// Whether values of parameters are with their owners only.
  virtual bool parameters_too() const = 0;
  /// A step has changed the parameters that this process owns: those of the others come here.
  virtual void updated(const Optimizer& optimizer) = 0;
  /// amp::OptimizerBase::share() of an optimizer whose gradients are with the owners.
  virtual void share(const Optimizer& optimizer, amp::GradientFindings& found) = 0;
  /// grad_norm() of these parameters, on all processes, with the same bits.
  virtual Tensor grad_norm(const NamedTensors& parameters, double norm_type) = 0;
  /// The optimizer's whole state. Throws Error where it isn't on this process.
  virtual OptimizerState whole_state(const Optimizer& optimizer) const = 0;
  /// Whether some process has it.
  virtual bool is_whole() const = 0;
  /// What Optimizer::state_of_groups() gives, with the steps of all parameters. All processes call it.
  virtual OptimizerState whole_state_of_groups(const Optimizer& optimizer) = 0;
  /// With parameters_too(): brings all parameters here for as long as the result lives. All processes call it.
  virtual std::shared_ptr<void> gather_parameters() = 0;
  /// And for forward passes of which processes have unlike numbers: while the result of the first lives, what a pass
  /// brings here is noted; the second brings the same once more, for a pass that the others make.
  virtual std::shared_ptr<void> watch_pass() = 0;
  virtual void follow_pass() = 0;
  /// The processes' texts, in their order. All call it.
  virtual std::vector<std::string> gather_texts(std::string_view text) = 0;
  /// The optimizer was given another state.
  virtual void state_replaced() = 0;
};

}  // namespace halfstep::optim
