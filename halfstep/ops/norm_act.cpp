// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/norm_act.h"

#include "halfstep/core/fail.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/norm_internal.h"
#include "halfstep/ops/observer.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/runtime/device_backend.h"

namespace halfstep {
namespace {

constexpr int kResidual = 5;

// Inputs: g, x, weight, mean, rstd, y. Outputs: gradients of input, weight, bias and residual.
const Op& batch_norm_act_backward_op = define_op({
    .name = "batch_norm_act_backward",
    .signature = "batch_norm_act_backward(gradient, input, weight, mean, rstd, output, training, activation)",
    .infer =
        [](InferContext& ctx) {
          detail::infer_batch_norm_backward(ctx);
          const Tensor &g = ctx.input(0), &x = ctx.input(1);
          if (ctx.attributes<BatchNormAttributes>().want_residual) {
            ctx.output(x.sizes(), strides_like(x.sizes(), x.strides()), g.dtype());
          } else {
            ctx.output({0}, g.dtype());
          }
        },
    .attributes = &attribute_struct<BatchNormAttributes>(),
    .key = 1,
    .backward = true,
});

Activation activation_of(GradContext& c) {
  return static_cast<Activation>(c.attributes<BatchNormAttributes>().activation);
}

// The gradient of what the activation got, of recorded ops. The result is a step function of the input there.
Tensor before_activation(const Tensor& g, const Tensor& y, Activation activation) {
  switch (activation) {
    case Activation::none:
      return g;
    case Activation::relu:
      return masked_fill(g, le(y, 0), 0);
    case Activation::relu6:
      break;
  }
  return masked_fill(g, logical_or(le(y, 0), ge(y, 6)), 0);
}

void gradient(GradContext& c) {
  if (!c.grad(0).defined()) return;
  if (c.create_graph || observed_in_parts() || !c.needs(0)) {
    const Tensor g = before_activation(c.grad(0), c.output(0).detach(), activation_of(c));
    if (c.needs(kResidual)) c.set(kResidual, g);
    return detail::batch_norm_gradient(c, g);
  }
  BatchNormAttributes a = c.attributes<BatchNormAttributes>();
  a.want_weight = c.needs(1);
  a.want_bias = c.needs(2);
  // Without an activation the residual's gradient is what comes in.
  a.want_residual = c.needs(kResidual) && activation_of(c) != Activation::none;
  a.dtype = dtype_code(c.grad_dtype(0));
  const auto d = call_n<4>(batch_norm_act_backward_op,
                           {&c.grad(0), &c.input(0), &c.input(1), &c.output(1), &c.output(2), &c.output(0)}, a);
  c.set(0, d[0]);
  if (a.want_weight) c.set(1, d[1]);
  if (a.want_bias) c.set(2, d[2]);
  if (c.needs(kResidual)) c.set(kResidual, a.want_residual ? d[3] : c.grad(0));
}

// Inputs: x, weight, bias, running mean, running variance, residual.
const Op& batch_norm_act_op = define_op({
    .name = "batch_norm_act",
    .signature = "batch_norm_act(input, weight=none, bias=none, running_mean=none, running_var=none, residual=none, "
                 "activation=relu, training=false, momentum=0.1, eps=1e-5)",
    .infer = detail::infer_batch_norm,
    .grad = gradient,
    .saves = {in(0, 1) | out(0, 1, 2), in(0, 1) | out(0, 1, 2), out(0), 0, 0, out(0)},
    .attributes = &attribute_struct<BatchNormAttributes>(),
    .state_inputs = in(3, 4),
});

// A device without the fused kernels may well have those of the single ops.
bool fused_on(Device device, DType dtype) {
  if (device.is_cpu()) return true;
  DeviceBackend& backend = backend_for(device, batch_norm_act_op.name);
  return backend.kernel(*batch_norm_act_op.table, dtype) && backend.kernel(*batch_norm_act_backward_op.table, dtype);
}

Tensor activate(const Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::none:
      return x;
    case Activation::relu:
      return relu(x);
    case Activation::relu6:
      break;
  }
  return relu6(x);
}

}  // namespace

const char* name(Activation activation) {
  constexpr const char* kNames[] = {"none", "relu", "relu6"};
  return kNames[static_cast<int>(activation)];
}

std::array<Tensor, 4> detail::batch_norm_act_gradients(const Tensor& g, const Tensor& input, const Tensor& weight,
                                                       const Tensor& mean, const Tensor& rstd, const Tensor& y,
                                                       Activation activation, bool residual) {
  const bool more = residual || activation != Activation::none;
  if (!more || y.dtype() != input.dtype() || observed_in_parts() || !fused_on(input.device(), input.dtype())) {
    const Tensor before = before_activation(g, y, activation);
    const auto d = batch_norm_gradients(before.to(input.dtype()), input, weight, mean, rstd);
    return {d[0], d[1], d[2], residual ? before : Tensor()};
  }
  BatchNormAttributes a;
  a.training = false;
  a.activation = static_cast<std::int32_t>(activation);
  a.want_input = a.want_weight = a.want_bias = true;
  // Without an activation the residual's gradient is what comes in.
  a.want_residual = residual && activation != Activation::none;
  a.dtype = dtype_code(input.dtype());
  auto d = call_n<4>(batch_norm_act_backward_op, {&g, &input, &weight, &mean, &rstd, &y}, a);
  if (!a.want_residual) d[3] = residual ? g : Tensor();
  return d;
}

Tensor batch_norm_act(const Tensor& input, const BatchNormFuncOptions& norm, Activation activation,
                      const Tensor& residual) {
  detail::BatchNormCall call = detail::check_batch_norm(input, norm, "batch_norm_act");
  if (residual.defined()) {
    check_floating(residual, "batch_norm_act");
    if (residual.sizes() != input.sizes()) {
      fail<ShapeError>("batch_norm_act: expected a residual {}, as the input, got {}", input.sizes().str(),
                       residual.sizes().str());
    }
  }
  const bool alike = !residual.defined() || residual.dtype() == input.dtype();
  const bool more = residual.defined() || activation != Activation::none;
  if (!more || !alike || observed_in_parts() || !fused_on(input.device(), input.dtype())) {
    const Tensor normalised = batch_norm(input, norm);
    return activate(residual.defined() ? normalised + residual : normalised, activation);
  }
  call.attributes.activation = static_cast<std::int32_t>(activation);
  const auto result =
      call_n<4>(batch_norm_act_op, {&input, &call.weight, &call.bias, &call.running_mean, &call.running_var, &residual},
                call.attributes);
  detail::update_running_statistics(norm, call.attributes, result[1], result[3]);
  return result[0];
}

}  // namespace halfstep
