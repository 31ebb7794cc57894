// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "halfstep/amp/loss_scale.h"
#include "halfstep/core/tensor.h"

namespace halfstep::amp {

/// Whether no value of any tensor is an infinity or NaN: bool [], on the tensors' device. One kernel launch; the host
/// doesn't wait. Undefined tensors are skipped and integers are finite; without any tensors it is true, on the CPU.
/// MindSpore's all_finite. Throws DeviceError if the tensors are on several devices.
HS_API Tensor all_finite(const std::vector<Tensor>& tensors);

/// Scales losses and unscales gradients in a training step written as a function, like MindSpore's LossScaler:
///
///     amp::DynamicLossScaler scaler{1024, 2, 50};
///     const auto forward = [&](const Tensor& x, const Tensor& y) {
///       const Tensor logits = net(x);
///       return std::pair(scaler.scale(cross_entropy(logits, y)), logits);
///     };
///     const auto step = value_and_grad(forward, net.parameters());
///     auto [value, gradients] = step(x, y);
///     const Tensor finite = amp::all_finite(gradients);
///     optimizer.step(scaler.unscale(gradients), {.unless = logical_not(finite)});
///     scaler.adjust(finite);
///
/// Everything is computed in float32 (float64 for f64), and 16-bit tensors are returned as f32, so that neither the
/// scaled value overflows nor the reciprocal of the scale underflows. (MindSpore's computes in the tensor's dtype: f16
/// times 2^16 is infinite there, and f16 divided by 2^25 is 0.) The scale lives on the device of the first tensor, and
/// only value() makes the host wait.
class HS_API LossScaler {
 public:
  virtual ~LossScaler() = default;
  LossScaler(const LossScaler&) = delete;
  LossScaler& operator=(const LossScaler&) = delete;

  /// tensor * scale. Recorded. Throws DTypeError for a tensor that is not f32, f64, f16 or bf16.
  Tensor scale(const Tensor& tensor);
  /// Each of them; undefined ones stay undefined.
  std::vector<Tensor> scale(const std::vector<Tensor>& tensors);
  /// tensor / scale, computed as PyTorch's: times the reciprocal, rounded to float32. Recorded where the tensor
  /// requires grad. A non-finite value stays non-finite.
  Tensor unscale(const Tensor& tensor);
  /// Each of them, in one kernel launch if none requires grad; undefined ones stay undefined.
  std::vector<Tensor> unscale(const std::vector<Tensor>& tensors);
  /// Updates the scale: `finite`, bool of one element on the scale's device, tells whether all gradients were finite.
  /// Returns whether the scale is dynamic: false for a static one.
  bool adjust(const Tensor& finite);

  /// The scale as a tensor, f32 []; undefined before the first tensor.
  const Tensor& scale_tensor() const { return state_.tensor(); }
  /// The scale now. Waits for the device.
  double scale_value() const { return state_.value(); }
  /// Its policy, its counters, and its state for checkpoints.
  LossScale& state() { return state_; }
  const LossScale& state() const { return state_; }

 protected:
  explicit LossScaler(const LossScalePolicy& policy) : state_(policy) {}

 private:
  LossScale state_;
};

/// A constant scale. MindSpore's StaticLossScaler.
class HS_API StaticLossScaler : public LossScaler {
 public:
  /// Throws AmpError for a scale below 1.
  explicit StaticLossScaler(double scale_value);
};

/// A scale that grows by `scale_factor` after `scale_window` finite steps in a row, and falls by it, but never below 1,
/// at every step that isn't finite. MindSpore's DynamicLossScaler.
class HS_API DynamicLossScaler : public LossScaler {
 public:
  /// Throws AmpError for a scale below 1, a factor that is not above 1 or a window below 1.
  DynamicLossScaler(double scale_value, double scale_factor, int scale_window);
  /// Finite steps counted towards growth. Waits for the device.
  int counter() const { return state().growth_tracker(); }
};

/// The loss-scaling configuration for training::Model and build_train_network(): the scale's policy, and whether steps
/// that overflow are dropped. A value type; any policy converts to it.
class HS_API LossScaleManager {
 public:
  /// With `drop_overflow_update` false gradients are not checked: every step runs, and the scale is constant.
  LossScaleManager(const LossScalePolicy& policy, bool drop_overflow_update = true);
  /// The scale's policy.
  const LossScalePolicy& policy() const { return policy_; }
  /// Whether steps whose gradients aren't finite are dropped.
  bool drop_overflow_update() const { return drop_overflow_update_; }

 private:
  LossScalePolicy policy_;
  bool drop_overflow_update_;
};

/// One scale for the whole training. MindSpore's FixedLossScaleManager, but the optimizer needs no loss scale when
/// overflows are not dropped: gradients are always unscaled.
class HS_API FixedLossScaleManager : public LossScaleManager {
 public:
  /// Throws AmpError for a scale below 1.
  explicit FixedLossScaleManager(double loss_scale = 128, bool drop_overflow_update = true);
};

/// A scale that follows DynamicLossScaler's rules. MindSpore's DynamicLossScaleManager. More than 1000 overflows in a
/// row are an AmpError: thrown in the step on the CPU, elsewhere when the scale is next read.
class HS_API DynamicLossScaleManager : public LossScaleManager {
 public:
  /// Throws AmpError for a scale below 1, a factor that is not above 1 or a window below 1.
  explicit DynamicLossScaleManager(double init_loss_scale = 0x1p24, double scale_factor = 2, int scale_window = 2000);
};

}  // namespace halfstep::amp
