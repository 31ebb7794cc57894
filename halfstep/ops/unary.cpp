// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/pointwise.h"

#include <deque>
#include <numbers>
#include <string>

#include "halfstep/core/fail.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/pointwise_internal.h"
#include "halfstep/ops/ratio.h"

namespace halfstep {
namespace detail {

void infer_unary_any(InferContext& ctx) {
  check_defined(ctx.input(0), ctx.name(), "a tensor");
  infer_elementwise(ctx, ctx.input(0).dtype());
}
void infer_unary_numeric(InferContext& ctx) {
  check_defined(ctx.input(0), ctx.name(), "a tensor");
  if (ctx.input(0).dtype() == DType::boolean) {
    fail<DTypeError>("{}: bool is not supported here, got bool {}; convert with .to(f32)?", ctx.name(),
                     ctx.input(0).sizes().str());
  }
  infer_elementwise(ctx, ctx.input(0).dtype());
}
void infer_unary_floating(InferContext& ctx) {
  infer_unary_any(ctx);
  if (!is_floating(ctx.outputs[0].dtype)) {
    ctx.outputs[0].dtype = DType::f32;
    ctx.cast(DType::f32);
  }
}
void infer_common(InferContext& ctx) {
  const Tensor* inputs[4];
  bool same = true;
  for (int i = 0; i < ctx.size(); ++i) {
    inputs[i] = &ctx.input(i);
    check_defined(*inputs[i], ctx.name(), "an input");
    same = same && inputs[i]->dtype() == inputs[0]->dtype();
  }
  const DType dtype =
      same ? inputs[0]->dtype() : result_type({inputs, static_cast<std::size_t>(ctx.size())}, ctx.name());
  if (!same) ctx.cast(dtype);
  infer_elementwise(ctx, dtype);
}
void infer_common_numeric(InferContext& ctx) {
  infer_common(ctx);
  if (ctx.outputs[0].dtype == DType::boolean) {
    fail<DTypeError>("{}: bool is not supported here, got {} inputs of it; convert with .to(f32)?", ctx.name(),
                     ctx.size());
  }
}
void infer_common_floating(InferContext& ctx) {
  infer_common(ctx);
  if (!is_floating(ctx.outputs[0].dtype)) {
    ctx.outputs[0].dtype = DType::f32;
    ctx.cast(DType::f32);
  }
}
void infer_with_number(InferContext& ctx) {
  const Tensor& x = ctx.input(0);
  check_defined(x, ctx.name(), "a tensor");
  const DType dtype = result_type(x, number_of(ctx.attributes<ScalarAttributes>().value));
  if (dtype != x.dtype()) ctx.cast(dtype);
  infer_elementwise(ctx, dtype);
}

ScalarAttributes scalar_attributes(Scalar s) {
  return {.value = {.floating = s.to_double(),
                    .integer = s.is_floating() ? 0 : s.to_int(),
                    .kind = static_cast<int>(s.kind())}};
}
Scalar number_of(const ScalarValue& v) {
  return v.kind == 2 ? Scalar(v.floating) : v.kind == 1 ? Scalar(v.integer) : Scalar(v.integer != 0);
}
Tensor number_tensor(const Tensor& like, Scalar number, const char* op) {
  check_defined(like, op, "a tensor");
  // Among 0-d tensors widths count: there the number takes the dtype that it would have beside `like`.
  DType dtype = result_type(like, number);
  if (like.dim() > 0) {
    dtype = number.is_floating()                     ? accumulate_dtype(like.dtype())
            : number.kind() == Scalar::Kind::integer ? DType::i64
                                                     : DType::boolean;
  }
  Tensor t = empty({}, {.dtype = dtype, .device = like.device()});
  t.fill_(number);
  return t;
}

const Op& define_unary(const char* name, InferFn infer, GradFn grad, std::uint32_t saves) {
  // Kept as long as the ops, which is for ever; a deque's elements stay where they are.
  static std::deque<std::string>& signatures = *new std::deque<std::string>;
  const std::string& signature = signatures.emplace_back(std::string(name) + "(input)");
  Op op{.name = name, .signature = signature.c_str()};
  op.infer = infer;
  op.grad = grad;
  op.saves[0] = saves;
  return define_op(op);
}

}  // namespace detail

namespace {

using detail::define_unary;
using detail::infer_unary_any;
using detail::infer_unary_floating;
using detail::infer_unary_numeric;

constexpr double kLn2 = 0.69314718055994530942;
constexpr double kLn10 = 2.30258509299404568402;
constexpr double kTwoBySqrtPi = 1.12837916709551257390;

void step_gradient(GradContext& c) {
  c.set(0, zeros(c.input_sizes(0), {.dtype = c.input_dtype(0), .device = c.device(0)}));
}
// The gradient g of y = f(x), with x and y saved as each asks for.
const Tensor& g(GradContext& c) { return c.grad(); }
const Tensor& x(GradContext& c) { return c.input(0); }
const Tensor& y(GradContext& c) { return c.output(); }
Tensor number_like(const Tensor& t, double v) { return full({}, v, {.dtype = t.dtype(), .device = t.device()}); }

// Products go from the gradient on, factor by factor: where all factors are above 1, or all below, nothing on the way
// is farther from the result than the gradient is. A square by itself would leave the range first, that of 16 bits
// soon.

const Op& abs_op = define_unary(
    "abs", infer_unary_numeric, [](GradContext& c) { c.set(0, g(c) * sign(x(c))); }, in(0));
const Op& sign_op = define_unary("sign", infer_unary_any, step_gradient, 0);
const Op& floor_op = define_unary("floor", infer_unary_numeric, step_gradient, 0);
const Op& ceil_op = define_unary("ceil", infer_unary_numeric, step_gradient, 0);
const Op& round_op = define_unary("round", infer_unary_numeric, step_gradient, 0);
const Op& trunc_op = define_unary("trunc", infer_unary_numeric, step_gradient, 0);
const Op& square_op = define_unary(
    "square",
    [](InferContext& ctx) {
      infer_unary_any(ctx);
      if (ctx.outputs[0].dtype == DType::boolean) {
        ctx.outputs[0].dtype = DType::i64;
        ctx.cast(DType::i64);
      }
    },
    [](GradContext& c) { c.set(0, g(c) * (x(c) * 2)); }, in(0));
const Op& sqrt_op = define_unary(
    "sqrt", infer_unary_floating, [](GradContext& c) { c.set(0, g(c) / (y(c) * 2)); }, out(0));
const Op& rsqrt_op = define_unary(
    "rsqrt", infer_unary_floating,
    [](GradContext& c) {
      // -g y^3 / 2 as -g y / (sqrt(2) / y)^2
      c.set(0, detail::div_backward(g(c), y(c), std::numbers::sqrt2 / y(c)));
    },
    out(0));
const Op& reciprocal_op = define_unary(
    "reciprocal", infer_unary_floating, [](GradContext& c) { c.set(0, neg(g(c) * y(c) * y(c))); }, out(0));
const Op& exp_op = define_unary(
    "exp", infer_unary_floating, [](GradContext& c) { c.set(0, g(c) * y(c)); }, out(0));
const Op& exp2_op = define_unary(
    "exp2", infer_unary_floating, [](GradContext& c) { c.set(0, g(c) * y(c) * kLn2); }, out(0));
const Op& expm1_op = define_unary(
    "expm1", infer_unary_floating, [](GradContext& c) { c.set(0, g(c) * (y(c) + 1)); }, out(0));
const Op& log_op = define_unary(
    "log", infer_unary_floating, [](GradContext& c) { c.set(0, g(c) / x(c)); }, in(0));
const Op& log2_op = define_unary(
    "log2", infer_unary_floating,
    [](GradContext& c) { c.set(0, detail::scaled_ratio(g(c), number_like(x(c), 1 / kLn2), x(c))); }, in(0));
const Op& log10_op = define_unary(
    "log10", infer_unary_floating,
    [](GradContext& c) { c.set(0, detail::scaled_ratio(g(c), number_like(x(c), 1 / kLn10), x(c))); }, in(0));
const Op& log1p_op = define_unary(
    "log1p", infer_unary_floating, [](GradContext& c) { c.set(0, g(c) / (x(c) + 1)); }, in(0));
const Op& sin_op = define_unary(
    "sin", infer_unary_floating, [](GradContext& c) { c.set(0, g(c) * cos(x(c))); }, in(0));
const Op& cos_op = define_unary(
    "cos", infer_unary_floating, [](GradContext& c) { c.set(0, neg(g(c) * sin(x(c)))); }, in(0));
const Op& tan_op = define_unary(
    "tan", infer_unary_floating, [](GradContext& c) { c.set(0, g(c) * y(c) * y(c) + g(c)); }, out(0));
const Op& asin_op = define_unary(
    "asin", infer_unary_floating, [](GradContext& c) { c.set(0, g(c) * rsqrt(1 - square(x(c)))); }, in(0));
const Op& acos_op = define_unary(
    "acos", infer_unary_floating, [](GradContext& c) { c.set(0, neg(g(c) * rsqrt(1 - square(x(c))))); }, in(0));
const Op& atan_op = define_unary(
    "atan", infer_unary_floating,
    [](GradContext& c) { c.set(0, detail::atan2_backward(g(c), x(c), number_like(x(c), 1))); }, in(0));
const Op& sinh_op = define_unary(
    "sinh", infer_unary_floating, [](GradContext& c) { c.set(0, g(c) * cosh(x(c))); }, in(0));
const Op& cosh_op = define_unary(
    "cosh", infer_unary_floating, [](GradContext& c) { c.set(0, g(c) * sinh(x(c))); }, in(0));
const Op& asinh_op = define_unary(
    "asinh", infer_unary_floating,
    [](GradContext& c) { c.set(0, detail::hypot_backward(g(c), number_like(x(c), 1), x(c))); }, in(0));
const Op& acosh_op = define_unary(
    "acosh", infer_unary_floating,
    [](GradContext& c) {
      const Tensor magnitude = abs(x(c));
      c.set(0, g(c) / (sqrt(magnitude - 1) * sqrt(magnitude + 1)));
    },
    in(0));
const Op& atanh_op = define_unary(
    "atanh", infer_unary_floating, [](GradContext& c) { c.set(0, g(c) / (1 - square(x(c)))); }, in(0));
const Op& erf_op = define_unary(
    "erf", infer_unary_floating, [](GradContext& c) { c.set(0, g(c) * (exp(neg(square(x(c)))) * kTwoBySqrtPi)); },
    in(0));
const Op& erfc_op = define_unary(
    "erfc", infer_unary_floating, [](GradContext& c) { c.set(0, g(c) * (exp(neg(square(x(c)))) * -kTwoBySqrtPi)); },
    in(0));
const Op& erfinv_op = define_unary(
    "erfinv", infer_unary_floating, [](GradContext& c) { c.set(0, g(c) * (exp(square(y(c))) / kTwoBySqrtPi)); },
    out(0));

// (1 - y^2) g, in one pass.
const Op& tanh_backward_op = define_op({
    .name = "tanh_backward",
    .signature = "tanh_backward(grad, output)",
    .infer = detail::infer_common_floating,
    .backward = true,
});
const Op& tanh_op = define_unary(
    "tanh", infer_unary_floating,
    [](GradContext& c) {
      c.set(0, c.create_graph ? g(c) * (1 - square(y(c))) : call(tanh_backward_op, {&g(c), &y(c)}));
    },
    out(0));

const Op& nan_to_num_op = define_op({
    .name = "nan_to_num",
    .signature = "nan_to_num(input, nan=0, posinf=None, neginf=None)",
    .infer = infer_unary_floating,
    .grad = [](GradContext& c) { c.set(0, masked_fill(g(c), logical_not(isfinite(x(c))), 0)); },
    .saves = {in(0)},
    .attributes = &attribute_struct<NanToNumAttributes>(),
});

}  // namespace

Tensor abs(const Tensor& input) { return call(abs_op, {&input}); }
Tensor sign(const Tensor& input) { return call(sign_op, {&input}); }
Tensor square(const Tensor& input) { return call(square_op, {&input}); }
Tensor floor(const Tensor& input) { return call(floor_op, {&input}); }
Tensor ceil(const Tensor& input) { return call(ceil_op, {&input}); }
Tensor round(const Tensor& input) { return call(round_op, {&input}); }
Tensor trunc(const Tensor& input) { return call(trunc_op, {&input}); }
Tensor sqrt(const Tensor& input) { return call(sqrt_op, {&input}); }
Tensor rsqrt(const Tensor& input) { return call(rsqrt_op, {&input}); }
Tensor reciprocal(const Tensor& input) { return call(reciprocal_op, {&input}); }
Tensor exp(const Tensor& input) { return call(exp_op, {&input}); }
Tensor exp2(const Tensor& input) { return call(exp2_op, {&input}); }
Tensor expm1(const Tensor& input) { return call(expm1_op, {&input}); }
Tensor log(const Tensor& input) { return call(log_op, {&input}); }
Tensor log2(const Tensor& input) { return call(log2_op, {&input}); }
Tensor log10(const Tensor& input) { return call(log10_op, {&input}); }
Tensor log1p(const Tensor& input) { return call(log1p_op, {&input}); }
Tensor sin(const Tensor& input) { return call(sin_op, {&input}); }
Tensor cos(const Tensor& input) { return call(cos_op, {&input}); }
Tensor tan(const Tensor& input) { return call(tan_op, {&input}); }
Tensor asin(const Tensor& input) { return call(asin_op, {&input}); }
Tensor acos(const Tensor& input) { return call(acos_op, {&input}); }
Tensor atan(const Tensor& input) { return call(atan_op, {&input}); }
Tensor sinh(const Tensor& input) { return call(sinh_op, {&input}); }
Tensor cosh(const Tensor& input) { return call(cosh_op, {&input}); }
Tensor asinh(const Tensor& input) { return call(asinh_op, {&input}); }
Tensor acosh(const Tensor& input) { return call(acosh_op, {&input}); }
Tensor atanh(const Tensor& input) { return call(atanh_op, {&input}); }
Tensor tanh(const Tensor& input) { return call(tanh_op, {&input}); }
Tensor erf(const Tensor& input) { return call(erf_op, {&input}); }
Tensor erfc(const Tensor& input) { return call(erfc_op, {&input}); }
Tensor erfinv(const Tensor& input) { return call(erfinv_op, {&input}); }

Tensor nan_to_num(const Tensor& input, double nan, std::optional<double> posinf, std::optional<double> neginf) {
  check_defined(input, "nan_to_num", "a tensor");
  if (!is_floating(input.dtype())) return input.clone();
  const double lowest = lowest_finite(input.dtype());
  return call(nan_to_num_op, {&input},
              NanToNumAttributes{.nan = nan, .posinf = posinf.value_or(-lowest), .neginf = neginf.value_or(lowest)});
}

Tensor& abs_(Tensor& input) { return detail::in_place_keeping_input(abs_op, input); }
Tensor& square_(Tensor& input) { return detail::in_place_keeping_input(square_op, input); }
Tensor& sqrt_(Tensor& input) { return call_in_place(sqrt_op, input, {}); }
Tensor& rsqrt_(Tensor& input) { return call_in_place(rsqrt_op, input, {}); }
Tensor& reciprocal_(Tensor& input) { return call_in_place(reciprocal_op, input, {}); }
Tensor& exp_(Tensor& input) { return call_in_place(exp_op, input, {}); }
Tensor& log_(Tensor& input) { return detail::in_place_keeping_input(log_op, input); }
Tensor& sin_(Tensor& input) { return detail::in_place_keeping_input(sin_op, input); }
Tensor& cos_(Tensor& input) { return detail::in_place_keeping_input(cos_op, input); }
Tensor& tanh_(Tensor& input) { return call_in_place(tanh_op, input, {}); }
Tensor& floor_(Tensor& input) { return call_in_place(floor_op, input, {}); }
Tensor& ceil_(Tensor& input) { return call_in_place(ceil_op, input, {}); }
Tensor& round_(Tensor& input) { return call_in_place(round_op, input, {}); }
Tensor& trunc_(Tensor& input) { return call_in_place(trunc_op, input, {}); }
Tensor& neg_(Tensor& input) { return input.mul_(-1); }

}  // namespace halfstep
