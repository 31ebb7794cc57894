// SPDX-License-Identifier: Apache-2.0
// batch_norm; norm_act.cpp has the op that does what follows it too.
#include "halfstep/core/fail.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/norm_internal.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/recomputing.h"
#include "halfstep/ops/reduce.h"

namespace halfstep {
namespace {

Shape per_channel(const Shape& sizes) {
  Shape s = Shape::filled(sizes.size(), 1);
  s[1] = sizes[1];
  return s;
}
Shape all_but_channels(const Shape& sizes) {
  Shape dims{0};
  for (int i = 2; i < sizes.size(); ++i) dims.push_back(i);
  return dims;
}

// Inputs: g, x, weight, mean, rstd.
const Op& batch_norm_backward_op = define_op({
    .name = "batch_norm_backward",
    .signature = "batch_norm_backward(gradient, input, weight, mean, rstd, training)",
    .infer = detail::infer_batch_norm_backward,
    .attributes = &attribute_struct<BatchNormAttributes>(),
    .key = 1,
    .backward = true,
});

// Inputs: x, weight, bias, running mean, running variance.
const Op& batch_norm_op = define_op({
    .name = "batch_norm",
    .signature = "batch_norm(input, weight=none, bias=none, running_mean=none, running_var=none, training=false, "
                 "momentum=0.1, eps=1e-5)",
    .infer = detail::infer_batch_norm,
    .grad =
        [](GradContext& c) {
          if (c.grad(0).defined()) detail::batch_norm_gradient(c, c.grad(0));
        },
    .saves = {in(0, 1) | out(1, 2), in(0, 1) | out(1, 2), 0},
    .attributes = &attribute_struct<BatchNormAttributes>(),
    .state_inputs = in(3, 4),
});

// Of recorded ops, for second derivatives.
void composed_gradient(GradContext& c, const Tensor& gradient) {
  const auto& a = c.attributes<BatchNormAttributes>();
  const Shape& sizes = c.input_sizes(0);
  const Shape shape = per_channel(sizes), dims = all_but_channels(sizes);
  const DType inner = accumulate_dtype(c.input_dtype(0));
  const Tensor g = gradient.to(inner);
  if (c.needs(2)) c.set(2, sum(g, dims));
  if (!c.needs(0) && !c.needs(1)) return;
  const Tensor x = c.input(0).to(inner);
  Tensor difference, rstd;
  if (a.training) {
    difference = x - mean(x, dims, {.keepdim = true});
    rstd = rsqrt(mean(difference * difference, dims, {.keepdim = true}) + a.eps);
  } else {
    difference = x - c.output(1).detach().reshape(shape);
    rstd = c.output(2).detach().reshape(shape);
  }
  const Tensor z = difference * rstd;
  if (c.needs(1)) c.set(1, sum(g * z, dims));
  if (!c.needs(0)) return;
  const Tensor h = c.input(1).defined() ? g * c.input(1).to(inner).reshape(shape) : g;
  Tensor d = h;
  if (a.training) d = h - mean(h, dims, {.keepdim = true}) - z * mean(h * z, dims, {.keepdim = true});
  c.set(0, rstd * d);
}

}  // namespace

namespace detail {

void cast_parameters(InferContext& ctx, int first, int last, DType input) {
  const DType wanted = accumulate_dtype(input);
  std::uint64_t mask = 0;
  for (int i = first; i <= last; ++i) {
    if (ctx.has(i) && ctx.input(i).dtype() != wanted) mask |= std::uint64_t{1} << i;
  }
  if (mask != 0) ctx.cast(wanted, mask);
}

void check_parameter(const Tensor& p, const Shape& sizes, const char* op, const char* what) {
  if (!p.defined()) return;
  check_floating(p, op);
  if (p.sizes() != sizes) fail<ShapeError>("{}: expected a {} {}, got {}", op, what, sizes.str(), p.sizes().str());
}

BatchNormCall check_batch_norm(const Tensor& input, const BatchNormFuncOptions& options, const char* op) {
  check_defined(input, op, "an input");
  check_floating(input, op);
  const Shape& sizes = input.sizes();
  if (sizes.size() < 2) fail<ShapeError>("{}: expected an input [N, C, ...], got {}", op, sizes.str());
  const Shape channels{sizes[1]};
  check_parameter(options.weight, channels, op, "weight");
  check_parameter(options.bias, channels, op, "bias");
  check_parameter(options.running_mean, channels, op, "running_mean");
  check_parameter(options.running_var, channels, op, "running_var");
  const bool both = options.running_mean.defined() && options.running_var.defined();
  if (both != (options.running_mean.defined() || options.running_var.defined())) {
    fail<Error>("{}: expected both running_mean and running_var or neither", op);
  }
  if (!options.training && !both) fail<Error>("{}: expected running statistics when not training", op);
  if (options.training && both &&
      (is_low_precision(options.running_mean.dtype()) || options.running_var.dtype() != options.running_mean.dtype())) {
    fail<DTypeError>("{}: expected running statistics of f32 or f64 alike, got {} and {}", op,
                     name(options.running_mean.dtype()), name(options.running_var.dtype()));
  }
  BatchNormCall call;
  BatchNormAttributes& a = call.attributes;
  a.eps = options.eps;
  a.momentum = options.momentum;
  a.training = options.training;
  a.count = sizes[1] == 0 ? 0 : static_cast<double>(input.numel() / sizes[1]);
  if (options.training && a.count < 2) {
    fail<ShapeError>("{}: expected more than one value a channel when training, got {}", op, sizes.str());
  }
  call.weight = dense(options.weight);
  call.bias = dense(options.bias);
  if (!options.training) {
    call.running_mean = dense(options.running_mean);
    call.running_var = dense(options.running_var);
  }
  return call;
}

void update_running_statistics(const BatchNormFuncOptions& options, const BatchNormAttributes& attributes,
                               const Tensor& mean, const Tensor& var) {
  if (!options.training || !options.running_mean.defined() || recomputing()) return;
  static const KernelTable& table = kernel_table("batch_norm_update");
  const Tensor* batch[] = {&mean, &var};
  const Tensor* running[] = {&options.running_mean, &options.running_var};
  run_kernel(table, "batch_norm", mean.device(), options.running_mean.dtype(), batch, running, attributes);
  for (const Tensor* t : running) t->storage()->bump_version();
}

void infer_batch_norm(InferContext& ctx) {
  const Tensor& x = ctx.input(0);
  ctx.output(x.sizes(), strides_like(x.sizes(), x.strides()), x.dtype());
  for (int i = 0; i < 3; ++i) ctx.output({x.size(1)}, accumulate_dtype(x.dtype()));
  cast_parameters(ctx, 1, 4, x.dtype());
}

void infer_batch_norm_backward(InferContext& ctx) {
  const auto& a = ctx.attributes<BatchNormAttributes>();
  const Tensor& x = ctx.input(1);
  const DType inner = accumulate_dtype(x.dtype());
  if (a.want_input) {
    ctx.output(x.sizes(), strides_like(x.sizes(), x.strides()), dtype_or(a.dtype, x.dtype()));
  } else {
    ctx.output({0}, inner);
  }
  ctx.output({a.want_weight ? x.size(1) : 0}, inner);
  ctx.output({a.want_bias ? x.size(1) : 0}, inner);
  cast_parameters(ctx, 2, 2, x.dtype());
}

void batch_norm_gradient(GradContext& c, const Tensor& g) {
  if (c.create_graph || (!c.needs(0) && !c.needs(1))) return composed_gradient(c, g);
  BatchNormAttributes a = c.attributes<BatchNormAttributes>();
  a.want_input = c.needs(0);
  a.want_weight = c.needs(1);
  a.want_bias = c.needs(2);
  a.dtype = dtype_code(c.grad_dtype(0));
  const auto d = call_n<3>(batch_norm_backward_op, {&g, &c.input(0), &c.input(1), &c.output(1), &c.output(2)}, a);
  if (a.want_input) c.set(0, d[0]);
  if (a.want_weight) c.set(1, d[1]);
  if (a.want_bias) c.set(2, d[2]);
}

std::array<Tensor, 3> batch_norm_gradients(const Tensor& g, const Tensor& input, const Tensor& weight,
                                           const Tensor& mean, const Tensor& rstd) {
  BatchNormAttributes a;
  a.training = false;
  a.want_input = a.want_weight = a.want_bias = true;
  a.dtype = dtype_code(input.dtype());
  return call_n<3>(batch_norm_backward_op, {&g, &input, &weight, &mean, &rstd}, a);
}

}  // namespace detail

Tensor batch_norm(const Tensor& input, const BatchNormFuncOptions& options) {
  const detail::BatchNormCall call = detail::check_batch_norm(input, options, "batch_norm");
  const auto result = call_n<4>(
      batch_norm_op, {&input, &call.weight, &call.bias, &call.running_mean, &call.running_var}, call.attributes);
  detail::update_running_statistics(options, call.attributes, result[1], result[3]);
  return result[0];
}

}  // namespace halfstep
