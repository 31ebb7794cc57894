// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "halfstep/amp/loss_scale.h"
#include "halfstep/core/tensor.h"

namespace halfstep::amp {

/// Whether no value of any tensor is an infinity or NaN: bool [], on the tensors' device. One launch, and the host
/// doesn't wait. Undefined tensors are passed over, integers are finite; of no tensors at all it is true, on the CPU.
/// MindSpore's all_finite. Throws DeviceError when the tensors are on several devices.
HS_API Tensor all_finite(const std::vector<Tensor>& tensors);

/// Scales losses and unscales gradients in a training step written as a function, as MindSpore's LossScaler:
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
/// All arithmetic is float32 (float64 for f64): what comes in 16 bits goes out as f32, so that neither the scaled value
/// overflows nor the reciprocal of the scale underflows. (MindSpore's computes in the tensor's dtype: f16 times 2^16 is
/// infinite there, and f16 divided by 2^25 is 0.) The scale lives on the device of the first tensor that comes, and
/// nothing here makes the host wait but value().
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
  /// requires grad. A value that isn't finite stays so.
  Tensor unscale(const Tensor& tensor);
  /// Each of them, in one launch where none requires grad; undefined ones stay undefined.
  std::vector<Tensor> unscale(const std::vector<Tensor>& tensors);
  /// Moves the scale: `finite`, bool of one element on the scale's device, says whether the gradients were all finite.
  /// Returns whether the scale can move at all: false for a static one.
  bool adjust(const Tensor& finite);

  /// The scale as a tensor, f32 []; undefined before the first tensor came.
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

/// A scale that stays. MindSpore's StaticLossScaler.
class HS_API StaticLossScaler : public LossScaler {
 public:
  /// Throws AmpError for a scale below 1.
  explicit StaticLossScaler(double scale_value);
};

/// A scale that grows by `scale_factor` after `scale_window` finite steps in a row, and falls by it, but never below 1,
/// at every one that isn't. MindSpore's DynamicLossScaler.
class HS_API DynamicLossScaler : public LossScaler {
 public:
  /// Throws AmpError for a scale below 1, a factor that is not above 1 or a window below 1.
  DynamicLossScaler(double scale_value, double scale_factor, int scale_window);
  /// Finite steps counted towards growth. Waits for the device.
  int counter() const { return state().growth_tracker(); }
};

/// What training::Model and build_train_network() are told about loss scaling: how the scale moves, and whether steps
/// that overflow are dropped. A value; a policy of any kind becomes one.
class HS_API LossScaleManager {
 public:
  /// With `drop_overflow_update` false gradients are not looked at: every step is made, and the scale stays.
  LossScaleManager(const LossScalePolicy& policy, bool drop_overflow_update = true);
  /// How the scale moves.
  const LossScalePolicy& policy() const { return policy_; }
  /// Whether steps whose gradients aren't finite are dropped.
  bool drop_overflow_update() const { return drop_overflow_update_; }

 private:
  LossScalePolicy policy_;
  bool drop_overflow_update_;
};

/// One scale for the whole training. MindSpore's FixedLossScaleManager, but the optimizer need not be told of the scale
/// when overflows are not dropped: gradients are always unscaled.
class HS_API FixedLossScaleManager : public LossScaleManager {
 public:
  /// Throws AmpError for a scale below 1.
  explicit FixedLossScaleManager(double loss_scale = 128, bool drop_overflow_update = true);
};

/// A scale that moves as DynamicLossScaler's. MindSpore's DynamicLossScaleManager. More than 1000 overflows in a row
/// are an AmpError: thrown in the step on the CPU, elsewhere when the scale is next read.
class HS_API DynamicLossScaleManager : public LossScaleManager {
 public:
  /// Throws AmpError for a scale below 1, a factor that is not above 1 or a window below 1.
  explicit DynamicLossScaleManager(double init_loss_scale = 0x1p24, double scale_factor = 2, int scale_window = 2000);
};

}  // namespace halfstep::amp
