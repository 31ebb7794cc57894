// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "halfstep/core/error.h"
#include "halfstep/core/tensor.h"

namespace halfstep::amp {

/// More overflows than the scale's policy allows (error_at_floor, overflow_limit).
class HS_API OverflowError : public AmpError {
 public:
  using AmpError::AmpError;
};

/// All parameters of a loss scale, for policies that no factory function of LossScalePolicy covers. The defaults are
/// PyTorch's.
struct LossScaleRules {
  double init_scale = 65536;         ///< first scale, above 0
  bool dynamic = true;               ///< false: the scale is constant, and nothing below applies
  double growth_factor = 2;          ///< above 1
  double backoff_factor = 0.5;       ///< between 0 and 1
  int growth_interval = 2000;        ///< good steps in a row before the scale grows
  double floor = 0;                  ///< the scale never falls below this, and never below 2^-126, where its inverse
                                     ///< is still a number; overflows there are logged
  double cap = 0;                    ///< the scale never grows above this; 0: the largest finite float
  int hysteresis = 1;                ///< the scale falls at this overflow since the hysteresis was last reset
  bool refill_on_good_step = false;  ///< any good step resets the hysteresis; false: only growth does
  bool late_growth = false;          ///< one additional good step is required at the start and after an overflow
  bool error_at_floor = false;       ///< an overflow that finds the scale at its floor is an OverflowError
  int overflow_limit = 0;            ///< more overflows in a row than this are an OverflowError; 0: no limit
};

/// Options of PyTorch's policy, see LossScalePolicy::torch.
struct TorchScale {
  double init_scale = 65536;    ///< first scale
  double growth_factor = 2;     ///< above 1
  double backoff_factor = 0.5;  ///< between 0 and 1
  int growth_interval = 2000;   ///< good steps in a row before it grows
};
/// Options of Apex's policy, see LossScalePolicy::apex.
struct ApexScale {
  double init_scale = 65536;       ///< first scale
  double scale_factor = 2;         ///< grows by it, falls by it
  int scale_window = 2000;         ///< good steps in a row before it grows
  double min_loss_scale = 0;       ///< floor; 0: none
  double max_loss_scale = 0x1p24;  ///< cap
};
/// Options of Keras's policy, see LossScalePolicy::keras.
struct KerasScale {
  double initial_scale = 32768;     ///< first scale
  int dynamic_growth_steps = 2000;  ///< good steps in a row before it doubles
};
/// Options of jmp's policy, see LossScalePolicy::jmp.
struct JmpScale {
  double loss_scale = 32768;  ///< first scale
  int period = 2000;          ///< good steps in a row before it grows
  double factor = 2;          ///< grows by it, falls by it
  double min_loss_scale = 1;  ///< floor
};
/// Options of DeepSpeed's policy, see LossScalePolicy::deepspeed.
struct DeepSpeedScale {
  double init_scale = 65536;             ///< first scale
  double scale_factor = 2;               ///< grows by it, falls by it
  int scale_window = 1000;               ///< good steps between growths
  double min_scale = 1;                  ///< floor
  int hysteresis = 2;                    ///< the scale falls with this overflow since the last growth
  bool consecutive_hysteresis = false;   ///< ... with this overflow in a row
  bool raise_error_at_min_scale = true;  ///< an overflow at the floor is an OverflowError
};
/// Options of Megatron's policy, see LossScalePolicy::megatron.
struct MegatronScale {
  double initial_scale = 0x1p32;  ///< first scale
  double min_scale = 1;           ///< floor
  double growth_factor = 2;       ///< above 1
  double backoff_factor = 0.5;    ///< between 0 and 1
  int growth_interval = 1000;     ///< good steps in a row before it grows
  int hysteresis = 2;             ///< the scale falls with this overflow since the last growth
};

/// How a loss scale reacts to overflows. It describes the rules of PyTorch, MindSpore, Apex, Keras, jmp, DeepSpeed and
/// Megatron; GradScaler, the loss scalers and the loss-scale managers all use it.
///
///     amp::GradScaler scaler{amp::LossScalePolicy::megatron({.hysteresis = 4})};
///
/// No policy lets the scale become infinite or 0: the scale neither grows beyond float32's range nor falls below
/// 2^-126.
class HS_API LossScalePolicy {
 public:
  /// Throws AmpError for invalid rules.
  explicit LossScalePolicy(const LossScaleRules& rules);

  /// A constant scale. Overflowing steps are still skipped.
  static LossScalePolicy fixed(double scale);
  /// torch.amp.GradScaler: grows after `growth_interval` good steps in a row, falls at every overflow.
  static LossScalePolicy torch(const TorchScale& options = {});
  /// MindSpore's DynamicLossScaler and DynamicLossScaleManager: grows by `scale_factor` after `scale_window` good steps
  /// in a row, falls by it at every overflow, but never below 1; `init_scale` must be at least 1 too.
  static LossScalePolicy mindspore(double init_scale = 0x1p24, double scale_factor = 2, int scale_window = 2000);
  /// Apex's LossScaler: PyTorch's with a cap of 2^24 and an optional floor.
  static LossScalePolicy apex(const ApexScale& options = {});
  /// Keras's LossScaleOptimizer: PyTorch's from 2^15 on.
  static LossScalePolicy keras(const KerasScale& options = {});
  /// jmp's DynamicLossScale: PyTorch's from 2^15 on, with a floor of 1.
  static LossScalePolicy jmp(const JmpScale& options = {});
  /// DeepSpeed's dynamic scale: the first overflows since the last growth are tolerated (`hysteresis`), good steps are
  /// counted from the one after an overflow, so that the first growth comes with good step `scale_window` + 1, and an
  /// overflow at the floor is an error.
  static LossScalePolicy deepspeed(const DeepSpeedScale& options = {});
  /// Megatron's DynamicGradScaler: as PyTorch's, but the first overflows since the last growth are tolerated
  /// (`hysteresis`), and the scale never falls below `min_scale`. Once the tolerance is used up, every overflow lowers
  /// the scale.
  static LossScalePolicy megatron(const MegatronScale& options = {});

  /// Its rules.
  const LossScaleRules& rules() const { return rules_; }

 private:
  LossScaleRules rules_;
};

/// A loss scale that follows a policy: the scale and all counters live on the device, where update() changes them
/// according to the overflows found. The host waits only when it reads a number.
class HS_API LossScale {
 public:
  explicit LossScale(const LossScalePolicy& policy);
  LossScale(LossScale&&) noexcept = default;
  LossScale& operator=(LossScale&&) noexcept = default;

  /// Its policy.
  const LossScalePolicy& policy() const { return policy_; }
  /// Switches to another policy: the scale and the counters stay.
  void set_policy(const LossScalePolicy& policy);

  /// Creates the tensors on `device`, if there are none yet. All scaled tensors must be on that device.
  void start(Device device);
  bool started() const { return scale_.defined(); }
  /// The scale, f32 []; undefined before start(). Its memory never changes, so it may be kept.
  const Tensor& tensor() const { return scale_; }
  /// Updates the scale. `found` are tensors of one element, f32 or bool, on the device: an overflow occurred if one of
  /// them is not 0. A fixed policy ignores them. Overflows at the floor, and many in a row, are logged, together with
  /// what `culprits` (may be empty) returns as overflowed. If the policy has limits (error_at_floor, overflow_limit),
  /// an overflow beyond them throws OverflowError. Both happen immediately on the CPU, and on other devices at the next
  /// read of a number. Throws AmpError before start(), or when a tensor doesn't fit.
  void update(const std::vector<Tensor>& found, std::function<std::string()> culprits = {});

  /// The scale now. Waits for the device. Throws OverflowError if overflows exceeded the policy's limits.
  double value() const;
  /// Sets the scale (above 0); the counters stay.
  void set(double scale);
  /// Good steps counted towards growth; -1 while a policy with late growth skips one. Waits for the device.
  int growth_tracker() const;
  /// Overflows since the last good step. Waits for the device.
  int overflows_in_a_row() const;

  /// `scale`, `_growth_tracker` (PyTorch's key) and, where the policy needs them, `hysteresis_used` and
  /// `overflows_in_a_row`.
  std::map<std::string, double> state_dict() const;
  /// Restores a state; `growth_tracker`, written by earlier versions, is accepted too. Throws AmpError, without
  /// changing anything, if `scale` or `_growth_tracker` is missing or a number is invalid.
  void load_state_dict(const std::map<std::string, double>& state);

 private:
  std::vector<int> counters() const;
  void look(const int* counters, float scale, const std::function<std::string()>& culprits) const;

  LossScalePolicy policy_;
  Tensor scale_;        // f32 []
  Tensor counters_;     // i32 [HALFSTEP_SCALE_COUNTERS]
  double first_scale_;  // until start()
  std::vector<int> first_counters_;
  mutable int next_logged_ = 1;            // number of overflows at the floor at which to log again
  mutable int next_row_;                   // the same for overflows in a row
  std::function<std::string()> culprits_;  // of the last update, if the device is not the CPU
};

}  // namespace halfstep::amp
