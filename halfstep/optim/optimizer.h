// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/autograd/parameter.h"
#include "halfstep/optim/sharding.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep::optim {

/// How an optimizer keeps parameters that are f16 or bf16.
enum class LowPrecision : std::uint8_t {
  master_weights,  ///< a float32 copy is updated, the parameter is its rounding (8 more bytes a parameter for Adam are
                   ///< float32 too)
  stochastic_rounding,  ///< no copy: the update is rounded stochastically, unbiased
  kahan,                ///< no float32 copy: a 16-bit compensation term keeps the rounding error
  nearest,              ///< no copy, rounded to nearest: updates under half a unit of the last place are lost
};

/// Options of a step on gradients that are given.
struct StepOptions {
  Tensor unless = {};  ///< f32 or bool, one element, on the parameters' device: the step is made only where it is 0
};

/// State of an optimizer for a checkpoint: tensors by name (`fc1.weight.exp_avg`), numbers by name.
struct OptimizerState {
  NamedTensors tensors;
  std::map<std::string, double> numbers;
};

/// The common base of all optimizers. Parameters are named; autocast's 16-bit copies of float32 parameters are
/// rewritten in the pass that updates them, so that the next forward pass casts nothing.
class HS_API Optimizer : public amp::OptimizerBase {
 public:
  ~Optimizer() override;

  /// Updates the parameters from their grad(); those without one are skipped.
  void step() { step_unless({}, {}); }
  /// Updates from the given gradients, one for each parameter in the order of named_parameters() (undefined: skipped),
  /// without touching grad().
  void step(const std::vector<Tensor>& gradients, const StepOptions& options = {});
  /// For optimizers that evaluate the loss themselves (LBFGS): `closure` zeroes gradients, computes the loss, calls
  /// backward and returns it. For the others the closure runs once, then a step.
  Tensor step(const std::function<Tensor()>& closure) { return step_closure(closure); }
  /// Drops the gradients, or with `set_to_none` false fills them with zeros.
  void zero_grad(bool set_to_none = true);

  /// Learning rate of a group (groups count from 0), and setting it for one or all.
  double lr(int group = 0) const;
  void set_lr(double lr);
  void set_lr(int group, double lr);
  /// The rate that schedules start from: the value of lr(group) when this was first called.
  double base_lr(int group = 0);
  /// Momentum (SGD) or first beta (Adam), for schedules that change it. Throws Error where there is none.
  virtual double momentum(int group = 0) const;
  virtual void set_momentum(int group, double value);
  int num_groups() const { return static_cast<int>(groups_.size()); }

  /// Everything a later run needs to resume bit-exactly. Where processes share the state (shard()) it is all of it, and
  /// throws Error unless it was brought here: dist::ZeroRedundancy::consolidate_state_dict().
  virtual OptimizerState state_dict() const;
  /// Restores a state: tensors are moved to the parameters' device, and options such as the learning rate replace those
  /// that the optimizer was created with. Throws Error, without changing anything, if the state belongs to other
  /// parameters.
  virtual void load_state_dict(const OptimizerState& state);
  /// Name of its kind, such as `SGD`.
  virtual std::string kind() const = 0;

  /// From now on the state is divided among processes: this one drops what it doesn't own, and keeps it that way.
  /// dist::ZeroRedundancy calls it. Throws Error where it is so already, for an optimizer whose step needs the whole
  /// state (LBFGS), and for LowPrecision::stochastic_rounding, which draws its numbers for all parameters as one
  /// sequence.
  void shard(std::shared_ptr<StateSharding> sharding);
  /// How the state is divided; null: it isn't.
  const std::shared_ptr<StateSharding>& sharding() const { return sharding_; }
  /// The state tensors of a parameter, by its place in named_parameters(), as far as they are on this process.
  NamedTensors state_of(std::size_t parameter) const;
  /// The numbers of state_dict(), and the steps of each group on this process.
  OptimizerState state_of_groups() const;
  /// Places in named_parameters() of a group's parameters.
  const std::vector<std::size_t>& group_parameters(int group) const {
    return groups_.at(static_cast<std::size_t>(group)).parameters;
  }

  // amp::OptimizerBase
  const NamedTensors& named_parameters() const override { return all_; }
  void step_unless(const Tensor& found_inf, const Tensor& scale) override;
  /// A derived class whose step inspects gradients before they get here returns false.
  /// Where gradients are everywhere but the state isn't, all of them are to be unscaled.
  bool unscales() const override { return !sharding_ || sharding_->gradients_too(); }
  bool shares_gradients() const override { return sharding_ && sharding_->gradients_too(); }
  void share(amp::GradientFindings& found) override;
  Tensor step_closure(const std::function<Tensor()>& closure) override;

 protected:
  /// State tensors of one parameter, in the order of state_names(); undefined until the parameter's first step.
  struct Slot {
    std::vector<Tensor> tensors;
    Tensor master;                 ///< float32 master weight
    std::uint64_t storage_id = 0;  ///< the parameter's storage when the master weight was rounded to it
    std::uint64_t contents = 0;    ///< and its contents (Storage::contents()) then
    Tensor compensation;           ///< for LowPrecision::kahan
  };
  struct Group {
    std::vector<std::size_t> parameters;  ///< places in all_
    double lr;
    std::optional<double> base_lr = {};  ///< see base_lr()
    Tensor steps;  ///< i64 [parameters of the group], on their device: steps made, counted by the kernel
  };

  explicit Optimizer(LowPrecision low_precision) : low_precision_(low_precision) {}
  /// Adds a group and returns its number. Throws Error when there are no parameters in it and none before, and for
  /// parameters that are undefined, no leaves, listed twice or not floating.
  int add_group(const NamedTensors& parameters, double lr);
  /// Names of the state tensors that a parameter needs with the options of `group`.
  virtual std::vector<std::string> state_names(int group) const = 0;
  /// The kernel's table, its name and its attributes for a group, which lie at one place until a group is added.
  virtual const KernelTable* kernel() const = 0;
  virtual const char* kernel_name() const = 0;
  virtual std::span<const std::byte> attributes(int group) = 0;
  /// Steps on all groups with these gradients (one for each parameter of all_).
  virtual void update(const std::vector<Tensor>& gradients, const Tensor& unless);
  /// Whether a step of a parameter needs the state of that parameter only, so that processes can share the work.
  virtual bool can_be_sharded() const { return true; }
  /// Numbers of the options that are saved and loaded, for one group.
  virtual std::map<std::string, double> numbers(int group) const = 0;
  virtual void load_numbers(int group, const std::map<std::string, double>& numbers) = 0;

  NamedTensors all_;
  std::vector<Slot> slots_;  ///< parallel to all_
  std::vector<Group> groups_;

 private:
  void update_groups(const std::vector<Tensor>& gradients, const Tensor& unless, const Tensor& scale);
  void update_group(int group, const std::vector<Tensor>& gradients, const Tensor& unless, const Tensor& scale);
  void prepare(Group& group, std::size_t parameter, std::size_t count);
  void follow(std::size_t parameter);
  void rounded(const std::vector<std::size_t>& parameters);

  LowPrecision low_precision_;
  std::shared_ptr<StateSharding> sharding_;
};

}  // namespace halfstep::optim
