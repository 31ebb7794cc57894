// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/norm.h"

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"
#include "halfstep/nn/given_internal.h"
#include "halfstep/nn/no_samples_internal.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/norm.h"

namespace halfstep::nn {
namespace {

template <class O>
O checked(const O& o, const char* kind) {
  check_given(o.normalized_shape, kind, "normalized_shape", ".normalized_shape = {64}");
  return o;
}

// Of what stands in for no samples: the batch's statistics are left alone, and a channel of one value has none.
BatchNormFuncOptions without_statistics(BatchNormFuncOptions o, const Tensor& input) {
  if (input.numel() >= 2 * input.size(1)) {
    o.running_mean = o.running_var = Tensor();
    return o;
  }
  o.training = false;
  if (!o.running_mean.defined()) {
    const TensorOptions there{.dtype = accumulate_dtype(input.dtype()), .device = input.device()};
    o.running_mean = zeros({input.size(1)}, there);
    o.running_var = ones({input.size(1)}, there);
  }
  return o;
}

}  // namespace

bool& detail::NoSamples::flag() {
  thread_local bool on = false;
  return on;
}

LayerNorm::LayerNorm(const LayerNormOptions& o)
    : options(checked(o, "LayerNorm")),
      weight(parameter("weight", o.affine ? ones(o.normalized_shape, {.dtype = o.dtype}) : Tensor())),
      bias(parameter("bias", o.affine && o.bias ? zeros(o.normalized_shape, {.dtype = o.dtype}) : Tensor())) {}
Tensor LayerNorm::forward(const Tensor& input) const {
  return layer_norm(input, options.normalized_shape, {.weight = weight, .bias = bias, .eps = options.eps});
}
std::string LayerNorm::describe() const { return options.normalized_shape.str(); }

RMSNorm::RMSNorm(const RMSNormOptions& o)
    : options(checked(o, "RMSNorm")),
      weight(parameter("weight", o.affine ? ones(o.normalized_shape, {.dtype = o.dtype}) : Tensor())) {}
Tensor RMSNorm::forward(const Tensor& input) const {
  return rms_norm(input, options.normalized_shape, {.weight = weight, .eps = options.eps});
}
std::string RMSNorm::describe() const { return options.normalized_shape.str(); }

GroupNorm::GroupNorm(const GroupNormOptions& o)
    : options(o),
      weight(parameter("weight",
                       [&] {
                         check_given(o.groups, "GroupNorm", "groups", ".groups = 8, .channels = 64");
                         check_given(o.channels, "GroupNorm", "channels", ".groups = 8, .channels = 64");
                         if (o.groups < 1 || o.channels < 0 || o.channels % o.groups != 0) {
                           fail<Error>("GroupNorm: expected channels to be a multiple of groups, got {} and {}",
                                       o.channels, o.groups);
                         }
                         return o.affine ? ones({o.channels}, {.dtype = o.dtype}) : Tensor();
                       }())),
      bias(parameter("bias", o.affine ? zeros({o.channels}, {.dtype = o.dtype}) : Tensor())) {}
Tensor GroupNorm::forward(const Tensor& input) const {
  return group_norm(input, options.groups, {.weight = weight, .bias = bias, .eps = options.eps});
}
std::string GroupNorm::describe() const { return fmt::format("{}, {}", options.groups, options.channels); }

BatchNormBase::BatchNormBase(const BatchNormOptions& o)
    : options(o),
      weight(parameter("weight",
                       [&] {
                         check_given(o.channels, "BatchNorm", "channels", ".channels = 64");
                         if (o.channels < 0) fail<Error>("BatchNorm: expected at least 0 channels, got {}", o.channels);
                         return o.affine ? ones({o.channels}, {.dtype = o.dtype}) : Tensor();
                       }())),
      bias(parameter("bias", o.affine ? zeros({o.channels}, {.dtype = o.dtype}) : Tensor())),
      running_mean(buffer("running_mean", o.track_running_stats ? zeros({o.channels}, {.dtype = o.dtype}) : Tensor())),
      running_var(buffer("running_var", o.track_running_stats ? ones({o.channels}, {.dtype = o.dtype}) : Tensor())),
      num_batches_tracked(buffer("num_batches_tracked", o.track_running_stats ? zeros({}, {.dtype = i64}) : Tensor())) {
}

Tensor BatchNormBase::normalise(const Tensor& input, int fewest, int most, Activation activation,
                                const Tensor& residual) const {
  if (input.dim() < fewest || input.dim() > most || input.size(1) != options.channels) {
    fail<ShapeError>("{}: expected {}, got {}", kind(),
                     most == 4 ? fmt::format("[N, {}, H, W]", options.channels)
                               : fmt::format("[N, {0}] or [N, {0}, L]", options.channels),
                     input.sizes().str());
  }
  if (folded_) {
    if (is_training()) {
      fail<Error>(
          "{}: it was folded into the convolution before it and can't be trained; call eval(), or train the "
          "network that it was folded from",
          kind());
    }
    return activate(residual.defined() ? input + residual : input, activation);
  }
  const bool batch = is_training() || !options.track_running_stats;
  const bool stands_in = is_training() && detail::NoSamples::active();
  double momentum = options.momentum.value_or(0);
  if (is_training() && num_batches_tracked.defined() && (!stands_in || training_->function)) {
    const NoGrad no_grad;
    Tensor count = num_batches_tracked;
    count.add_(1);
    // Without a momentum all batches weigh the same: the host has to know how many there were.
    if (!options.momentum) momentum = count.device().is_meta() ? 1 : 1 / count.item<double>();
  }
  const BatchNormFuncOptions given{.weight = weight,
                                   .bias = bias,
                                   .running_mean = running_mean,
                                   .running_var = running_var,
                                   .training = batch,
                                   .momentum = momentum,
                                   .eps = options.eps};
  if (is_training() && training_->function) return training_->function(input, given, activation, residual);
  return batch_norm_act(input, stands_in ? without_statistics(given, input) : given, activation, residual);
}

void BatchNormBase::set_training_function(BatchNormFunction function, std::string what) const {
  ++capture_generation();
  *training_ = {std::move(function), std::move(what)};
}

void BatchNormBase::unshare() {
  ModuleBase::unshare();
  training_ = std::make_shared<Training>(*training_);
}

void BatchNormBase::set_folded() {
  weight = bias = running_mean = running_var = num_batches_tracked = Tensor();
  folded_ = true;
}

std::string BatchNormBase::describe() const {
  if (folded_) return fmt::format("{}, folded", options.channels);
  return training_->what.empty() ? fmt::format("{}", options.channels)
                                 : fmt::format("{}, {}", options.channels, training_->what);
}

}  // namespace halfstep::nn
