// SPDX-License-Identifier: Apache-2.0
// Functions of two and three tensors, and clamp.
#include <cmath>
#include <limits>

#include "halfstep/core/fail.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/pointwise_internal.h"
#include "halfstep/ops/ratio.h"

namespace halfstep {
namespace {

using detail::number_of;
using detail::scalar_attributes;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The winner takes the gradient; equal ones take half each, and NaN passes it to both.
void extreme_gradient(GradContext& c, const Tensor& input_loses, const Tensor& other_loses) {
  const Tensor ties = eq(c.input(0), c.input(1));
  const Tensor shared = where(ties, c.grad() * 0.5, c.grad());
  if (c.needs(0)) c.set(0, masked_fill(shared, input_loses, 0));
  if (c.needs(1)) c.set(1, masked_fill(shared, other_loses, 0));
}

const Op& maximum_op = define_op({
    .name = "maximum",
    .signature = "maximum(input, other)",
    .infer = detail::infer_common,
    .grad = [](GradContext& c) { extreme_gradient(c, lt(c.input(0), c.input(1)), lt(c.input(1), c.input(0))); },
    .saves = {in(0, 1), in(0, 1)},
});
const Op& minimum_op = define_op({
    .name = "minimum",
    .signature = "minimum(input, other)",
    .infer = detail::infer_common,
    .grad = [](GradContext& c) { extreme_gradient(c, gt(c.input(0), c.input(1)), gt(c.input(1), c.input(0))); },
    .saves = {in(0, 1), in(0, 1)},
});
const Op& fmod_op = define_op({
    .name = "fmod",
    .signature = "fmod(input, other)",
    .infer = detail::infer_common_numeric,
    .grad =
        [](GradContext& c) {
          if (c.needs(0)) c.set(0, c.grad());
          if (c.needs(1)) c.set(1, neg(c.grad() * trunc(c.input(0) / c.input(1))));
        },
    .saves = {0, in(0, 1)},
});
const Op& remainder_op = define_op({
    .name = "remainder",
    .signature = "remainder(input, other)",
    .infer = detail::infer_common_numeric,
    .grad =
        [](GradContext& c) {
          if (c.needs(0)) c.set(0, c.grad());
          if (c.needs(1)) c.set(1, neg(c.grad() * floor_divide(c.input(0), c.input(1))));
        },
    .saves = {0, in(0, 1)},
});
const Op& floor_divide_op = define_op({
    .name = "floor_divide",
    .signature = "floor_divide(input, other)",
    .infer = detail::infer_common_numeric,
});
const Op& pow_op = define_op({
    .name = "pow",
    .signature = "pow(input, exponent)",
    .infer = detail::infer_common_numeric,
    .grad =
        [](GradContext& c) {
          const Tensor &base = c.input(0), &exponent = c.input(1);
          // x^0 is 1 for every x, 0^e is 0 for every e > 0: there the factors would be 0 * infinity.
          if (c.needs(0)) {
            const Tensor slope = c.grad() * (exponent * pow(base, exponent - 1));
            c.set(0, masked_fill(slope, eq(exponent, 0), 0));
          }
          if (c.needs(1)) {
            const Tensor slope = c.grad() * (c.output() * log(base));
            c.set(1, masked_fill(slope, logical_and(eq(base, 0), ge(exponent, 0)), 0));
          }
        },
    .saves = {in(0, 1), in(0, 1) | out(0)},
});
const Op& pow_scalar_op = define_op({
    .name = "pow_scalar",
    .signature = "pow(input, number)",
    .infer = detail::infer_with_number,
    .grad =
        [](GradContext& c) {
          const double e = c.attributes<ScalarAttributes>().value.floating;
          if (e == 0) {
            c.set(0, zeros(c.input_sizes(0), {.dtype = c.input_dtype(0), .device = c.device(0)}));
          } else if (e == 1) {
            c.set(0, c.grad());
          } else {
            c.set(0, c.grad() * (e == 2 ? c.input(0) * 2 : pow(c.input(0), e - 1) * e));
          }
        },
    .saves = {in(0)},
    .attributes = &attribute_struct<ScalarAttributes>(),
});
const Op& scalar_pow_op = define_op({
    .name = "scalar_pow",
    .signature = "pow(number, exponent)",
    .infer = detail::infer_with_number,
    .grad =
        [](GradContext& c) {
          const double base = c.attributes<ScalarAttributes>().value.floating;
          if (base == 0) {
            const Tensor slope = c.grad() * (c.output() * -kInfinity);
            c.set(0, masked_fill(slope, ge(c.input(0), 0), 0));
          } else {
            c.set(0, c.grad() * (c.output() * std::log(base)));
          }
        },
    .saves = {in(0) | out(0)},
    .attributes = &attribute_struct<ScalarAttributes>(),
});
const Op& atan2_op = define_op({
    .name = "atan2",
    .signature = "atan2(input, other)",
    .infer = detail::infer_common_floating,
    .grad =
        [](GradContext& c) {
          if (c.needs(0)) c.set(0, detail::atan2_backward(c.grad(), c.input(0), c.input(1)));
          if (c.needs(1)) c.set(1, neg(detail::atan2_backward(c.grad(), c.input(1), c.input(0))));
        },
    .saves = {in(0, 1), in(0, 1)},
});
const Op& hypot_op = define_op({
    .name = "hypot",
    .signature = "hypot(input, other)",
    .infer = detail::infer_common_floating,
    .grad =
        [](GradContext& c) {
          if (c.needs(0)) c.set(0, detail::hypot_backward(c.grad(), c.input(0), c.input(1)));
          if (c.needs(1)) c.set(1, detail::hypot_backward(c.grad(), c.input(1), c.input(0)));
        },
    .saves = {in(0, 1), in(0, 1)},
});
const Op& lerp_op = define_op({
    .name = "lerp",
    .signature = "lerp(input, end, weight)",
    .infer = detail::infer_common_floating,
    .grad =
        [](GradContext& c) {
          if (c.needs(0)) c.set(0, c.grad() * (1 - c.input(2)));
          if (c.needs(1)) c.set(1, c.grad() * c.input(2));
          if (c.needs(2)) c.set(2, c.grad() * (c.input(1) - c.input(0)));
        },
    .saves = {in(2), in(2), in(0, 1)},
});
const Op& lerp_scalar_op = define_op({
    .name = "lerp_scalar",
    .signature = "lerp(input, end, number)",
    .infer = detail::infer_common_floating,
    .grad =
        [](GradContext& c) {
          const double weight = c.attributes<ScalarAttributes>().value.floating;
          if (c.needs(0)) c.set(0, c.grad() * (1 - weight));
          if (c.needs(1)) c.set(1, c.grad() * weight);
        },
    .attributes = &attribute_struct<ScalarAttributes>(),
});
const Op& addcmul_op = define_op({
    .name = "addcmul",
    .signature = "addcmul(input, tensor1, tensor2, value=1)",
    .infer = detail::infer_common_numeric,
    .grad =
        [](GradContext& c) {
          const Scalar value = number_of(c.attributes<ScalarAttributes>().value);
          if (c.needs(0)) c.set(0, c.grad());
          if (c.needs(1)) c.set(1, c.grad() * (c.input(2) * value));
          if (c.needs(2)) c.set(2, c.grad() * (c.input(1) * value));
        },
    .saves = {0, in(2), in(1)},
    .attributes = &attribute_struct<ScalarAttributes>(),
});
const Op& addcdiv_op = define_op({
    .name = "addcdiv",
    .signature = "addcdiv(input, tensor1, tensor2, value=1)",
    .infer =
        [](InferContext& ctx) {
          detail::infer_common(ctx);
          if (!is_floating(ctx.outputs[0].dtype)) {
            fail<DTypeError>("{}: expected floating inputs, got {}; convert with .to(f32)?", ctx.name(),
                             name(ctx.outputs[0].dtype));
          }
        },
    .grad =
        [](GradContext& c) {
          const Scalar value = number_of(c.attributes<ScalarAttributes>().value);
          if (c.needs(0)) c.set(0, c.grad());
          if (c.needs(1)) c.set(1, c.grad() * value / c.input(2));
          if (c.needs(2)) c.set(2, detail::div_backward(c.grad(), c.input(1), c.input(2)) * value);
        },
    .saves = {0, in(2), in(1, 2)},
    .attributes = &attribute_struct<ScalarAttributes>(),
});

// Linear in the gradient, and a step function of the input: its own gradient is itself.
Tensor clamp_backward(const Tensor& grad, const Tensor& input, const ClampAttributes& attributes);
const Op& clamp_backward_op = define_op({
    .name = "clamp_backward",
    .signature = "clamp_backward(grad, input, min, max)",
    .infer = detail::infer_common_floating,
    .grad =
        [](GradContext& c) {
          if (c.needs(0)) c.set(0, clamp_backward(c.grad(), c.input(1), c.attributes<ClampAttributes>()));
          if (c.needs(1)) c.set(1, zeros(c.input_sizes(1), {.dtype = c.input_dtype(1), .device = c.device(1)}));
        },
    .saves = {in(1)},
    .attributes = &attribute_struct<ClampAttributes>(),
    .backward = true,
});
Tensor clamp_backward(const Tensor& grad, const Tensor& input, const ClampAttributes& attributes) {
  return call(clamp_backward_op, {&grad, &input}, attributes);
}
const Op& clamp_op = define_op({
    .name = "clamp",
    .signature = "clamp(input, min=None, max=None)",
    .infer = detail::infer_unary_numeric,
    .grad = [](GradContext& c) { c.set(0, clamp_backward(c.grad(), c.input(0), c.attributes<ClampAttributes>())); },
    .saves = {in(0)},
    .attributes = &attribute_struct<ClampAttributes>(),
});

ClampAttributes clamp_attributes(const std::optional<Scalar>& min, const std::optional<Scalar>& max) {
  using Limits = std::numeric_limits<std::int64_t>;
  if (!min && !max) fail<Error>("clamp: expected min or max, got neither");
  return {.min = min ? min->to_double() : -kInfinity,
          .max = max ? max->to_double() : kInfinity,
          .integer_min = min ? min->to_int() : Limits::min(),
          .integer_max = max ? max->to_int() : Limits::max()};
}
// A floating bound makes a float of an integer tensor.
DType clamp_dtype(const Tensor& input, const std::optional<Scalar>& min, const std::optional<Scalar>& max) {
  check_defined(input, "clamp", "a tensor");
  const bool floating = (min && min->is_floating()) || (max && max->is_floating());
  return floating ? result_type(input, Scalar(0.0)) : input.dtype();
}

}  // namespace

Tensor maximum(const Tensor& input, const Tensor& other) { return call(maximum_op, {&input, &other}); }
Tensor minimum(const Tensor& input, const Tensor& other) { return call(minimum_op, {&input, &other}); }
Tensor fmod(const Tensor& input, const Tensor& other) { return call(fmod_op, {&input, &other}); }
Tensor fmod(const Tensor& input, Scalar other) { return fmod(input, detail::number_tensor(input, other, "fmod")); }
Tensor remainder(const Tensor& input, const Tensor& other) { return call(remainder_op, {&input, &other}); }
Tensor remainder(const Tensor& input, Scalar other) {
  return remainder(input, detail::number_tensor(input, other, "remainder"));
}
Tensor floor_divide(const Tensor& input, const Tensor& other) { return call(floor_divide_op, {&input, &other}); }
Tensor floor_divide(const Tensor& input, Scalar other) {
  return floor_divide(input, detail::number_tensor(input, other, "floor_divide"));
}
Tensor pow(const Tensor& input, const Tensor& exponent) { return call(pow_op, {&input, &exponent}); }
Tensor pow(const Tensor& input, Scalar exponent) {
  check_defined(input, "pow", "input 0");
  if (!is_floating(input.dtype()) && !exponent.is_floating() && exponent.to_int() < 0) {
    fail<Error>("pow: expected an exponent of 0 or more for {}, got {}; convert with .to(f32)?", name(input.dtype()),
                exponent.to_int());
  }
  return call(pow_scalar_op, {&input}, scalar_attributes(exponent));
}
Tensor pow(Scalar base, const Tensor& exponent) { return call(scalar_pow_op, {&exponent}, scalar_attributes(base)); }
Tensor atan2(const Tensor& input, const Tensor& other) { return call(atan2_op, {&input, &other}); }
Tensor hypot(const Tensor& input, const Tensor& other) { return call(hypot_op, {&input, &other}); }
Tensor& maximum_out(Tensor& out, const Tensor& input, const Tensor& other) {
  return call_out(maximum_op, out, {&input, &other});
}
Tensor& minimum_out(Tensor& out, const Tensor& input, const Tensor& other) {
  return call_out(minimum_op, out, {&input, &other});
}

Tensor lerp(const Tensor& input, const Tensor& end, const Tensor& weight) {
  return call(lerp_op, {&input, &end, &weight});
}
Tensor lerp(const Tensor& input, const Tensor& end, double weight) {
  return call(lerp_scalar_op, {&input, &end}, scalar_attributes(weight));
}
Tensor& lerp_(Tensor& input, const Tensor& end, double weight) {
  return call_in_place(lerp_scalar_op, input, {&end}, scalar_attributes(weight));
}
Tensor addcmul(const Tensor& input, const Tensor& tensor1, const Tensor& tensor2, Scalar value) {
  return call(addcmul_op, {&input, &tensor1, &tensor2}, scalar_attributes(value));
}
Tensor& addcmul_(Tensor& input, const Tensor& tensor1, const Tensor& tensor2, Scalar value) {
  return call_in_place(addcmul_op, input, {&tensor1, &tensor2}, scalar_attributes(value));
}
Tensor addcdiv(const Tensor& input, const Tensor& tensor1, const Tensor& tensor2, Scalar value) {
  return call(addcdiv_op, {&input, &tensor1, &tensor2}, scalar_attributes(value));
}
Tensor& addcdiv_(Tensor& input, const Tensor& tensor1, const Tensor& tensor2, Scalar value) {
  return call_in_place(addcdiv_op, input, {&tensor1, &tensor2}, scalar_attributes(value));
}

Tensor clamp(const Tensor& input, std::optional<Scalar> min, std::optional<Scalar> max) {
  const DType dtype = clamp_dtype(input, min, max);
  const Tensor converted = input.to(dtype);
  return call(clamp_op, {&converted}, clamp_attributes(min, max));
}
Tensor clamp(const Tensor& input, const Tensor& min, const Tensor& max) { return minimum(maximum(input, min), max); }
Tensor clamp_min(const Tensor& input, Scalar min) { return clamp(input, min); }
Tensor clamp_min(const Tensor& input, const Tensor& min) { return maximum(input, min); }
Tensor clamp_max(const Tensor& input, Scalar max) { return clamp(input, std::nullopt, max); }
Tensor clamp_max(const Tensor& input, const Tensor& max) { return minimum(input, max); }
Tensor& clamp_(Tensor& input, std::optional<Scalar> min, std::optional<Scalar> max) {
  if (clamp_dtype(input, min, max) != input.dtype()) {
    fail<DTypeError>("clamp_: expected integer bounds for a {} destination; use clamp", name(input.dtype()));
  }
  return detail::in_place_keeping_input(clamp_op, input, clamp_attributes(min, max));
}

}  // namespace halfstep
