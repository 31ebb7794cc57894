// SPDX-License-Identifier: Apache-2.0
#include "halfstep/optim/clip.h"

#include <algorithm>
#include <cmath>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"

namespace halfstep::optim {
namespace {

// The gradients that there are, dense, with their parameters' names for messages.
std::vector<Tensor> gradients_of(const NamedTensors& parameters, const char* op) {
  std::vector<Tensor> result;
  for (const NamedTensor& p : parameters) {
    check_defined(p.tensor, op, "a parameter");
    Tensor g = p.tensor.grad();
    if (!g.defined()) continue;
    check_floating(g, op);
    if (!g.is_contiguous(MemoryFormat::preserve)) {
      g = g.contiguous();
      p.tensor.set_grad(g);
    }
    result.push_back(g);
  }
  return result;
}

std::vector<const Tensor*> pointers(const std::vector<Tensor>& tensors) {
  std::vector<const Tensor*> result;
  for (const Tensor& t : tensors) result.push_back(&t);
  return result;
}

Tensor norm_of(const std::vector<Tensor>& gradients, double norm_type, Device device) {
  if (!(norm_type > 0)) {
    fail<Error>("grad_norm: expected a norm type above 0, got {}", norm_type);
  }
  const bool wide = !gradients.empty() && std::all_of(gradients.begin(), gradients.end(),
                                                      [](const Tensor& g) { return g.dtype() == DType::f64; });
  Tensor norm = zeros({}, {.dtype = wide ? f64 : f32, .device = device});
  if (gradients.empty()) return norm;
  static const KernelTable& table = kernel_table("multi_norm");
  const auto in = pointers(gradients);
  const Tensor* out = &norm;
  const ClipAttributes attributes{.limit = 0, .norm_type = norm_type};
  run_kernel(table, "multi_norm", device, DType::f32, in, {&out, 1}, attributes);
  return norm;
}

void clip(const std::vector<Tensor>& gradients, const Tensor& norm, double limit) {
  if (gradients.empty()) return;
  static const KernelTable& table = kernel_table("multi_clip");
  std::vector<const Tensor*> in{&norm};
  const auto list = pointers(gradients);
  in.insert(in.end(), list.begin(), list.end());
  const ClipAttributes attributes{.limit = limit};
  run_kernel(table, "multi_clip", gradients[0].device(), DType::f32, in, list, attributes);
  for (const Tensor& g : gradients) g.storage()->bump_version();
}

}  // namespace

Tensor grad_norm(const NamedTensors& parameters, double norm_type) {
  const NoGrad no_grad;
  const auto gradients = gradients_of(parameters, "grad_norm");
  return norm_of(gradients, norm_type, gradients.empty() ? Device{} : gradients[0].device());
}

Tensor clip_grad_norm_(const NamedTensors& parameters, double max_norm, const ClipOptions& options) {
  if (!(max_norm >= 0)) fail<Error>("clip_grad_norm_: expected a norm of at least 0, got {}", max_norm);
  const NoGrad no_grad;
  const auto gradients = gradients_of(parameters, "clip_grad_norm_");
  const Device device = gradients.empty() ? Device{} : gradients[0].device();
  const Tensor norm = options.norm.defined() ? options.norm : norm_of(gradients, options.norm_type, device);
  if (norm.numel() != 1 || (norm.dtype() != DType::f32 && norm.dtype() != DType::f64)) {
    fail<Error>("clip_grad_norm_: expected the norm as f32 or f64 of one element, got {} {}", name(norm.dtype()),
                norm.sizes().str());
  }
  if (options.error_if_nonfinite && !std::isfinite(norm.item<double>())) {
    fail<Error>("clip_grad_norm_: the norm of the gradients is {}, so they can't be clipped", norm.item<double>());
  }
  clip(gradients, norm, max_norm);
  return norm;
}

void clip_grad_value_(const NamedTensors& parameters, double value) {
  if (!(value >= 0)) fail<Error>("clip_grad_value_: expected a value of at least 0, got {}", value);
  const NoGrad no_grad;
  clip(gradients_of(parameters, "clip_grad_value_"), Tensor(), value);
}

}  // namespace halfstep::optim
