// SPDX-License-Identifier: Apache-2.0
// The normalisations of ops/norm.h as modules. Weights start at 1 and biases at 0. Under autocast inputs may be 16-bit
// while parameters and statistics stay float32.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "halfstep/nn/module.h"
#include "halfstep/ops/norm_act.h"

namespace halfstep::nn {

/// Options of LayerNorm.
struct LayerNormOptions {
  Shape normalized_shape = {};  ///< the last sizes of the input
  double eps = 1e-5;
  bool affine = true;  ///< whether there are weight and bias
  bool bias = true;
  DType dtype = f32;
};
/// halfstep::layer_norm with parameters `weight` and `bias` of the normalised shape.
class HS_API LayerNorm : public Module<LayerNorm> {
 public:
  explicit LayerNorm(const LayerNormOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "LayerNorm"; }
  std::string describe() const override;
  LayerNormOptions options;
  Parameter weight;
  Parameter bias;
};

/// Options of RMSNorm.
struct RMSNormOptions {
  Shape normalized_shape = {};     ///< the last sizes of the input
  std::optional<double> eps = {};  ///< by default as rms_norm's
  bool affine = true;
  DType dtype = f32;
};
/// halfstep::rms_norm with a parameter `weight` of the normalised shape.
class HS_API RMSNorm : public Module<RMSNorm> {
 public:
  explicit RMSNorm(const RMSNormOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "RMSNorm"; }
  std::string describe() const override;
  RMSNormOptions options;
  Parameter weight;
};

/// Options of GroupNorm.
struct GroupNormOptions {
  std::int64_t groups = kNotGiven;
  std::int64_t channels = kNotGiven;  ///< a multiple of groups
  double eps = 1e-5;
  bool affine = true;
  DType dtype = f32;
};
/// halfstep::group_norm with parameters `weight` and `bias` [channels].
class HS_API GroupNorm : public Module<GroupNorm> {
 public:
  explicit GroupNorm(const GroupNormOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "GroupNorm"; }
  std::string describe() const override;
  GroupNormOptions options;
  Parameter weight;
  Parameter bias;
};

/// Options of BatchNorm1d and BatchNorm2d.
struct BatchNormOptions {
  std::int64_t channels = kNotGiven;
  double eps = 1e-5;
  std::optional<double> momentum = 0.1;  ///< weight of the batch in the running statistics; none: a plain mean of all
  bool affine = true;
  bool track_running_stats = true;  ///< false: the batch's statistics in evaluation too
  DType dtype = f32;
};
/// What normalises a batch: the arguments of halfstep::batch_norm_act.
using BatchNormFunction = std::function<Tensor(const Tensor& input, const BatchNormFuncOptions& options,
                                               Activation activation, const Tensor& residual)>;

/// The common base of BatchNorm1d and BatchNorm2d: parameters `weight` and `bias`, buffers `running_mean`,
/// `running_var` and `num_batches_tracked` (i64), as PyTorch names them.
class HS_API BatchNormBase : public ModuleBase {
 public:
  std::string describe() const override;
  /// Whether fold_batch_norms() (nn/fold.h) has moved it into the convolution before it. It is then the activation and
  /// the sum that follow it, has no tensors of its own and throws Error in training.
  bool is_folded() const { return folded_; }
  /// Takes its tensors away; for fold_batch_norms().
  void set_folded();
  /// Has batches in training normalised by `function` instead of halfstep::batch_norm_act, in all handles of the
  /// module; an empty one takes that back. describe() shows `what`.
  void set_training_function(BatchNormFunction function, std::string what = {}) const;
  void unshare() override;
  BatchNormOptions options;
  Parameter weight;
  Parameter bias;
  Buffer running_mean;
  Buffer running_var;
  Buffer num_batches_tracked;

 protected:
  explicit BatchNormBase(const BatchNormOptions& options);
  /// batch_norm_act of the module's parameters, for inputs of `fewest` to `most` dimensions.
  Tensor normalise(const Tensor& input, int fewest, int most, Activation activation, const Tensor& residual) const;

 private:
  struct Training {
    BatchNormFunction function;
    std::string what;
  };
  std::shared_ptr<Training> training_ = std::make_shared<Training>();
  bool folded_ = false;
};
/// halfstep::batch_norm for inputs [N, C] and [N, C, L].
class HS_API BatchNorm1d : public Module<BatchNorm1d, BatchNormBase> {
 public:
  explicit BatchNorm1d(const BatchNormOptions& o) : Module(o) {}
  Tensor forward(const Tensor& input) const { return forward(input, Activation::none); }
  /// activation(batch_norm(input) + residual) in one pass: halfstep::batch_norm_act.
  Tensor forward(const Tensor& input, Activation activation, const Tensor& residual = {}) const {
    return normalise(input, 2, 3, activation, residual);
  }
  std::string kind() const override { return "BatchNorm1d"; }
};
/// halfstep::batch_norm for images [N, C, H, W] in any layout.
class HS_API BatchNorm2d : public Module<BatchNorm2d, BatchNormBase> {
 public:
  explicit BatchNorm2d(const BatchNormOptions& o) : Module(o) {}
  Tensor forward(const Tensor& input) const { return forward(input, Activation::none); }
  /// activation(batch_norm(input) + residual) in one pass: halfstep::batch_norm_act.
  Tensor forward(const Tensor& input, Activation activation, const Tensor& residual = {}) const {
    return normalise(input, 4, 4, activation, residual);
  }
  std::string kind() const override { return "BatchNorm2d"; }
};

}  // namespace halfstep::nn
