// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/ratio.h"

#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/pointwise_internal.h"

namespace halfstep {
namespace {

const Op& mul_wide_op = define_op({
    .name = "mul_wide",
    .signature = "mul_wide(input, factor)",
    .infer =
        [](InferContext& ctx) {
          ctx.cast(DType::f64, 0b10);
          infer_elementwise(ctx, ctx.input(0).dtype());
        },
    .grad =
        [](GradContext& c) {
          if (c.needs(0)) c.set(0, detail::mul_wide(c.grad(), c.input(1)));
          if (c.needs(1)) c.set(1, c.grad().to(f64) * c.input(0).to(f64));
        },
    .saves = {in(1), in(0)},
    .backward = true,
});

const Op& define_ratio(const char* name, const char* signature, GradFn grad) {
  Op op{.name = name, .signature = signature};
  op.infer = detail::infer_common_floating;
  op.grad = grad;
  op.saves = {in(1, 2), in(0, 1, 2), in(0, 1, 2)};
  op.backward = true;
  return define_op(op);
}

// Of the second order, with h for what comes in. Each is a product of the same four ratios, so that derivatives of any
// order have their range.
const Op& scaled_ratio_op = define_ratio("scaled_ratio", "scaled_ratio(grad, a, b)", [](GradContext& c) {
  using detail::scaled_ratio;
  const Tensor &h = c.grad(), &g = c.input(0), &a = c.input(1), &b = c.input(2);
  if (c.needs(0)) c.set(0, scaled_ratio(h, a, b));
  if (c.needs(1)) c.set(1, scaled_ratio(h, g, b));
  if (c.needs(2)) c.set(2, neg(scaled_ratio(scaled_ratio(h, g, b), a, b)));
});
const Op& div_backward_op = define_ratio("div_backward", "div_backward(grad, a, b)", [](GradContext& c) {
  using detail::div_backward;
  const Tensor &h = c.grad(), &g = c.input(0), &a = c.input(1), &b = c.input(2);
  if (c.needs(0)) c.set(0, div_backward(h, a, b));
  if (c.needs(1)) c.set(1, div_backward(h, g, b));
  if (c.needs(2)) c.set(2, div_backward(h, a, b) * (g / b) * -2);  // 2 h g a / b^3
});
const Op& hypot_backward_op = define_ratio("hypot_backward", "hypot_backward(grad, a, b)", [](GradContext& c) {
  using detail::atan2_backward;
  using detail::hypot_backward;
  const Tensor &h = c.grad(), &a = c.input(1), &b = c.input(2);
  if (c.needs(0)) c.set(0, hypot_backward(h, a, b));
  if (!c.needs(1) && !c.needs(2)) return;
  const Tensor hg = h * c.input(0);
  if (c.needs(1)) c.set(1, atan2_backward(hypot_backward(hg, b, a), a, b));       // b^2 / r^3
  if (c.needs(2)) c.set(2, neg(atan2_backward(hypot_backward(hg, a, b), a, b)));  // -a b / r^3
});
const Op& atan2_backward_op = define_ratio("atan2_backward", "atan2_backward(grad, a, b)", [](GradContext& c) {
  using detail::atan2_backward;
  const Tensor &h = c.grad(), &a = c.input(1), &b = c.input(2);
  if (c.needs(0)) c.set(0, atan2_backward(h, a, b));
  if (!c.needs(1) && !c.needs(2)) return;
  const Tensor hg = h * c.input(0), first = atan2_backward(hg, b, a);
  if (c.needs(1)) c.set(1, atan2_backward(first, a, b) * -2);  // -2 a b / r^4
  // (a^2 - b^2) / r^4
  if (c.needs(2)) c.set(2, atan2_backward(first, b, a) - atan2_backward(atan2_backward(hg, a, b), a, b));
});

}  // namespace

Tensor detail::mul_wide(const Tensor& x, const Tensor& factor) { return call(mul_wide_op, {&x, &factor}); }
Tensor detail::scaled_ratio(const Tensor& grad, const Tensor& a, const Tensor& b) {
  return call(scaled_ratio_op, {&grad, &a, &b});
}
Tensor detail::div_backward(const Tensor& grad, const Tensor& a, const Tensor& b) {
  return call(div_backward_op, {&grad, &a, &b});
}
Tensor detail::hypot_backward(const Tensor& grad, const Tensor& a, const Tensor& b) {
  return call(hypot_backward_op, {&grad, &a, &b});
}
Tensor detail::atan2_backward(const Tensor& grad, const Tensor& a, const Tensor& b) {
  return call(atan2_backward_op, {&grad, &a, &b});
}

}  // namespace halfstep
