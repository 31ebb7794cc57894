// SPDX-License-Identifier: Apache-2.0
// Activations, with PyTorch's names and definitions. All work elementwise on floating tensors (relu on integers too),
// keep dtype and layout, compute 16-bit inputs in float32 and round once, and take the limits at infinities: gelu, silu
// and mish are 0 at -infinity.
#pragma once

#include "halfstep/core/tensor.h"

namespace halfstep {

/// max(input, 0); NaN stays. The gradient needs the result only.
HS_API Tensor relu(const Tensor& input);
HS_API Tensor& relu_(Tensor& input);
/// min(max(input, 0), 6). NaN stays, and its gradient passes, as PyTorch's formula has it (and in hardtanh, elu and
/// hardswish; its vector code differs from it there).
HS_API Tensor relu6(const Tensor& input);
/// input where it is positive, negative_slope * input elsewhere.
HS_API Tensor leaky_relu(const Tensor& input, double negative_slope = 0.01);
HS_API Tensor& leaky_relu_(Tensor& input, double negative_slope = 0.01);
/// leaky_relu with learned slopes: `weight` has one element, or one for each channel (dimension 1 of `input`). Throws
/// ShapeError otherwise.
HS_API Tensor prelu(const Tensor& input, const Tensor& weight);
/// input where it is positive, alpha * (exp(input) - 1) elsewhere.
HS_API Tensor elu(const Tensor& input, double alpha = 1);
/// elu with the constants of "Self-Normalizing Neural Networks" (arXiv 1706.02515).
HS_API Tensor selu(const Tensor& input);
/// Which form of gelu: x Phi(x), or the one with tanh that older checkpoints were trained with.
enum class GeluForm : std::uint8_t { exact, tanh };
/// x Phi(x), Phi being the standard normal distribution function ("Gaussian Error Linear Units", arXiv 1606.08415).
/// The lower tail keeps its digits: nothing cancels.
HS_API Tensor gelu(const Tensor& input, GeluForm form = GeluForm::exact);
/// input * sigmoid(input)
HS_API Tensor silu(const Tensor& input);
namespace detail {
/// silu's gradient rule, for ops that contain it: grad * silu'(input); of recorded ops if `recorded`.
Tensor silu_gradient(const Tensor& grad, const Tensor& input, bool recorded);
}  // namespace detail
HS_API Tensor& silu_(Tensor& input);
/// input * tanh(softplus(input))
HS_API Tensor mish(const Tensor& input);
/// Brings values into [min, max]; the gradient is 0 on the bounds and beyond. A bound that is NaN makes all elements
/// NaN, and the gradient is that of the other bound (as PyTorch has both).
HS_API Tensor hardtanh(const Tensor& input, double min = -1, double max = 1);
/// input * relu6(input + 3) / 6
HS_API Tensor hardswish(const Tensor& input);
/// relu6(input + 3) / 6
HS_API Tensor hardsigmoid(const Tensor& input);
/// 1 / (1 + exp(-input)), without overflow. Integers compute as f32.
HS_API Tensor sigmoid(const Tensor& input);
HS_API Tensor& sigmoid_(Tensor& input);
/// log(sigmoid(input)), exact in the lower tail too.
HS_API Tensor logsigmoid(const Tensor& input);
/// log(1 + exp(beta * input)) / beta; input itself where beta * input is above `threshold`.
HS_API Tensor softplus(const Tensor& input, double beta = 1, double threshold = 20);
/// input where it is above `threshold`, `value` elsewhere.
HS_API Tensor threshold(const Tensor& input, double threshold, double value);

}  // namespace halfstep
