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

bool has_kernel(const Op& op, Device device, DType dtype) {
  return device.is_host() || backend_for(device, op.name).kernel(*op.table, dtype);
}

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

// The same for a gradient that is the sum of the first input and a seventh one.
const Op& batch_norm_act_backward_of_sum_op = []() -> const Op& {
  Op op = batch_norm_act_backward_op;
  op.name = "batch_norm_act_backward_of_sum";
  op.signature =
      "batch_norm_act_backward_of_sum(gradient, input, weight, mean, rstd, output, more, training, activation)";
  return define_op(op);
}();

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
    case Activation::silu:  // has an op of its own
      break;
  }
  return masked_fill(g, logical_or(le(y, 0), ge(y, 6)), 0);
}

// Asks batch_norm_act_backward's and batch_norm_silu_backward's for the gradients that are needed.
BatchNormAttributes wanted(GradContext& c) {
  BatchNormAttributes a = c.attributes<BatchNormAttributes>();
  a.want_weight = c.needs(1);
  a.want_bias = c.needs(2);
  a.dtype = dtype_code(c.grad_dtype(0));
  return a;
}

// Whether the two gradients that came in are added up by the kernel: where it writes their sum anyway, as the
// residual's.
bool added_by_kernel(GradContext& c, const BatchNormAttributes& a) {
  const Tensor &g = c.grad(0), &x = c.input(0), &y = c.output(0);
  return c.more().defined() && a.training && a.want_residual && g.dtype() == x.dtype() && y.dtype() == x.dtype() &&
         a.dtype == dtype_code(x.dtype()) && g.strides() == x.strides() && y.strides() == x.strides() &&
         (x.is_contiguous() || x.is_contiguous(MemoryFormat::channels_last)) &&
         has_kernel(batch_norm_act_backward_of_sum_op, x.device(), x.dtype());
}

void gradient(GradContext& c) {
  if (!c.grad(0).defined()) return;
  const auto whole = [&] { return c.more().defined() ? c.grad(0) + c.more() : c.grad(0); };
  if (c.create_graph || observed_in_parts() || !c.needs(0)) {
    const Tensor g = before_activation(whole(), c.output(0).detach(), activation_of(c));
    if (c.needs(kResidual)) c.set(kResidual, g);
    return detail::batch_norm_gradient(c, g);
  }
  BatchNormAttributes a = wanted(c);
  // Without an activation the residual's gradient is what comes in.
  a.want_residual = c.needs(kResidual) && activation_of(c) != Activation::none;
  const bool two = added_by_kernel(c, a);
  const Tensor g = two ? c.grad(0) : whole();
  const auto d = two ? call_n<4>(batch_norm_act_backward_of_sum_op,
                                 {&g, &c.input(0), &c.input(1), &c.output(1), &c.output(2), &c.output(0), &c.more()}, a)
                     : call_n<4>(batch_norm_act_backward_op,
                                 {&g, &c.input(0), &c.input(1), &c.output(1), &c.output(2), &c.output(0)}, a);
  c.set(0, d[0]);
  if (a.want_weight) c.set(1, d[1]);
  if (a.want_bias) c.set(2, d[2]);
  if (c.needs(kResidual)) c.set(kResidual, a.want_residual ? d[3] : g);
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
    .adds_gradients = true,
});

// --- silu

// Inputs: g, x, weight, bias, mean, rstd. Outputs: gradients of input, weight and bias.
const Op& batch_norm_silu_backward_op = define_op({
    .name = "batch_norm_silu_backward",
    .signature = "batch_norm_silu_backward(gradient, input, weight, bias, mean, rstd, training)",
    .infer =
        [](InferContext& ctx) {
          detail::infer_batch_norm_backward(ctx);
          detail::cast_parameters(ctx, 2, 3, ctx.input(1).dtype());
        },
    .attributes = &attribute_struct<BatchNormAttributes>(),
    .key = 1,
    .backward = true,
});

// batch_norm with the statistics of a call before, whose 1 / deviations are given.
Tensor normalised_again(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& mean,
                        const Tensor& rstd) {
  return batch_norm(x, {.weight = weight,
                        .bias = bias,
                        .running_mean = mean,
                        .running_var = pow(rstd, -2),
                        .training = false,
                        .eps = 0});
}

void silu_gradient(GradContext& c) {
  if (!c.grad(0).defined()) return;
  const Tensor &x = c.input(0), &weight = c.input(1), &bias = c.input(2);
  const BatchNormAttributes a = wanted(c);
  if (c.create_graph || observed_in_parts() || !c.needs(0)) {
    // A recorded pass goes through the batch's statistics too.
    const Tensor z = a.training && c.create_graph
                         ? batch_norm(x, {.weight = weight, .bias = bias, .training = true, .eps = a.eps})
                         : normalised_again(x, weight, bias, c.output(1).detach(), c.output(2).detach());
    return detail::batch_norm_gradient(c, detail::silu_gradient(c.grad(0), z, c.create_graph));
  }
  const auto d =
      call_n<3>(batch_norm_silu_backward_op, {&c.grad(0), &x, &weight, &bias, &c.output(1), &c.output(2)}, a);
  c.set(0, d[0]);
  if (a.want_weight) c.set(1, d[1]);
  if (a.want_bias) c.set(2, d[2]);
}

// Inputs: x, weight, bias, running mean, running variance. The bias's gradient reads silu's input, too.
const Op& batch_norm_silu_op = define_op({
    .name = "batch_norm_silu",
    .signature = "batch_norm_silu(input, weight=none, bias=none, running_mean=none, running_var=none, training=false, "
                 "momentum=0.1, eps=1e-5)",
    .infer = detail::infer_batch_norm,
    .grad = silu_gradient,
    .saves = {in(0, 1, 2) | out(1, 2), in(0, 1, 2) | out(1, 2), in(0, 1, 2) | out(1, 2)},
    .attributes = &attribute_struct<BatchNormAttributes>(),
    .state_inputs = in(3, 4),
});

// A device without the fused kernels may well have those of the single ops.
bool fused_on(Device device, DType dtype, Activation activation) {
  const bool silu = activation == Activation::silu;
  return has_kernel(silu ? batch_norm_silu_op : batch_norm_act_op, device, dtype) &&
         has_kernel(silu ? batch_norm_silu_backward_op : batch_norm_act_backward_op, device, dtype);
}

}  // namespace

const char* name(Activation activation) {
  constexpr const char* kNames[] = {"none", "relu", "relu6", "silu"};
  return kNames[static_cast<int>(activation)];
}

Tensor activate(const Tensor& input, Activation activation) {
  switch (activation) {
    case Activation::none:
      return input;
    case Activation::relu:
      return relu(input);
    case Activation::silu:
      return silu(input);
    case Activation::relu6:
      break;
  }
  return relu6(input);
}

std::array<Tensor, 4> detail::batch_norm_act_gradients(const Tensor& g, const BatchNormActSaved& saved,
                                                       Activation activation) {
  const auto& [input, weight, mean, rstd, y, bias, added, residual] = saved;
  const bool silu = activation == Activation::silu, more = residual || activation != Activation::none;
  const bool fused = silu ? !residual && g.dtype() == input.dtype() : more && y.dtype() == input.dtype();
  if (!fused || observed_in_parts() || !fused_on(input.device(), input.dtype(), activation)) {
    Tensor before;
    if (silu) {
      const Tensor z = normalised_again(input, weight, bias, mean, rstd);
      before = silu_gradient(g, residual ? z + added : z, false);
    } else {
      before = before_activation(g, y, activation);
    }
    const auto d = batch_norm_gradients(before.to(input.dtype()), input, weight, mean, rstd);
    return {d[0], d[1], d[2], residual ? before : Tensor()};
  }
  BatchNormAttributes a;
  a.training = false;
  a.want_input = a.want_weight = a.want_bias = true;
  a.dtype = dtype_code(input.dtype());
  if (silu) {
    const auto d = call_n<3>(batch_norm_silu_backward_op, {&g, &input, &weight, &bias, &mean, &rstd}, a);
    return {d[0], d[1], d[2], Tensor()};
  }
  a.activation = static_cast<std::int32_t>(activation);
  // Without an activation the residual's gradient is what comes in.
  a.want_residual = residual && activation != Activation::none;
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
  const bool silu = activation == Activation::silu;
  if (!more || !alike || (silu && residual.defined()) || observed_in_parts() ||
      !fused_on(input.device(), input.dtype(), activation)) {
    const Tensor normalised = batch_norm(input, norm);
    return activate(residual.defined() ? normalised + residual : normalised, activation);
  }
  if (silu) {
    const auto result = call_n<4>(
        batch_norm_silu_op, {&input, &call.weight, &call.bias, &call.running_mean, &call.running_var}, call.attributes);
    detail::update_running_statistics(norm, call.attributes, result[1], result[3]);
    return result[0];
  }
  call.attributes.activation = static_cast<std::int32_t>(activation);
  const auto result =
      call_n<4>(batch_norm_act_op, {&input, &call.weight, &call.bias, &call.running_mean, &call.running_var, &residual},
                call.attributes);
  detail::update_running_statistics(norm, call.attributes, result[1], result[3]);
  return result[0];
}

}  // namespace halfstep
