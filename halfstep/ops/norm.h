// SPDX-License-Identifier: Apache-2.0
// Normalisation. Mean and variance are computed in float32 (float64 for float64) regardless of the storage dtype, in
// two passes, so that no precision is lost if the mean is large; the result is rounded once to the input's dtype.
// Affine parameters of a 16-bit input may be float32.
#pragma once

#include "halfstep/core/tensor.h"

namespace halfstep {

/// Options of layer_norm and group_norm.
struct NormOptions {
  Tensor weight = {};  ///< factors; none: 1
  Tensor bias = {};    ///< added last; none: 0
  double eps = 1e-5;   ///< added to the variance
};
/// (x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions, which are `normalized_shape`; weight and
/// bias have that shape. Throws ShapeError when the input doesn't end in it.
HS_API Tensor layer_norm(const Tensor& input, const Shape& normalized_shape, const NormOptions& options = {});

/// Options of rms_norm.
struct RmsNormOptions {
  Tensor weight = {};  ///< factors; none: 1
  /// Added to the mean square; by default the epsilon of the dtype that is computed in (f32 for 16 bits), as in
  /// PyTorch.
  std::optional<double> eps = {};
};
/// x / sqrt(mean(x^2) + eps) * weight over the last dimensions.
HS_API Tensor rms_norm(const Tensor& input, const Shape& normalized_shape, const RmsNormOptions& options = {});

/// layer_norm of each group of channels of each sample: `input` is [N, C, ...], C is split into `num_groups`, weight
/// and bias are [C]. Channels-last stays channels-last.
HS_API Tensor group_norm(const Tensor& input, std::int64_t num_groups, const NormOptions& options = {});

/// Options of batch_norm.
struct BatchNormFuncOptions {
  Tensor weight = {};        ///< factors, [C]; none: 1
  Tensor bias = {};          ///< added last, [C]; none: 0
  Tensor running_mean = {};  ///< [C], f32 (f64); updated in place when training
  Tensor running_var = {};   ///< [C], with the unbiased variance
  bool training = false;     ///< the batch's statistics are used; else the running ones
  double momentum = 0.1;     ///< weight of the batch in the running statistics; 1 / (batches so far) for a plain mean
  double eps = 1e-5;
};
/// (x - mean) / sqrt(variance + eps) * weight + bias for each channel of [N, C, ...] in any layout (channels-last stays
/// so). Running statistics may be left out when training. Throws ShapeError for parameters that don't fit, or if there
/// is only one value per channel in training.
HS_API Tensor batch_norm(const Tensor& input, const BatchNormFuncOptions& options = {});

}  // namespace halfstep
