// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/norm.h"

#include "halfstep/core/fail.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/norm_internal.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/reduce.h"

namespace halfstep {
namespace {

using detail::cast_parameters;
using detail::check_parameter;
using detail::dense;

// Inputs: x, weight, bias. Outputs: y; mean and 1 / deviation of each row.
void infer_row_norm(InferContext& ctx) {
  const Tensor& x = ctx.input(0);
  const std::int64_t rows = ctx.attributes<RowNormAttributes>().rows;
  ctx.output(x.sizes(), strides_like(x.sizes(), x.strides()), x.dtype());
  for (int i = 0; i < 2; ++i) ctx.output({rows}, accumulate_dtype(x.dtype()));
  cast_parameters(ctx, 1, 2, x.dtype());
}

// Inputs: g, x, weight, mean, rstd. Outputs: gradients of input, weight and bias, empty where not asked for.
const Op& norm_backward_op = define_op({
    .name = "norm_backward",
    .signature = "norm_backward(gradient, input, weight, mean, rstd)",
    .infer =
        [](InferContext& ctx) {
          const auto& a = ctx.attributes<RowNormAttributes>();
          const Tensor& x = ctx.input(1);
          const DType inner = accumulate_dtype(x.dtype());
          const std::int64_t places = a.rows == 0 ? 0 : x.numel() / a.rows / a.inner * a.groups;
          if (a.want_input) {
            ctx.output(x.sizes(), strides_like(x.sizes(), x.strides()), dtype_or(a.dtype, x.dtype()));
          } else {
            ctx.output({0}, dtype_or(a.dtype, x.dtype()));
          }
          ctx.output({a.want_weight ? places : 0}, inner);
          ctx.output({a.want_bias ? places : 0}, inner);
          cast_parameters(ctx, 2, 2, x.dtype());
        },
    .attributes = &attribute_struct<RowNormAttributes>(),
    .key = 1,
    .backward = true,
});

// Of recorded ops, for second derivatives.
void composed_row_norm(GradContext& c, bool group) {
  const auto& a = c.attributes<RowNormAttributes>();
  const Shape& sizes = c.input_sizes(0);
  const DType inner = accumulate_dtype(c.input_dtype(0));
  const Tensor& g = c.grad(0);
  const auto shaped = [&](const Tensor& p) {
    if (!group) return p;
    Shape s = Shape::filled(sizes.size() - 1, 1);
    s[0] = p.numel();
    return p.reshape(s);
  };
  const auto to_parameter = [&](const Tensor& t, int i) {
    Shape s = c.input_sizes(i);
    if (group) {
      s = Shape::filled(sizes.size() - 1, 1);
      s[0] = c.input_sizes(i).numel();
    }
    return sum_to(t, s).reshape(c.input_sizes(i));
  };
  if (c.needs(2)) c.set(2, to_parameter(g, 2));
  if (!c.needs(0) && !c.needs(1)) return;
  const Shape rows{a.rows, -1};
  const Tensor x = c.input(0).to(inner).reshape(rows);
  const double eps = a.eps >= 0 ? a.eps : finfo(inner).eps;
  const Tensor difference = a.rms ? x : x - mean(x, {1}, {.keepdim = true});
  const Tensor rstd = rsqrt(mean(difference * difference, {1}, {.keepdim = true}) + eps);
  const Tensor z = difference * rstd;
  if (c.needs(1)) c.set(1, to_parameter(g * z.reshape(sizes), 1));
  if (c.needs(0)) {
    const Tensor h = (c.input(1).defined() ? g * shaped(c.input(1)) : g).to(inner).reshape(rows);
    Tensor d = h - z * mean(h * z, {1}, {.keepdim = true});
    if (!a.rms) d = d - mean(h, {1}, {.keepdim = true});
    c.set(0, (rstd * d).reshape(sizes));
  }
}

void row_norm_gradient(GradContext& c, bool group) {
  if (!c.grad(0).defined()) return;
  if (c.grad(0).numel() == 0) {
    // No row or no width: sums of nothing.
    for (int i = 0; i < 3; ++i) {
      if (c.needs(i)) c.set(i, zeros(c.input_sizes(i), {.dtype = c.grad_dtype(i), .device = c.device(i)}));
    }
    return;
  }
  if (c.create_graph || (!c.needs(0) && !c.needs(1))) return composed_row_norm(c, group);
  RowNormAttributes a = c.attributes<RowNormAttributes>();
  a.want_input = c.needs(0);
  a.want_weight = c.needs(1);
  a.want_bias = c.needs(2);
  a.dtype = dtype_code(c.grad_dtype(0));
  const Tensor g = c.input(0).is_contiguous() ? c.grad(0).contiguous() : c.grad(0);
  const auto d = call_n<3>(norm_backward_op, {&g, &c.input(0), &c.input(1), &c.output(1), &c.output(2)}, a);
  if (a.want_input) c.set(0, d[0]);
  if (a.want_weight) c.set(1, d[1].reshape(c.input_sizes(1)));
  if (a.want_bias) c.set(2, d[2].reshape(c.input_sizes(2)));
}

Op row_norm_declaration(const char* name, const char* signature, GradFn grad) {
  return {.name = name,
          .signature = signature,
          .infer = infer_row_norm,
          .grad = grad,
          .saves = {in(0, 1) | out(1, 2), in(0, 1) | out(1, 2), 0},
          .attributes = &attribute_struct<RowNormAttributes>()};
}
const Op& layer_norm_op = define_op(
    row_norm_declaration("layer_norm", "layer_norm(input, normalized_shape, weight=none, bias=none, eps=1e-5)",
                         [](GradContext& c) { row_norm_gradient(c, false); }));
const Op& rms_norm_op =
    define_op(row_norm_declaration("rms_norm", "rms_norm(input, normalized_shape, weight=none, eps=none)",
                                   [](GradContext& c) { row_norm_gradient(c, false); }));
const Op& group_norm_op =
    define_op(row_norm_declaration("group_norm", "group_norm(input, num_groups, weight=none, bias=none, eps=1e-5)",
                                   [](GradContext& c) { row_norm_gradient(c, true); }));

Tensor call_row_norm(const Op& op, const Tensor& input, const Tensor& weight, const Tensor& bias,
                     const RowNormAttributes& a) {
  const Tensor x = &op == &group_norm_op ? detail::group_norm_input(input) : input.contiguous();
  const Tensor w = dense(weight), b = dense(bias);
  return call_n<3>(op, {&x, &w, &b}, a)[0];
}

RowNormAttributes last_dims(const Tensor& input, const Shape& shape, const char* op) {
  check_defined(input, op, "an input");
  check_floating(input, op);
  const int extra = input.dim() - shape.size();
  bool fits = extra >= 0 && !shape.empty();
  std::int64_t rows = 1;
  for (int i = 0; fits && i < input.dim(); ++i) {
    if (i < extra) {
      rows *= input.sizes()[i];
    } else {
      fits = input.sizes()[i] == shape[i - extra];
    }
  }
  if (!fits) {
    fail<ShapeError>("{}: expected an input that ends in {}, got {}", op, shape.str(), input.sizes().str());
  }
  return {.rows = rows};
}

}  // namespace

Tensor detail::group_norm_input(const Tensor& x) {
  const bool together = x.dim() > 2 && x.numel() > 0 && x.size(1) > 1 && x.strides()[1] == 1 &&
                        strides_like(x.sizes(), x.strides()) == x.strides();
  return together ? x : x.contiguous();
}

Tensor layer_norm(const Tensor& input, const Shape& normalized_shape, const NormOptions& options) {
  RowNormAttributes a = last_dims(input, normalized_shape, "layer_norm");
  check_parameter(options.weight, normalized_shape, "layer_norm", "weight");
  check_parameter(options.bias, normalized_shape, "layer_norm", "bias");
  a.eps = options.eps;
  return call_row_norm(layer_norm_op, input, options.weight, options.bias, a);
}

Tensor rms_norm(const Tensor& input, const Shape& normalized_shape, const RmsNormOptions& options) {
  RowNormAttributes a = last_dims(input, normalized_shape, "rms_norm");
  check_parameter(options.weight, normalized_shape, "rms_norm", "weight");
  a.eps = options.eps.value_or(-1);
  a.rms = true;
  return call_row_norm(rms_norm_op, input, options.weight, {}, a);
}

Tensor group_norm(const Tensor& input, std::int64_t num_groups, const NormOptions& options) {
  check_defined(input, "group_norm", "an input");
  check_floating(input, "group_norm");
  const Shape& sizes = input.sizes();
  if (sizes.size() < 2) fail<ShapeError>("group_norm: expected an input [N, C, ...], got {}", sizes.str());
  if (num_groups < 1 || sizes[1] % num_groups != 0) {
    fail<ShapeError>("group_norm: expected a number of groups that divides the {} channels of {}, got {}", sizes[1],
                     sizes.str(), num_groups);
  }
  check_parameter(options.weight, {sizes[1]}, "group_norm", "weight");
  check_parameter(options.bias, {sizes[1]}, "group_norm", "bias");
  RowNormAttributes a{.eps = options.eps, .rows = sizes[0] * num_groups, .groups = num_groups};
  for (int i = 2; i < sizes.size(); ++i) a.inner *= sizes[i];
  if (a.inner == 0) a.inner = 1;
  return call_row_norm(group_norm_op, input, options.weight, options.bias, a);
}

}  // namespace halfstep
