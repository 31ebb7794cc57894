// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/softmax.h"

#include <cstddef>

#include "halfstep/core/fail.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/reduce.h"

namespace halfstep {
namespace {

void infer_softmax(InferContext& ctx) {
  const Tensor& x = ctx.input(0);
  ctx.output(x.sizes(), dtype_or(ctx.attributes<DimAttributes>().dtype, x.dtype()));
}
// Inputs: gradient and result.
void infer_softmax_backward(InferContext& ctx) {
  const Tensor& y = ctx.input(1);
  ctx.output(y.sizes(), dtype_or(ctx.attributes<DimAttributes>().dtype, y.dtype()));
}

const Op& softmax_backward_op = define_op({
    .name = "softmax_backward",
    .signature = "softmax_backward(gradient, output, dim)",
    .infer = infer_softmax_backward,
    .attributes = &attribute_struct<DimAttributes>(),
    .key = 1,
    .backward = true,
});
const Op& log_softmax_backward_op = define_op({
    .name = "log_softmax_backward",
    .signature = "log_softmax_backward(gradient, output, dim)",
    .infer = infer_softmax_backward,
    .attributes = &attribute_struct<DimAttributes>(),
    .key = 1,
    .backward = true,
});

Tensor fused_backward(const Op& op, GradContext& c) {
  DimAttributes a = c.attributes<DimAttributes>();
  a.dtype = dtype_code(c.grad_dtype(0));
  return call(op, {&c.grad(), &c.output()}, a);
}

const Op& softmax_op = define_op({
    .name = "softmax",
    .signature = "softmax(input, dim, dtype=none)",
    .infer = infer_softmax,
    .grad =
        [](GradContext& c) {
          if (!c.create_graph) return c.set(0, fused_backward(softmax_backward_op, c));
          const Tensor& y = c.output();
          const std::int64_t dim = c.attributes<DimAttributes>().dim;
          c.set(0, y * (c.grad() - sum(c.grad() * y, {dim}, {.keepdim = true})));
        },
    .saves = {out(0)},
    .attributes = &attribute_struct<DimAttributes>(),
    .dtype_attribute = offsetof(DimAttributes, dtype),
});
const Op& log_softmax_op = define_op({
    .name = "log_softmax",
    .signature = "log_softmax(input, dim, dtype=none)",
    .infer = infer_softmax,
    .grad =
        [](GradContext& c) {
          if (!c.create_graph) return c.set(0, fused_backward(log_softmax_backward_op, c));
          const std::int64_t dim = c.attributes<DimAttributes>().dim;
          // The result is normalised, so its softmax is its exponential.
          c.set(0, c.grad() - softmax(c.output(), dim) * sum(c.grad(), {dim}, {.keepdim = true}));
        },
    .saves = {out(0)},
    .attributes = &attribute_struct<DimAttributes>(),
    .dtype_attribute = offsetof(DimAttributes, dtype),
});

Tensor call_softmax(const Op& op, const Tensor& input, std::int64_t dim, const SoftmaxFuncOptions& options) {
  check_defined(input, op.name, "a tensor");
  check_floating(input, op.name);
  DimAttributes a{.dim = wrap_dim(dim, input.dim(), op.name)};
  if (options.dtype) {
    if (!is_floating(*options.dtype)) {
      fail<DTypeError>("{}: expected a floating dtype for the result, got {}", op.name, name(*options.dtype));
    }
    a.dtype = dtype_code(*options.dtype);
  }
  return call(op, {&input}, a);
}

}  // namespace

Tensor softmax(const Tensor& input, std::int64_t dim, const SoftmaxFuncOptions& options) {
  return call_softmax(softmax_op, input, dim, options);
}
Tensor log_softmax(const Tensor& input, std::int64_t dim, const SoftmaxFuncOptions& options) {
  return call_softmax(log_softmax_op, input, dim, options);
}

}  // namespace halfstep
