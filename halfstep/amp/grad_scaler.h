// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "halfstep/amp/loss_scale.h"
#include "halfstep/autograd/parameter.h"
#include "halfstep/core/tensor.h"

namespace halfstep::amp {

/// Misuse of a GradScaler, by its kind.
class HS_API ScalerError : public AmpError {
 public:
  enum class Kind {
    not_started,        ///< no scale() before
    called_twice,       ///< unscale_() or step() a second time for an optimizer since the last update()
    called_after_step,  ///< unscale_() after step()
    no_gradients,       ///< step() of an optimizer none of whose parameters has a gradient
    shared_gradient,    ///< a gradient that another optimizer unscaled already
    nothing_to_update,  ///< update() without a step() or unscale_() that found gradients
    bad_state,          ///< load_state_dict() of a state that doesn't fit
  };
  ScalerError(Kind kind, const std::string& what) : AmpError(what), kind_(kind) {}
  Kind kind() const { return kind_; }

 private:
  Kind kind_;
};

/// What a pass over an optimizer's gradients found.
struct GradientFindings {
  Tensor found;          ///< f32 []: not 0 if a gradient wasn't finite
  Tensor per_parameter;  ///< f32 [gradients]: the same for each
  Tensor norm;           ///< f32 [] of the unscaled gradients; undefined if it wasn't asked for
  std::shared_ptr<const std::vector<std::string>> names;  ///< of the parameters that have the gradients
};

/// What a scaler requires of an optimizer; optim::Optimizer implements it.
class HS_API OptimizerBase {
 public:
  OptimizerBase();
  /// A copy is a different optimizer; moving preserves identity.
  OptimizerBase(const OptimizerBase&) : OptimizerBase() {}
  OptimizerBase(OptimizerBase&& other) noexcept : OptimizerBase() { std::swap(serial_, other.serial_); }
  OptimizerBase& operator=(const OptimizerBase&);
  OptimizerBase& operator=(OptimizerBase&& other) noexcept;
  virtual ~OptimizerBase() = default;
  /// A number that is unique among all optimizers of this run; unlike addresses, it is never reused.
  std::uint64_t serial() const { return serial_; }
  /// All parameters of all groups, with their names.
  virtual const NamedTensors& named_parameters() const = 0;
  /// Updates the parameters from their grad(), but leaves them and all state unchanged if `found_inf` (f32, one
  /// element, on the parameters' device; undefined for none) is not 0. The device decides; the host doesn't wait.
  ///
  /// `scale` is undefined, or (only if unscales() is true) f32, one element, by which the gradients are still
  /// multiplied. Then each grad() is divided by it in the same pass, even if the step is skipped; f16 gradients become
  /// f32.
  virtual void step_unless(const Tensor& found_inf, const Tensor& scale) = 0;
  /// Whether step_unless() takes a scale. For optimizers that don't, a GradScaler unscales in a separate pass.
  virtual bool unscales() const { return false; }
  /// Whether other processes may have gradients of named_parameters() that this one lacks (dist::ZeroRedundancy).
  virtual bool shares_gradients() const { return false; }
  /// What this process found in its gradients becomes what all of them found, and the norm (if it is defined) that of
  /// all gradients: called, by all, where shares_gradients() is true, so that all skip a step or none does.
  virtual void share(GradientFindings& found) { (void)found; }
  /// One step of an optimizer that evaluates the loss itself. Others throw Error.
  virtual Tensor step_closure(const std::function<Tensor()>& closure) = 0;

 private:
  std::uint64_t serial_;
};

/// Options of GradScaler; the defaults are PyTorch's. For other update rules, construct a GradScaler from a
/// LossScalePolicy instead.
struct GradScalerOptions {
  double init_scale = 65536;    ///< first scale, above 0
  double growth_factor = 2;     ///< above 1
  double backoff_factor = 0.5;  ///< between 0 and 1
  int growth_interval = 2000;   ///< steps in a row without overflow before the scale grows
  bool enabled = true;          ///< false: losses, gradients and steps pass through unchanged
  bool dynamic = true;          ///< false: the scale stays, overflowing steps are still skipped
  double floor = 0;             ///< the scale never falls below this (0: 2^-126); reaching it is logged
  double cap = 0;               ///< the scale never grows above this; 0: the largest finite float
};

/// The result of a step. Reading it waits for the device. Scaler, clipping, optimizers, averages and the training loop
/// don't read it; optim::Schedule::step(result), which counts the steps that ran, does.
class HS_API StepResult {
 public:
  StepResult() = default;
  /// Whether the parameters were updated.
  bool ran() const;
  /// Name of the first parameter whose gradient was not finite; empty when the step ran.
  std::string first_overflow() const;
  /// All such names.
  std::vector<std::string> overflows() const;
  /// For a step with a closure: the (unscaled) loss of its first evaluation, also when the step was skipped; undefined
  /// otherwise.
  const Tensor& loss() const { return loss_; }
  /// On the device, f32 of one element: not 0 when the step was skipped. Undefined when nothing was checked.
  const Tensor& found_inf() const { return found_; }
  /// On the device, f32 [gradients]: not 0 for each gradient that wasn't finite; undefined when nothing was checked.
  const Tensor& overflow_flags() const { return per_parameter_; }
  /// Names of the parameters of overflow_flags(), in their order; null when nothing was checked.
  const std::shared_ptr<const std::vector<std::string>>& gradient_names() const { return names_; }

 private:
  friend class GradScaler;
  Tensor found_;
  Tensor per_parameter_;
  std::shared_ptr<const std::vector<std::string>> names_;
  Tensor loss_;
};

/// Options of GradScaler::unscale_.
struct UnscaleOptions {
  bool norm = false;  ///< also the 2-norm of all unscaled gradients, from the same pass
};

/// Scales losses so that small gradients survive 16 bits, unscales gradients before the optimizer sees them, skips
/// steps whose gradients overflowed, and adapts the scale. PyTorch's torch.amp.GradScaler: same state machine, same
/// defaults. Scale, growth count and overflow flags live on the device and are computed in float32, whatever the dtype
/// of the gradients.
///
///     scaler.scale(loss).backward();
///     auto step = scaler.step(optimizer);
///     scaler.update();
class HS_API GradScaler {
 public:
  /// Throws AmpError for invalid factors and scales. A disabled scaler doesn't validate them.
  explicit GradScaler(const GradScalerOptions& options = {});
  /// With a scale that follows `policy`: MindSpore's, Megatron's, a fixed one...
  explicit GradScaler(const LossScalePolicy& policy);
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;

  /// loss * scale, in float32 (f64 for f64), so that a 16-bit loss doesn't overflow. Recorded.
  Tensor scale(const Tensor& loss);
  std::vector<Tensor> scale(const std::vector<Tensor>& losses);
  /// Divides the gradients of the optimizer's parameters by the scale, in one pass that also detects non-finite ones.
  /// Call it to clip before step(), which otherwise calls it itself. f16 gradients become f32 ones, since an unscaled
  /// value may not fit f16. Returns the norm if requested, else undefined. If no parameter has a gradient it does
  /// nothing (the norm is 0), and step() reports it. Throws ScalerError when called twice before update() or after
  /// step().
  Tensor unscale_(OptimizerBase& optimizer, const UnscaleOptions& options = {});
  /// The optimizer's step, unless a gradient isn't finite. Throws ScalerError when called twice before update(), or
  /// when there are no gradients.
  StepResult step(OptimizerBase& optimizer);
  /// For optimizers that evaluate the loss several times (LBFGS): `closure` zeroes gradients, computes the loss, calls
  /// backward on scale(loss) and returns the unscaled loss. If an evaluation overflows, the parameters are restored and
  /// the step counts as skipped.
  StepResult step(OptimizerBase& optimizer, const std::function<Tensor()>& closure);
  /// Updates the scale from the overflows found by the steps since the last update. Throws ScalerError if there were
  /// none, and on the CPU OverflowError if overflows exceeded the policy's limits.
  void update();
  /// Sets the scale instead (above 0); the growth count stays.
  void update(double new_scale);

  /// The scale now (1 when disabled). Waits for the device. Throws OverflowError if overflows exceeded the policy's
  /// limits.
  double get_scale() const;
  /// The scale as a tensor on the device; undefined before the first scale() and when disabled.
  Tensor scale_tensor() const;
  /// Of an optimizer whose gradients were unscaled since the last update(), on the device, f32 of one element: not 0
  /// where one isn't finite. step() reads it; undefined otherwise.
  Tensor found_inf(const OptimizerBase& optimizer) const;
  /// Steps without overflow since the scale last changed. Waits for the device.
  int growth_tracker() const;
  bool is_enabled() const;
  /// Its options; for a policy, the part that options can express.
  const GradScalerOptions& options() const;
  /// The scale's policy, including changes by set_growth_factor() and similar functions.
  const LossScalePolicy& policy() const;
  void set_growth_factor(double value);
  void set_backoff_factor(double value);
  void set_growth_interval(int value);

  /// PyTorch's keys `scale`, `growth_factor`, `backoff_factor`, `growth_interval` and `_growth_tracker`, and the
  /// policy's further counters (see LossScale::state_dict); empty when disabled. Call it after update().
  std::map<std::string, double> state_dict() const;
  /// Throws ScalerError for an empty or incomplete state, AmpError for one with invalid numbers. A disabled scaler
  /// ignores it.
  void load_state_dict(const std::map<std::string, double>& state);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace halfstep::amp
