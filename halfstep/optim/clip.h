// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/autograd/parameter.h"

namespace halfstep::optim {

/// Options of clip_grad_norm_.
struct ClipOptions {
  double norm_type = 2;  ///< exponent above 0, or infinity for the largest absolute value
  Tensor norm = {};      ///< the norm, if it is already known (GradScaler::unscale_ returns it from its own pass)
  bool error_if_nonfinite = false;  ///< throw Error when the norm isn't finite (reads the device)
};

/// The norm of all gradients of the parameters together, as if they were one vector: f32 [] (f64 when all are f64).
/// Sums are taken in float64. Zero without gradients.
HS_API Tensor grad_norm(const NamedTensors& parameters, double norm_type = 2);
/// Scales the gradients in place so that their norm is at most `max_norm`, and returns the original norm. PyTorch's
/// clip_grad_norm_: the factor is max_norm / (norm + 1e-6), at most 1. Under a scaler, call GradScaler::unscale_ first.
HS_API Tensor clip_grad_norm_(const NamedTensors& parameters, double max_norm, const ClipOptions& options = {});
/// Clamps every element of the gradients to [-value, value] in place.
HS_API void clip_grad_value_(const NamedTensors& parameters, double value);

}  // namespace halfstep::optim
