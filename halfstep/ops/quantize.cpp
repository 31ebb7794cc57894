// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/quantize.h"

#include <cmath>
#include <cstddef>

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/reduce.h"

namespace halfstep {
namespace {

// Integers up to here, and their differences from a zero point, are exact in float32.
constexpr std::int64_t kLargest = std::int64_t{1} << 23;

void check_range(std::int64_t quant_min, std::int64_t quant_max, const char* op) {
  if (quant_min > quant_max) {
    fail<Error>("{}: expected quant_min up to quant_max, got {} and {}", op, quant_min, quant_max);
  }
  if (quant_min < -kLargest || quant_max > kLargest) {
    fail<Error>("{}: expected quant_min and quant_max from {} to {}, got {} and {}", op, -kLargest, kLargest, quant_min,
                quant_max);
  }
}

// Scales take the computing dtype of the input they go with: f32, and f64 with f64 (for differences).
void check_scale_dtype(const Tensor& scale, DType input, const char* op, const char* what) {
  if (scale.dtype() == DType::f32 || (scale.dtype() == DType::f64 && input == DType::f64)) return;
  fail<DTypeError>("{}: expected {} of f32{}, got {}", op, what, input == DType::f64 ? " or f64" : "",
                   name(scale.dtype()));
}

// Checks that `first` and `second` (`names` of them) have an element, or one for each index of the axis; returns the
// wrapped axis, or -1.
std::int64_t check_channels(const Tensor& x, const Tensor& first, const Tensor& second, const char* names,
                            const std::optional<std::int64_t>& axis, const char* op) {
  if (!axis) {
    if (first.numel() == 1 && second.numel() == 1) return -1;
    fail<ShapeError>("{}: expected {} of one element without an axis, got {} and {}", op, names, first.sizes().str(),
                     second.sizes().str());
  }
  if (*axis < -x.dim() || *axis >= x.dim()) {
    fail<ShapeError>("{}: expected an axis from {} to {} for an input {}, got {}", op, -x.dim(), x.dim() - 1,
                     x.sizes().str(), *axis);
  }
  const std::int64_t wrapped = *axis < 0 ? *axis + x.dim() : *axis;
  const Shape expected{x.size(static_cast<int>(wrapped))};
  if (first.sizes() != expected || second.sizes() != expected) {
    fail<ShapeError>("{}: expected {} {} for axis {} of an input {}, got {} and {}", op, names, expected.str(), wrapped,
                     x.sizes().str(), first.sizes().str(), second.sizes().str());
  }
  return wrapped;
}

// Checks scale and zero point; returns the wrapped axis, or -1.
std::int64_t check_grid(const Tensor& x, const Tensor& scale, const Tensor& zero_point,
                        const std::optional<std::int64_t>& axis, const char* op) {
  check_defined(x, op, "a tensor");
  check_defined(scale, op, "a scale");
  check_defined(zero_point, op, "a zero_point");
  check_scale_dtype(scale, x.dtype(), op, "a scale");
  if (zero_point.dtype() != DType::i32) check_scale_dtype(zero_point, x.dtype(), op, "a zero_point of i32, or one");
  return check_channels(x, scale, zero_point, "a scale and a zero_point", axis, op);
}

void output_like(InferContext& ctx, const Tensor& x, DType dtype) {
  ctx.output(x.sizes(), strides_like(x.sizes(), x.strides()), dtype);
}
void infer_same(InferContext& ctx) {
  output_like(ctx, ctx.input(0), dtype_or(ctx.attributes<QuantizeAttributes>().dtype, ctx.input(0).dtype()));
}

QuantizeAttributes in_dtype(DType dtype) {
  QuantizeAttributes a;
  a.dtype = dtype_code(dtype);
  return a;
}

// --- fake_quantize

// Inputs: g, mask. Linear in g: its gradient is the op itself.
const Op& fake_quantize_backward_op = define_op({
    .name = "fake_quantize_backward",
    .signature = "fake_quantize_backward(gradient, mask)",
    .infer = infer_same,
    .grad =
        [](GradContext& c) {
          c.set(0, call(c.op(), {&c.grad(), &c.input(1)}, in_dtype(c.grad_dtype(0))));
        },
    .saves = {in(1)},
    .attributes = &attribute_struct<QuantizeAttributes>(),
    .backward = true,
});

// Inputs: x, scale, zero point. Outputs: y, and the mask where it is asked for.
const Op& fake_quantize_op = define_op({
    .name = "fake_quantize",
    .signature = "fake_quantize(input, scale, zero_point, quant_min=-128, quant_max=127, axis=none)",
    .infer =
        [](InferContext& ctx) {
          infer_same(ctx);
          if (ctx.attributes<QuantizeAttributes>().want_mask) {
            output_like(ctx, ctx.input(0), DType::boolean);
          } else {
            ctx.output({0}, DType::boolean);
          }
        },
    .grad =
        [](GradContext& c) {
          if (!c.grad(0).defined() || !c.needs(0)) return;
          c.set(0, call(fake_quantize_backward_op, {&c.grad(0), &c.output(1)}, in_dtype(c.grad_dtype(0))));
        },
    .saves = {out(1)},
    .attributes = &attribute_struct<QuantizeAttributes>(),
    .dtype_attribute = offsetof(QuantizeAttributes, dtype),
    .state_inputs = in(1, 2),
    .float32_gradient = true,
});

// --- fake_quantize_learnable

// Inputs: g, x, scale, zero point. Outputs: gradients of input, scale and zero point.
const Op& fake_quantize_learnable_backward_op = define_op({
    .name = "fake_quantize_learnable_backward",
    .signature = "fake_quantize_learnable_backward(gradient, input, scale, zero_point, quant_min, quant_max, axis, "
                 "grad_factor)",
    .infer =
        [](InferContext& ctx) {
          const auto& a = ctx.attributes<QuantizeAttributes>();
          const auto sum = [&](bool wanted, const Tensor& t) {
            const DType dtype = ctx.input(2).dtype();
            if (wanted) {
              ctx.output(t.sizes(), dtype);
            } else {
              ctx.output({0}, dtype);
            }
          };
          if (a.want_input) {
            output_like(ctx, ctx.input(1), dtype_or(a.dtype, ctx.input(0).dtype()));
          } else {
            ctx.output({0}, ctx.input(0).dtype());
          }
          sum(a.want_scale, ctx.input(2));
          sum(a.want_zero_point, ctx.input(3));
        },
    .attributes = &attribute_struct<QuantizeAttributes>(),
    .key = 1,
    .backward = true,
});

// What is repeated along all dimensions of `x` but one.
Tensor along(const Tensor& t, const Tensor& x, std::int64_t axis) {
  if (axis < 0) return t.reshape({});
  Shape sizes;
  for (int i = 0; i < x.dim(); ++i) sizes.push_back(i == axis ? t.numel() : 1);
  return t.reshape(sizes);
}
// The sum of what `t`, of x's sizes, shares with `like`.
Tensor sum_like(const Tensor& t, const Tensor& like, std::int64_t axis) {
  Shape dims;
  for (int i = 0; i < t.dim(); ++i) {
    if (i != axis) dims.push_back(i);
  }
  const Tensor total = dims.empty() ? t : sum(t, dims);
  return total.to(like.dtype()).reshape(like.sizes());
}

// Of recorded ops: linear in the gradient, with factors that are constants.
void learnable_gradient_recorded(GradContext& c) {
  const auto& a = c.attributes<QuantizeAttributes>();
  const DType compute = accumulate_dtype(c.input_dtype(0));
  const Tensor x = c.input(0).detach().to(compute);
  const Tensor scale = along(c.input(1).detach(), x, a.axis).to(compute);
  const Tensor zero = clamp(round(along(c.input(2).detach(), x, a.axis).to(compute)), a.quant_min, a.quant_max);
  const Tensor q = round(x * (1 / scale)) + zero;
  const Tensor below = lt(q, a.quant_min), above = gt(q, a.quant_max), out = logical_or(below, above);
  const Tensor g = c.grad(0).to(compute);
  if (c.needs(0)) c.set(0, masked_fill(g, logical_or(out, isnan(x)), 0));
  if (c.needs(1)) {
    const Tensor ends = where(below, a.quant_min - zero, a.quant_max - zero);
    const Tensor factor = where(out, ends, (q - zero) - x / scale) * a.grad_factor;
    c.set(1, sum_like(g * factor, c.input(1), a.axis));
  }
  if (c.needs(2)) c.set(2, sum_like(where(out, g * (scale * -a.grad_factor), 0), c.input(2), a.axis));
}

const Op& fake_quantize_learnable_op = define_op({
    .name = "fake_quantize_learnable",
    .signature = "fake_quantize_learnable(input, scale, zero_point, quant_min=-128, quant_max=127, axis=none, "
                 "grad_factor=1)",
    .infer = infer_same,
    .grad =
        [](GradContext& c) {
          if (!c.grad(0).defined()) return;
          if (c.create_graph) return learnable_gradient_recorded(c);
          QuantizeAttributes a = c.attributes<QuantizeAttributes>();
          a.want_input = c.needs(0);
          a.want_scale = c.needs(1);
          a.want_zero_point = c.needs(2);
          a.dtype = dtype_code(c.grad_dtype(0));
          const auto d =
              call_n<3>(fake_quantize_learnable_backward_op, {&c.grad(0), &c.input(0), &c.input(1), &c.input(2)}, a);
          for (int i = 0; i < 3; ++i) {
            if (c.needs(i)) c.set(i, d[static_cast<std::size_t>(i)]);
          }
        },
    .saves = {in(0, 1, 2), in(0, 1, 2), in(0, 1, 2)},
    .attributes = &attribute_struct<QuantizeAttributes>(),
    .dtype_attribute = offsetof(QuantizeAttributes, dtype),
    .state_inputs = in(1, 2),
    .float32_gradient = true,
});

// --- pact

// Inputs: g, x, alpha. Outputs: gradients of input and alpha.
const Op& pact_backward_op = define_op({
    .name = "pact_backward",
    .signature = "pact_backward(gradient, input, alpha)",
    .infer =
        [](InferContext& ctx) {
          const auto& a = ctx.attributes<QuantizeAttributes>();
          if (a.want_input) {
            output_like(ctx, ctx.input(1), dtype_or(a.dtype, ctx.input(0).dtype()));
          } else {
            ctx.output({0}, ctx.input(0).dtype());
          }
          if (a.want_scale) {
            ctx.output(ctx.input(2).sizes(), ctx.input(2).dtype());
          } else {
            ctx.output({0}, ctx.input(2).dtype());
          }
        },
    .attributes = &attribute_struct<QuantizeAttributes>(),
    .key = 1,
    .backward = true,
});

const Op& pact_op = define_op({
    .name = "pact",
    .signature = "pact(input, alpha)",
    .infer = [](InferContext& ctx) { output_like(ctx, ctx.input(0), ctx.input(0).dtype()); },
    .grad =
        [](GradContext& c) {
          if (c.create_graph) {
            const DType compute = accumulate_dtype(c.input_dtype(0));
            const Tensor x = c.input(0).detach().to(compute), alpha = c.input(1).detach().reshape({}).to(compute);
            const Tensor above = ge(x, alpha);
            if (c.needs(0)) c.set(0, where(logical_and(gt(x, 0), logical_not(above)), c.grad(), 0));
            if (c.needs(1)) c.set(1, sum_like(where(above, c.grad().to(compute), 0), c.input(1), -1));
            return;
          }
          QuantizeAttributes a = in_dtype(c.grad_dtype(0));
          a.want_input = c.needs(0);
          a.want_scale = c.needs(1);
          const auto d = call_n<2>(pact_backward_op, {&c.grad(), &c.input(0), &c.input(1)}, a);
          if (c.needs(0)) c.set(0, d[0]);
          if (c.needs(1)) c.set(1, d[1]);
        },
    .saves = {in(0, 1), in(0, 1)},
    .state_inputs = in(1),
});

// --- integers

const Op& quantize_op = define_op({
    .name = "quantize",
    .signature = "quantize(input, scale, zero_point, dtype=u8, quant_min=none, quant_max=none, axis=none)",
    .infer = infer_same,
    .attributes = &attribute_struct<QuantizeAttributes>(),
});

const Op& dequantize_op = define_op({
    .name = "dequantize",
    .signature = "dequantize(input, scale, zero_point, axis=none, dtype=f32)",
    .infer = infer_same,
    .attributes = &attribute_struct<QuantizeAttributes>(),
});

// Inputs: min, max. Outputs: scale, zero point.
const Op& quantization_parameters_op = define_op({
    .name = "quantization_parameters",
    .signature = "quantization_parameters(min, max, quant_min=0, quant_max=255, symmetric=false, eps=2^-23)",
    .infer =
        [](InferContext& ctx) {
          ctx.output(ctx.input(0).sizes(), DType::f32);
          ctx.output(ctx.input(0).sizes(), DType::i32);
        },
    .attributes = &attribute_struct<QuantizationParametersAttributes>(),
    .state_inputs = in(0, 1),
});

}  // namespace

Tensor fake_quantize(const Tensor& input, const Tensor& scale, const Tensor& zero_point,
                     const FakeQuantizeFuncOptions& options) {
  const char* op = "fake_quantize";
  QuantizeAttributes a;
  a.axis = check_grid(input, scale, zero_point, options.axis, op);
  check_floating(input, op);
  check_range(options.quant_min, options.quant_max, op);
  a.quant_min = options.quant_min;
  a.quant_max = options.quant_max;
  // A view may have got a history through its base.
  const TensorImpl& x = *input.impl();
  a.want_mask = thread_state().grad_enabled && (x.requires_grad || (x.base && x.base->requires_grad));
  return call_n<2>(fake_quantize_op, {&input, &scale, &zero_point}, a)[0];
}

Tensor fake_quantize_learnable(const Tensor& input, const Tensor& scale, const Tensor& zero_point,
                               const LearnableFakeQuantizeOptions& options) {
  const char* op = "fake_quantize_learnable";
  QuantizeAttributes a;
  a.axis = check_grid(input, scale, zero_point, options.axis, op);
  check_floating(input, op);
  check_range(options.quant_min, options.quant_max, op);
  if (!std::isfinite(options.grad_factor)) {
    fail<Error>("{}: expected a finite grad_factor, got {}", op, options.grad_factor);
  }
  a.quant_min = options.quant_min;
  a.quant_max = options.quant_max;
  a.grad_factor = options.grad_factor;
  return call(fake_quantize_learnable_op, {&input, &scale, &zero_point}, a);
}

double lsq_grad_factor(std::int64_t n, std::int64_t quant_max) {
  if (n < 1 || quant_max < 1) {
    fail<Error>("lsq_grad_factor: expected n and quant_max above 0, got {} and {}", n, quant_max);
  }
  return 1 / std::sqrt(static_cast<double>(n) * static_cast<double>(quant_max));
}

Tensor pact(const Tensor& input, const Tensor& alpha) {
  check_defined(input, "pact", "a tensor");
  check_defined(alpha, "pact", "an alpha");
  check_floating(input, "pact");
  check_scale_dtype(alpha, input.dtype(), "pact", "an alpha");
  if (alpha.numel() != 1) fail<ShapeError>("pact: expected an alpha of one element, got {}", alpha.sizes().str());
  return call(pact_op, {&input, &alpha});
}

Tensor quantize(const Tensor& input, const Tensor& scale, const Tensor& zero_point, const QuantizeOptions& options) {
  const char* op = "quantize";
  QuantizeAttributes a;
  a.axis = check_grid(input, scale, zero_point, options.axis, op);
  check_floating(input, op);
  std::int64_t least = 0, most = 255;
  if (options.dtype == DType::i8) {
    least = -128, most = 127;
  } else if (options.dtype == DType::i32) {
    least = -32768, most = 32767;
  } else if (options.dtype != DType::u8) {
    fail<DTypeError>("quantize: expected a dtype of u8, i8 or i32, got {}", name(options.dtype));
  }
  a.quant_min = options.quant_min.value_or(least);
  a.quant_max = options.quant_max.value_or(most);
  check_range(a.quant_min, a.quant_max, op);
  if (options.dtype != DType::i32 && (a.quant_min < least || a.quant_max > most)) {
    fail<Error>("quantize: expected quant_min and quant_max from {} to {} for {}, got {} and {}", least, most,
                name(options.dtype), a.quant_min, a.quant_max);
  }
  a.dtype = dtype_code(options.dtype);
  const Tensor values = input.detach();
  return call(quantize_op, {&values, &scale, &zero_point}, a);
}

Tensor dequantize(const Tensor& input, const Tensor& scale, const Tensor& zero_point,
                  const DequantizeOptions& options) {
  const char* op = "dequantize";
  check_defined(input, op, "a tensor");
  if (input.dtype() != DType::u8 && input.dtype() != DType::i8 && input.dtype() != DType::i32) {
    fail<DTypeError>("dequantize: expected integers of u8, i8 or i32, got {}", name(input.dtype()));
  }
  if (!is_floating(options.dtype) || item_size(options.dtype) < 2) {
    fail<DTypeError>("dequantize: expected a dtype of f32, f64, f16 or bf16, got {}", name(options.dtype));
  }
  QuantizeAttributes a;
  a.axis = check_grid(input, scale, zero_point, options.axis, op);
  a.dtype = dtype_code(options.dtype);
  return call(dequantize_op, {&input, &scale, &zero_point}, a);
}

void observe_range(const Tensor& input, Tensor& min, Tensor& max, const ObserveRangeOptions& options) {
  const char* op = "observe_range";
  check_defined(input, op, "a tensor");
  check_defined(min, op, "a min");
  check_defined(max, op, "a max");
  check_floating(input, op);
  if (min.dtype() != DType::f32 || max.dtype() != DType::f32) {
    fail<DTypeError>("{}: expected min and max of f32, got {} and {}", op, name(min.dtype()), name(max.dtype()));
  }
  ObserveRangeAttributes a;
  a.axis = check_channels(input, min, max, "min and max", options.axis, op);
  if (options.averaging_constant) {
    a.averaging_constant = *options.averaging_constant;
    if (!(a.averaging_constant >= 0 && a.averaging_constant <= 1)) {
      fail<Error>("{}: expected an averaging_constant from 0 to 1, got {}", op, a.averaging_constant);
    }
  }
  static const KernelTable& table = kernel_table(op);
  const Tensor* seen[] = {&input};
  const Tensor* range[] = {&min, &max};
  run_kernel(table, op, input.device(), input.dtype(), seen, range, a);
  for (const Tensor* t : range) t->storage()->bump_version();
}

QuantizationParameters quantization_parameters(const Tensor& min, const Tensor& max,
                                               const QuantizationParametersOptions& options) {
  const char* op = "quantization_parameters";
  check_defined(min, op, "a min");
  check_defined(max, op, "a max");
  if (min.dtype() != DType::f32 || max.dtype() != DType::f32) {
    fail<DTypeError>("{}: expected min and max of f32, got {} and {}", op, name(min.dtype()), name(max.dtype()));
  }
  if (min.sizes() != max.sizes()) {
    fail<ShapeError>("{}: expected min and max of the same sizes, got {} and {}", op, min.sizes().str(),
                     max.sizes().str());
  }
  check_range(options.quant_min, options.quant_max, op);
  if (options.quant_min == options.quant_max) {
    fail<Error>("{}: expected quant_min below quant_max, got {} for both", op, options.quant_min);
  }
  if (!(options.eps > 0)) fail<Error>("{}: expected an eps above 0, got {}", op, options.eps);
  QuantizationParametersAttributes a;
  a.quant_min = options.quant_min;
  a.quant_max = options.quant_max;
  a.symmetric = options.symmetric;
  a.eps = options.eps;
  const Tensor low = min.detach(), high = max.detach();
  auto [scale, zero_point] = call_n<2>(quantization_parameters_op, {&low, &high}, a);
  return {std::move(scale), std::move(zero_point)};
}

}  // namespace halfstep
