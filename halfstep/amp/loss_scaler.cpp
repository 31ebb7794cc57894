// SPDX-License-Identifier: Apache-2.0
#include "halfstep/amp/loss_scaler.h"

#include <algorithm>

#include "halfstep/amp/unscale_internal.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/pointwise.h"

namespace halfstep::amp {
namespace {

constexpr int kMostOverflows = 1000;  // in a row: MindSpore's limit

const KernelTable& finite_kernels() {
  static const KernelTable& table = kernel_table("all_finite");
  return table;
}

// 8-bit floats are looked at as float32, the others as they are, but without gaps.
Tensor dense(const Tensor& t) {
  const bool narrow = t.dtype() == DType::f8e4m3 || t.dtype() == DType::f8e5m2;
  const Tensor wide = narrow ? cast(t, DType::f32) : t;
  return wide.is_contiguous(MemoryFormat::preserve) ? wide : wide.contiguous();
}

void check_at_least_one(const char* who, double scale) {
  if (!(scale >= 1)) fail<AmpError>("{}: expected a scale of at least 1, got {}", who, scale);
}

LossScalePolicy dynamic(const char* who, double scale, double factor, int window, int overflow_limit) {
  check_at_least_one(who, scale);
  if (!(factor > 1)) fail<AmpError>("{}: expected a scale factor above 1, got {}", who, factor);
  if (window < 1) fail<AmpError>("{}: expected a scale window of at least 1, got {}", who, window);
  LossScaleRules rules = LossScalePolicy::mindspore(scale, factor, window).rules();
  rules.overflow_limit = overflow_limit;
  return LossScalePolicy(rules);
}

LossScalePolicy fixed(const char* who, double scale) {
  check_at_least_one(who, scale);
  return LossScalePolicy::fixed(scale);
}

}  // namespace

Tensor all_finite(const std::vector<Tensor>& tensors) {
  const NoGrad no_grad;
  std::vector<Tensor> held;
  held.reserve(tensors.size());
  Device device;
  bool any = false;
  for (const Tensor& t : tensors) {
    if (!t.defined()) continue;
    if (any && t.device() != device) {
      fail<DeviceError>("all_finite: expected tensors on one device, got {} and {}", device.str(), t.device().str());
    }
    device = t.device();
    any = true;
    if (is_floating(t.dtype()) && t.numel() > 0) held.push_back(dense(t));
  }
  Tensor result = empty({}, {.dtype = boolean, .device = device});
  if (held.empty()) return result.fill_(true);
  std::vector<const Tensor*> in;
  for (const Tensor& t : held) in.push_back(&t);
  const Tensor* out[] = {&result};
  run_kernel(finite_kernels(), "all_finite", device, DType::f32, in, out);
  return result;
}

Tensor LossScaler::scale(const Tensor& tensor) {
  check_defined(tensor, "scale", "a tensor");
  check_floating(tensor, "scale");
  state_.start(tensor.device());
  return (is_low_precision(tensor.dtype()) ? cast(tensor, DType::f32) : tensor) * state_.tensor();
}

std::vector<Tensor> LossScaler::scale(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> result;
  result.reserve(tensors.size());
  for (const Tensor& t : tensors) result.push_back(t.defined() ? scale(t) : t);
  return result;
}

Tensor LossScaler::unscale(const Tensor& tensor) {
  check_defined(tensor, "unscale", "a tensor");
  return unscale(std::vector<Tensor>{tensor})[0];
}

std::vector<Tensor> LossScaler::unscale(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> held, result(tensors.size());
  held.reserve(tensors.size());
  bool recorded = false;
  for (const Tensor& t : tensors) {
    if (!t.defined()) continue;
    check_floating(t, "unscale");
    state_.start(t.device());
    recorded |= t.requires_grad() && GradMode::is_enabled();
    held.push_back(t.dtype() == DType::bf16 ? cast(t, DType::f32) : t);
  }
  if (held.empty()) return result;
  std::size_t at = 0;
  if (recorded) {
    const Tensor inverse = reciprocal(state_.tensor());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[i].defined()) continue;
      const Tensor& t = held[at++];
      result[i] = (t.dtype() == DType::f16 ? cast(t, DType::f32) : t) * inverse;
    }
    return result;
  }
  const NoGrad no_grad;
  const Device device = held[0].device();
  const TensorOptions options{.dtype = f32, .device = device};
  const Tensor found = zeros({}, options), each = zeros({static_cast<std::int64_t>(held.size())}, options), norm;
  std::vector<const Tensor*> in{&state_.tensor()}, out{&found, &each, &norm};
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) continue;
    Tensor& t = held[at++];
    t = dense(t);
    result[i] = empty_like(t, accumulate_dtype(t.dtype()));
    in.push_back(&t);
    out.push_back(&result[i]);
  }
  run_kernel(detail::unscale_kernels(), "amp_unscale", device, DType::f32, in, out);
  return result;
}

bool LossScaler::adjust(const Tensor& finite) {
  check_defined(finite, "adjust", "whether the gradients were finite");
  if (finite.dtype() != DType::boolean || finite.numel() != 1) {
    fail<AmpError>("adjust: expected a bool tensor of one element, as all_finite() gives, got {} {}",
                   name(finite.dtype()), finite.sizes().str());
  }
  if (!state_.policy().rules().dynamic) return false;
  const NoGrad no_grad;
  state_.start(finite.device());
  state_.update({logical_not(finite)});
  return true;
}

StaticLossScaler::StaticLossScaler(double scale_value) : LossScaler(fixed("StaticLossScaler", scale_value)) {}

DynamicLossScaler::DynamicLossScaler(double scale_value, double scale_factor, int scale_window)
    : LossScaler(dynamic("DynamicLossScaler", scale_value, scale_factor, scale_window, 0)) {}

LossScaleManager::LossScaleManager(const LossScalePolicy& policy, bool drop_overflow_update)
    : policy_(policy), drop_overflow_update_(drop_overflow_update) {}

FixedLossScaleManager::FixedLossScaleManager(double loss_scale, bool drop_overflow_update)
    : LossScaleManager(fixed("FixedLossScaleManager", loss_scale), drop_overflow_update) {}

DynamicLossScaleManager::DynamicLossScaleManager(double init_loss_scale, double scale_factor, int scale_window)
    : LossScaleManager(
          dynamic("DynamicLossScaleManager", init_loss_scale, scale_factor, scale_window, kMostOverflows)) {}

}  // namespace halfstep::amp
