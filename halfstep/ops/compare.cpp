// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/compare.h"

#include "halfstep/core/fail.h"
#include "halfstep/ops/pointwise_internal.h"

namespace halfstep {
namespace {

using detail::number_tensor;
using detail::scalar_attributes;

void infer_compare(InferContext& ctx) {
  detail::infer_common(ctx);
  ctx.outputs[0].dtype = DType::boolean;
}
void infer_test(InferContext& ctx) {
  detail::infer_unary_any(ctx);
  ctx.outputs[0].dtype = DType::boolean;
}
void infer_logical(InferContext& ctx) {
  for (int i = 0; i < ctx.size(); ++i) check_defined(ctx.input(i), ctx.name(), "an input");
  ctx.cast(DType::boolean);
  infer_elementwise(ctx, DType::boolean);
}
void infer_bits(InferContext& ctx) {
  detail::infer_common(ctx);
  if (is_floating(ctx.outputs[0].dtype)) {
    fail<DTypeError>("{}: expected integers or bool, got {}", ctx.name(), name(ctx.outputs[0].dtype));
  }
}

void check_mask(const InferContext& ctx, const Tensor& mask, const char* what) {
  check_defined(mask, ctx.name(), what);
  if (mask.dtype() != DType::boolean) {
    fail<DTypeError>("{}: expected {} of bool, got {} {}; compare it with 0 first", ctx.name(), what,
                     name(mask.dtype()), mask.sizes().str());
  }
}

const Op& define_compare(const char* name, const char* signature) {
  return define_op({.name = name, .signature = signature, .infer = infer_compare});
}
const Op& eq_op = define_compare("eq", "eq(input, other)");
const Op& ne_op = define_compare("ne", "ne(input, other)");
const Op& lt_op = define_compare("lt", "lt(input, other)");
const Op& le_op = define_compare("le", "le(input, other)");
const Op& gt_op = define_compare("gt", "gt(input, other)");
const Op& ge_op = define_compare("ge", "ge(input, other)");
const Op& isnan_op = define_op({.name = "isnan", .signature = "isnan(input)", .infer = infer_test});
const Op& isinf_op = define_op({.name = "isinf", .signature = "isinf(input)", .infer = infer_test});
const Op& isfinite_op = define_op({.name = "isfinite", .signature = "isfinite(input)", .infer = infer_test});
const Op& logical_and_op =
    define_op({.name = "logical_and", .signature = "logical_and(input, other)", .infer = infer_logical});
const Op& logical_or_op =
    define_op({.name = "logical_or", .signature = "logical_or(input, other)", .infer = infer_logical});
const Op& logical_xor_op =
    define_op({.name = "logical_xor", .signature = "logical_xor(input, other)", .infer = infer_logical});
const Op& logical_not_op =
    define_op({.name = "logical_not", .signature = "logical_not(input)", .infer = infer_logical});
const Op& bitwise_and_op =
    define_op({.name = "bitwise_and", .signature = "bitwise_and(input, other)", .infer = infer_bits});
const Op& bitwise_or_op =
    define_op({.name = "bitwise_or", .signature = "bitwise_or(input, other)", .infer = infer_bits});
const Op& bitwise_xor_op =
    define_op({.name = "bitwise_xor", .signature = "bitwise_xor(input, other)", .infer = infer_bits});
const Op& bitwise_not_op = define_op({.name = "bitwise_not", .signature = "bitwise_not(input)", .infer = infer_bits});

const Op& where_op = define_op({
    .name = "where",
    .signature = "where(condition, input, other)",
    .infer =
        [](InferContext& ctx) {
          check_mask(ctx, ctx.input(0), "a condition");
          const Tensor &a = ctx.input(1), &b = ctx.input(2);
          check_defined(a, ctx.name(), "an input");
          check_defined(b, ctx.name(), "an input");
          DType dtype = a.dtype();
          if (dtype != b.dtype()) {
            const Tensor* both[] = {&a, &b};
            dtype = result_type(both, ctx.name());
            ctx.cast(dtype, 0b110);
          }
          infer_elementwise(ctx, dtype);
        },
    .grad =
        [](GradContext& c) {
          if (c.needs(1)) c.set(1, masked_fill(c.grad(), logical_not(c.input(0)), 0));
          if (c.needs(2)) c.set(2, masked_fill(c.grad(), c.input(0), 0));
        },
    .saves = {0, in(0), in(0)},
    .key = 1,
});

const Op& masked_fill_op = define_op({
    .name = "masked_fill",
    .signature = "masked_fill(input, mask, value)",
    .infer =
        [](InferContext& ctx) {
          check_defined(ctx.input(0), ctx.name(), "a tensor");
          check_mask(ctx, ctx.input(1), "a mask");
          infer_elementwise(ctx, ctx.input(0).dtype());
        },
    .grad = [](GradContext& c) { c.set(0, masked_fill(c.grad(), c.input(1), 0)); },
    .saves = {in(1)},
    .attributes = &attribute_struct<ScalarAttributes>(),
});

}  // namespace

Tensor eq(const Tensor& input, const Tensor& other) { return call(eq_op, {&input, &other}); }
Tensor ne(const Tensor& input, const Tensor& other) { return call(ne_op, {&input, &other}); }
Tensor lt(const Tensor& input, const Tensor& other) { return call(lt_op, {&input, &other}); }
Tensor le(const Tensor& input, const Tensor& other) { return call(le_op, {&input, &other}); }
Tensor gt(const Tensor& input, const Tensor& other) { return call(gt_op, {&input, &other}); }
Tensor ge(const Tensor& input, const Tensor& other) { return call(ge_op, {&input, &other}); }
Tensor eq(const Tensor& input, Scalar other) { return eq(input, number_tensor(input, other, "eq")); }
Tensor ne(const Tensor& input, Scalar other) { return ne(input, number_tensor(input, other, "ne")); }
Tensor lt(const Tensor& input, Scalar other) { return lt(input, number_tensor(input, other, "lt")); }
Tensor le(const Tensor& input, Scalar other) { return le(input, number_tensor(input, other, "le")); }
Tensor gt(const Tensor& input, Scalar other) { return gt(input, number_tensor(input, other, "gt")); }
Tensor ge(const Tensor& input, Scalar other) { return ge(input, number_tensor(input, other, "ge")); }
Tensor isnan(const Tensor& input) { return call(isnan_op, {&input}); }
Tensor isinf(const Tensor& input) { return call(isinf_op, {&input}); }
Tensor isfinite(const Tensor& input) { return call(isfinite_op, {&input}); }
Tensor logical_and(const Tensor& input, const Tensor& other) { return call(logical_and_op, {&input, &other}); }
Tensor logical_or(const Tensor& input, const Tensor& other) { return call(logical_or_op, {&input, &other}); }
Tensor logical_xor(const Tensor& input, const Tensor& other) { return call(logical_xor_op, {&input, &other}); }
Tensor logical_not(const Tensor& input) { return call(logical_not_op, {&input}); }
Tensor bitwise_and(const Tensor& input, const Tensor& other) { return call(bitwise_and_op, {&input, &other}); }
Tensor bitwise_or(const Tensor& input, const Tensor& other) { return call(bitwise_or_op, {&input, &other}); }
Tensor bitwise_xor(const Tensor& input, const Tensor& other) { return call(bitwise_xor_op, {&input, &other}); }
Tensor bitwise_not(const Tensor& input) { return call(bitwise_not_op, {&input}); }

Tensor where(const Tensor& condition, const Tensor& input, const Tensor& other) {
  return call(where_op, {&condition, &input, &other});
}
Tensor where(const Tensor& condition, const Tensor& input, Scalar other) {
  return where(condition, input, number_tensor(input, other, "where"));
}
Tensor where(const Tensor& condition, Scalar input, const Tensor& other) {
  return where(condition, number_tensor(other, input, "where"), other);
}
Tensor masked_fill(const Tensor& input, const Tensor& mask, Scalar value) {
  return call(masked_fill_op, {&input, &mask}, scalar_attributes(value));
}
Tensor& masked_fill_(Tensor& input, const Tensor& mask, Scalar value) {
  return call_in_place(masked_fill_op, input, {&mask}, scalar_attributes(value));
}
double mask_value(DType dtype) {
  if (!is_floating(dtype)) fail<DTypeError>("mask_value: expected a floating dtype, got {}", name(dtype));
  return lowest_finite(dtype);
}

}  // namespace halfstep
