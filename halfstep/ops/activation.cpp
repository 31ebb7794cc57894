// SPDX-License-Identifier: Apache-2.0
// Each gradient is a kernel of its own, in one pass. When the backward pass is recorded it steps aside for the formula
// in recorded ops.
#include "halfstep/ops/activation.h"

#include <numbers>

#include "halfstep/core/fail.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/pointwise_internal.h"
#include "halfstep/ops/view.h"

namespace halfstep {
namespace {

using detail::define_unary;
using detail::infer_unary_floating;
using detail::infer_unary_numeric;

void infer_activation(InferContext& ctx) {
  check_defined(ctx.input(0), ctx.name(), "a tensor");
  check_floating(ctx.input(0), ctx.name());
  infer_elementwise(ctx, ctx.input(0).dtype());
}

const Tensor& g(GradContext& c) { return c.grad(); }
const Tensor& x(GradContext& c) { return c.input(0); }
const Tensor& y(GradContext& c) { return c.output(); }
const ActivationAttributes& attributes(GradContext& c) { return c.attributes<ActivationAttributes>(); }

const Op& define_parametric(const char* name, const char* signature, GradFn grad) {
  Op op{.name = name, .signature = signature};
  op.infer = infer_activation;
  op.grad = grad;
  op.saves[0] = in(0);
  op.attributes = &attribute_struct<ActivationAttributes>();
  return define_op(op);
}
// Gradient kernels: (grad, x or y).
const Op& define_backward(const char* name, bool parametric = false) {
  Op op{.name = name, .signature = "grad, input or output"};
  op.infer = detail::infer_common_floating;
  if (parametric) op.attributes = &attribute_struct<ActivationAttributes>();
  op.backward = true;
  return define_op(op);
}

// The gradient where the output is positive; linear in the gradient, and a step function of the output.
const Op& relu_backward_op = define_op({
    .name = "relu_backward",
    .signature = "relu_backward(grad, output)",
    .infer = detail::infer_common_floating,
    .grad =
        [](GradContext& c) {
          if (c.needs(0)) c.set(0, call(c.op(), {&c.grad(), &c.input(1)}));
          if (c.needs(1)) c.set(1, zeros(c.input_sizes(1), {.dtype = c.input_dtype(1), .device = c.device(1)}));
        },
    .saves = {in(1)},
    .backward = true,
});
const Op& relu_op = define_unary(
    "relu", infer_unary_numeric,
    [](GradContext& c) {
      c.set(0, call(relu_backward_op, {&g(c), &y(c)}));
    },
    out(0));

const Op& leaky_relu_backward_op = define_backward("leaky_relu_backward", true);
const Op& leaky_relu_op = define_parametric("leaky_relu", "leaky_relu(input, negative_slope=0.01)", [](GradContext& c) {
  c.set(0, c.create_graph ? where(gt(x(c), 0), g(c), g(c) * attributes(c).a)
                          : call(leaky_relu_backward_op, {&g(c), &x(c)}, attributes(c)));
});

const Op& elu_backward_op = define_backward("elu_backward", true);
const Op& elu_op = define_parametric("elu", "elu(input, alpha=1, scale=1)", [](GradContext& c) {
  const auto& a = attributes(c);
  if (c.create_graph) {
    // exp of the positive side isn't used, and must not overflow: its gradient would be 0 * infinity.
    const Tensor low = exp(clamp_max(x(c), 0)) * (a.a * a.b);
    c.set(0, g(c) * where(le(x(c), 0), low, Scalar(a.b)));
  } else {
    c.set(0, call(elu_backward_op, {&g(c), &x(c)}, a));
  }
});

const Op& prelu_op = define_op({
    .name = "prelu",
    .signature = "prelu(input, weight)",
    .infer = detail::infer_common_floating,
    .grad =
        [](GradContext& c) {
          const Tensor positive = gt(c.input(0), 0);
          if (c.needs(0)) c.set(0, where(positive, g(c), g(c) * c.input(1)));
          if (c.needs(1)) c.set(1, masked_fill(g(c) * c.input(0), positive, 0));
        },
    .saves = {in(0, 1), in(0)},
});

const Op& gelu_backward_op = define_backward("gelu_backward");
const Op& gelu_op = define_unary(
    "gelu", infer_activation,
    [](GradContext& c) {
      if (c.create_graph) {
        // Phi(x) + x phi(x)
        constexpr double kSqrtHalf = 1 / std::numbers::sqrt2;
        const Tensor phi = erfc(x(c) * -kSqrtHalf) * 0.5;
        const Tensor bell = exp(square(x(c)) * -0.5) * (kSqrtHalf * std::numbers::inv_sqrtpi);
        c.set(0, g(c) * (phi + x(c) * bell));
      } else {
        c.set(0, call(gelu_backward_op, {&g(c), &x(c)}));
      }
    },
    in(0));

const Op& gelu_tanh_backward_op = define_backward("gelu_tanh_backward");
const Op& gelu_tanh_op = define_unary(
    "gelu_tanh", infer_activation,
    [](GradContext& c) {
      if (c.create_graph) {
        constexpr double kTwice = 2 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi;
        constexpr double kCubic = 0.044715;
        // Beyond 50 s is 0 or 1 in any dtype, and an infinite square would make NaN of s (1 - s), of which 16 bits have
        // few digits.
        const Tensor near = clamp(is_low_precision(c.input_dtype(0)) ? x(c).to(f32) : x(c), -50, 50);
        const Tensor s = sigmoid((near + pow(near, 3) * kCubic) * kTwice);
        const Tensor slope = square(near) * (3 * kCubic * kTwice) + kTwice;
        c.set(0, g(c) * (s + near * slope * (s * (1 - s))));
      } else {
        c.set(0, call(gelu_tanh_backward_op, {&g(c), &x(c)}));
      }
    },
    in(0));

const Op& silu_backward_op = define_backward("silu_backward");
const Op& silu_op = define_unary(
    "silu", infer_activation, [](GradContext& c) { c.set(0, detail::silu_gradient(g(c), x(c), c.create_graph)); },
    in(0));

const Op& mish_backward_op = define_backward("mish_backward");
const Op& mish_op = define_unary(
    "mish", infer_activation,
    [](GradContext& c) {
      if (c.create_graph) {
        const Tensor t = tanh(softplus(x(c)));
        c.set(0, g(c) * (t + x(c) * sigmoid(x(c)) * (1 - square(t))));
      } else {
        c.set(0, call(mish_backward_op, {&g(c), &x(c)}));
      }
    },
    in(0));

const Op& hardswish_backward_op = define_backward("hardswish_backward");
const Op& hardswish_op = define_unary(
    "hardswish", infer_activation,
    [](GradContext& c) {
      if (c.create_graph) {
        const Tensor slope = where(lt(x(c), 3), x(c) / 3 + 0.5, 1.0);
        c.set(0, g(c) * masked_fill(slope, le(x(c), -3), 0));
      } else {
        c.set(0, call(hardswish_backward_op, {&g(c), &x(c)}));
      }
    },
    in(0));

const Op& hardsigmoid_op = define_unary(
    "hardsigmoid", infer_activation, [](GradContext& c) { c.set(0, where(lt(abs(x(c)), 3), g(c) / 6, 0.0)); }, in(0));

// Linear in the gradient, and a step function of the input, as clamp's; but the gradient of NaN passes.
Tensor hardtanh_backward(const Tensor& grad, const Tensor& input, const ClampAttributes& attributes);
const Op& hardtanh_backward_op = define_op({
    .name = "hardtanh_backward",
    .signature = "hardtanh_backward(grad, input, min, max)",
    .infer = detail::infer_common_floating,
    .grad =
        [](GradContext& c) {
          if (c.needs(0)) c.set(0, hardtanh_backward(c.grad(), c.input(1), c.attributes<ClampAttributes>()));
          if (c.needs(1)) c.set(1, zeros(c.input_sizes(1), {.dtype = c.input_dtype(1), .device = c.device(1)}));
        },
    .saves = {in(1)},
    .attributes = &attribute_struct<ClampAttributes>(),
    .backward = true,
});
Tensor hardtanh_backward(const Tensor& grad, const Tensor& input, const ClampAttributes& attributes) {
  return call(hardtanh_backward_op, {&grad, &input}, attributes);
}
const Op& hardtanh_op = define_op({
    .name = "hardtanh",
    .signature = "hardtanh(input, min=-1, max=1)",
    .infer = infer_activation,
    .grad = [](GradContext& c) { c.set(0, hardtanh_backward(g(c), x(c), c.attributes<ClampAttributes>())); },
    .saves = {in(0)},
    .attributes = &attribute_struct<ClampAttributes>(),
});

const Op& sigmoid_backward_op = define_backward("sigmoid_backward");
const Op& sigmoid_op = define_unary(
    "sigmoid", infer_unary_floating,
    [](GradContext& c) {
      c.set(0, c.create_graph ? g(c) * (y(c) * (1 - y(c))) : call(sigmoid_backward_op, {&g(c), &y(c)}));
    },
    out(0));

const Op& logsigmoid_backward_op = define_backward("logsigmoid_backward");
const Op& logsigmoid_op = define_unary(
    "logsigmoid", infer_activation,
    [](GradContext& c) {
      c.set(0, c.create_graph ? g(c) * sigmoid(neg(x(c))) : call(logsigmoid_backward_op, {&g(c), &x(c)}));
    },
    in(0));

const Op& softplus_backward_op = define_backward("softplus_backward", true);
const Op& softplus_op = define_parametric("softplus", "softplus(input, beta=1, threshold=20)", [](GradContext& c) {
  const auto& a = attributes(c);
  if (c.create_graph) {
    const Tensor scaled = x(c) * a.a;
    c.set(0, where(gt(scaled, a.b), g(c), g(c) * sigmoid(scaled)));
  } else {
    c.set(0, call(softplus_backward_op, {&g(c), &x(c)}, a));
  }
});

const Op& threshold_op = define_parametric("threshold", "threshold(input, threshold, value)", [](GradContext& c) {
  c.set(0, masked_fill(g(c), le(x(c), attributes(c).a), 0));
});

ActivationAttributes parameters(double a, double b = 0) { return {.a = a, .b = b}; }

}  // namespace

Tensor relu(const Tensor& input) { return call(relu_op, {&input}); }
Tensor& relu_(Tensor& input) { return call_in_place(relu_op, input, {}); }
Tensor leaky_relu(const Tensor& input, double negative_slope) {
  return call(leaky_relu_op, {&input}, parameters(negative_slope));
}
Tensor& leaky_relu_(Tensor& input, double negative_slope) {
  return detail::in_place_keeping_input(leaky_relu_op, input, parameters(negative_slope));
}
Tensor prelu(const Tensor& input, const Tensor& weight) {
  check_defined(input, "prelu", "a tensor");
  check_defined(weight, "prelu", "a weight");
  const std::int64_t channels = input.dim() > 1 ? input.size(1) : 1;
  if (weight.dim() > 1 || (weight.numel() != 1 && weight.numel() != channels)) {
    fail<ShapeError>("prelu: expected a weight of 1 element or {} (the channels of {}), got {}", channels,
                     input.sizes().str(), weight.sizes().str());
  }
  if (weight.numel() == 1 || input.dim() < 2) return call(prelu_op, {&input, &weight});
  Shape shape = Shape::filled(input.dim(), 1);
  shape[1] = channels;
  const Tensor slopes = weight.view(shape);
  return call(prelu_op, {&input, &slopes});
}
Tensor elu(const Tensor& input, double alpha) { return call(elu_op, {&input}, parameters(alpha, 1)); }
Tensor selu(const Tensor& input) {
  return call(elu_op, {&input}, parameters(1.6732632423543772848170429916717, 1.0507009873554804934193349852946));
}
Tensor gelu(const Tensor& input, GeluForm form) {
  return call(form == GeluForm::tanh ? gelu_tanh_op : gelu_op, {&input});
}
Tensor silu(const Tensor& input) { return call(silu_op, {&input}); }
Tensor detail::silu_gradient(const Tensor& grad, const Tensor& input, bool recorded) {
  if (!recorded) return call(silu_backward_op, {&grad, &input});
  const Tensor s = sigmoid(input);
  return grad * (s * (input * (1 - s) + 1));
}
Tensor& silu_(Tensor& input) { return detail::in_place_keeping_input(silu_op, input); }
Tensor mish(const Tensor& input) { return call(mish_op, {&input}); }
Tensor relu6(const Tensor& input) {
  check_defined(input, "relu6", "a tensor");
  return is_floating(input.dtype()) ? hardtanh(input, 0, 6) : clamp(input, 0, 6);
}
Tensor hardtanh(const Tensor& input, double min, double max) {
  check_defined(input, "hardtanh", "a tensor");
  if (!is_floating(input.dtype())) return clamp(input, min, max);
  return call(hardtanh_op, {&input}, ClampAttributes{.min = min, .max = max});
}
Tensor hardswish(const Tensor& input) { return call(hardswish_op, {&input}); }
Tensor hardsigmoid(const Tensor& input) { return call(hardsigmoid_op, {&input}); }
Tensor sigmoid(const Tensor& input) { return call(sigmoid_op, {&input}); }
Tensor& sigmoid_(Tensor& input) { return call_in_place(sigmoid_op, input, {}); }
Tensor logsigmoid(const Tensor& input) { return call(logsigmoid_op, {&input}); }
Tensor softplus(const Tensor& input, double beta, double threshold) {
  return call(softplus_op, {&input}, parameters(beta, threshold));
}
Tensor threshold(const Tensor& input, double threshold, double value) {
  return call(threshold_op, {&input}, parameters(threshold, value));
}

}  // namespace halfstep
