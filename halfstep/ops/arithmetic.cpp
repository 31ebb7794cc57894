// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/arithmetic.h"

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/pointwise_internal.h"
#include "halfstep/ops/ratio.h"

namespace halfstep {

using detail::scalar_attributes;

namespace {

using detail::scalar_attributes;

// Both inputs in their common dtype, which is the result's.
void infer_binary(InferContext& ctx) {
  const Tensor &a = ctx.input(0), &b = ctx.input(1);
  check_defined(a, ctx.name(), "input 0");
  check_defined(b, ctx.name(), "input 1");
  DType dtype = a.impl()->dtype;
  if (dtype != b.impl()->dtype) {
    const Tensor* both[] = {&a, &b};
    dtype = result_type(both, ctx.name());
    ctx.cast(dtype);
  }
  infer_elementwise(ctx, dtype);
}

// The quotient of integers is a float.
void infer_div(InferContext& ctx) {
  infer_binary(ctx);
  if (!is_floating(ctx.outputs[0].dtype)) {
    ctx.outputs[0].dtype = DType::f32;
    ctx.cast(DType::f32);
  }
}

void infer_scalar(InferContext& ctx) {
  const Tensor& a = ctx.input(0);
  check_defined(a, ctx.name(), "input 0");
  const ScalarValue& v = ctx.attributes<ScalarAttributes>().value;
  const DType dtype = result_type(a, v.kind == 2 ? Scalar(v.floating) : v.kind == 1 ? Scalar(v.integer) : Scalar(true));
  if (dtype != a.dtype()) ctx.cast(dtype);
  infer_elementwise(ctx, dtype);
}

void infer_div_scalar(InferContext& ctx) {
  const Tensor& a = ctx.input(0);
  check_defined(a, ctx.name(), "input 0");
  const DType dtype = is_floating(a.dtype()) ? a.dtype() : DType::f32;
  if (dtype != a.dtype()) ctx.cast(dtype);
  infer_elementwise(ctx, dtype);
}

void infer_unary(InferContext& ctx) { infer_elementwise(ctx, ctx.input(0).dtype()); }

void check_bool_subtraction(const char* op, const Tensor& a) {
  if (a.defined() && a.dtype() == DType::boolean) {
    fail<DTypeError>("{}: bool is not supported here; use logical_not or logical_xor", op);
  }
}

Scalar alpha_of(GradContext& c) {
  const auto& a = c.attributes<AlphaAttributes>();
  return Scalar(a.alpha);
}

Scalar number_of(GradContext& c) {
  const ScalarValue& v = c.attributes<ScalarAttributes>().value;
  return v.kind == 2 ? Scalar(v.floating) : Scalar(v.integer);
}

const Op& add_op = define_op({
    .name = "add",
    .signature = "add(input, other, alpha=1)",
    .infer = infer_binary,
    .grad =
        [](GradContext& c) {
          if (c.needs(0)) c.set(0, c.grad());
          const double alpha = c.attributes<AlphaAttributes>().alpha;
          if (c.needs(1)) c.set(1, alpha == 1 ? c.grad() : c.grad() * alpha_of(c));
        },
    .attributes = &attribute_struct<AlphaAttributes>(),
});
const Op& sub_op = define_op({
    .name = "sub",
    .signature = "sub(input, other, alpha=1)",
    .infer = infer_binary,
    .grad =
        [](GradContext& c) {
          if (c.needs(0)) c.set(0, c.grad());
          if (c.needs(1)) c.set(1, c.grad() * Scalar(-c.attributes<AlphaAttributes>().alpha));
        },
    .attributes = &attribute_struct<AlphaAttributes>(),
});
const Op& mul_op = define_op({
    .name = "mul",
    .signature = "mul(input, other)",
    .infer = infer_binary,
    .grad =
        [](GradContext& c) {
          if (c.needs(0)) c.set(0, c.grad() * c.input(1));
          if (c.needs(1)) c.set(1, c.grad() * c.input(0));
        },
    .saves = {in(1), in(0)},
});
const Op& div_op = define_op({
    .name = "div",
    .signature = "div(input, other)",
    .infer = infer_div,
    .grad =
        [](GradContext& c) {
          if (c.needs(0)) c.set(0, c.grad() / c.input(1));
          if (c.needs(1)) c.set(1, detail::div_backward(c.grad(), c.input(0), c.input(1)));
        },
    .saves = {in(1), in(0, 1)},
});
// x / 3 is x * (1/3) only up to a rounding, so division by a number stays a division.
const Op& div_scalar_op = define_op({
    .name = "div_scalar",
    .signature = "div(input, number)",
    .infer = infer_div_scalar,
    .grad = [](GradContext& c) { c.set(0, c.grad() / number_of(c)); },
    .attributes = &attribute_struct<ScalarAttributes>(),
});
const Op& rdiv_scalar_op = define_op({
    .name = "rdiv_scalar",
    .signature = "number / input",
    .infer = infer_div_scalar,
    .grad = [](GradContext& c) { c.set(0, neg(detail::scaled_ratio(c.grad(), c.output(), c.input(0)))); },
    .saves = {in(0) | out(0)},
    .attributes = &attribute_struct<ScalarAttributes>(),
});
const Op& neg_op = define_op({
    .name = "neg",
    .signature = "neg(input)",
    .infer = infer_unary,
    .grad = [](GradContext& c) { c.set(0, neg(c.grad())); },
});
const Op& add_scalar_op = define_op({
    .name = "add_scalar",
    .signature = "add(input, number)",
    .infer = infer_scalar,
    .grad = [](GradContext& c) { c.set(0, c.grad()); },
    .attributes = &attribute_struct<ScalarAttributes>(),
});
const Op& mul_scalar_op = define_op({
    .name = "mul_scalar",
    .signature = "mul(input, number)",
    .infer = infer_scalar,
    .grad = [](GradContext& c) { c.set(0, c.grad() * number_of(c)); },
    .attributes = &attribute_struct<ScalarAttributes>(),
});

AlphaAttributes alpha_attributes(Scalar alpha) { return {.alpha = alpha.to_double(), .integer_alpha = alpha.to_int()}; }
Scalar negated(Scalar s) { return s.is_floating() ? Scalar(-s.to_double()) : Scalar(-s.to_int()); }

void check_alpha(const char* op, const Tensor& a, const Tensor& b, Scalar alpha) {
  if (alpha.is_floating() && a.defined() && b.defined() && !is_floating(a.dtype()) && !is_floating(b.dtype())) {
    fail<DTypeError>("{}: expected an integer alpha for {} and {}, got {}", op, name(a.dtype()), name(b.dtype()),
                     alpha.to_double());
  }
}

}  // namespace

Tensor add(const Tensor& input, const Tensor& other, Scalar alpha) {
  check_alpha("add", input, other, alpha);
  return call(add_op, {&input, &other}, alpha_attributes(alpha));
}
Tensor add(const Tensor& input, Scalar other) { return call(add_scalar_op, {&input}, scalar_attributes(other)); }
Tensor sub(const Tensor& input, const Tensor& other, Scalar alpha) {
  check_alpha("sub", input, other, alpha);
  check_bool_subtraction("sub", input);
  check_bool_subtraction("sub", other);
  return call(sub_op, {&input, &other}, alpha_attributes(alpha));
}
Tensor sub(const Tensor& input, Scalar other) {
  check_bool_subtraction("sub", input);
  return add(input, negated(other));
}
Tensor mul(const Tensor& input, const Tensor& other) { return call(mul_op, {&input, &other}); }
Tensor mul(const Tensor& input, Scalar other) { return call(mul_scalar_op, {&input}, scalar_attributes(other)); }
Tensor div(const Tensor& input, const Tensor& other) { return call(div_op, {&input, &other}); }
Tensor div(const Tensor& input, Scalar other) { return call(div_scalar_op, {&input}, scalar_attributes(other)); }
Tensor neg(const Tensor& input) {
  check_defined(input, "neg", "a tensor");
  check_bool_subtraction("neg", input);
  return call(neg_op, {&input});
}

Tensor& add_out(Tensor& out, const Tensor& input, const Tensor& other, Scalar alpha) {
  return call_out(add_op, out, {&input, &other}, alpha_attributes(alpha));
}
Tensor& sub_out(Tensor& out, const Tensor& input, const Tensor& other, Scalar alpha) {
  return call_out(sub_op, out, {&input, &other}, alpha_attributes(alpha));
}
Tensor& mul_out(Tensor& out, const Tensor& input, const Tensor& other) {
  return call_out(mul_op, out, {&input, &other});
}
Tensor& div_out(Tensor& out, const Tensor& input, const Tensor& other) {
  return call_out(div_op, out, {&input, &other});
}

Tensor operator-(Scalar a, const Tensor& b) {
  check_defined(b, "sub", "input 1");
  check_bool_subtraction("sub", b);
  // The number decides the dtype before the sign is changed: u8 wraps around, and 1.5 - u8 must not.
  const DType dtype = result_type(b, a);
  return add(neg(b.dtype() == dtype ? b : b.to(dtype)), a);
}
Tensor operator/(Scalar a, const Tensor& b) { return call(rdiv_scalar_op, {&b}, scalar_attributes(a)); }

Tensor& Tensor::add_(const Tensor& other, Scalar alpha) {
  check_alpha("add_", *this, other, alpha);
  return call_in_place(add_op, *this, {&other}, alpha_attributes(alpha));
}
Tensor& Tensor::add_(Scalar other) { return call_in_place(add_scalar_op, *this, {}, scalar_attributes(other)); }
Tensor& Tensor::sub_(const Tensor& other, Scalar alpha) {
  check_alpha("sub_", *this, other, alpha);
  check_bool_subtraction("sub_", *this);
  check_bool_subtraction("sub_", other);
  return call_in_place(sub_op, *this, {&other}, alpha_attributes(alpha));
}
Tensor& Tensor::sub_(Scalar other) { return add_(negated(other)); }
Tensor& Tensor::mul_(const Tensor& other) { return call_in_place(mul_op, *this, {&other}); }
Tensor& Tensor::mul_(Scalar other) { return call_in_place(mul_scalar_op, *this, {}, scalar_attributes(other)); }
Tensor& Tensor::div_(const Tensor& other) { return call_in_place(div_op, *this, {&other}); }
Tensor& Tensor::div_(Scalar other) { return call_in_place(div_scalar_op, *this, {}, scalar_attributes(other)); }

}  // namespace halfstep
