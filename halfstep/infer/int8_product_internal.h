// SPDX-License-Identifier: Apache-2.0
// Internal: a product with a quantized weight and what follows it, as numbers of the integer ops.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "halfstep/infer/graph_internal.h"
#include "halfstep/infer/sites_internal.h"
#include "halfstep/nn/fold_internal.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/int8.h"

namespace halfstep::infer::detail {

/// Weights of an integer product.
struct Int8Weights {
  Tensor weight;  ///< i8
  Tensor scale;   ///< f32 [O], above 0
  Tensor bias;    ///< f32 [O]
};

/// The integers of a weight on its grid, with the factors and shifts (f64 [O]) of what follows the product: a factor
/// moves into the scale, its sign into the integers (which have no -128, as quant::prepare's), and the shift becomes
/// the bias. With a factor of 0 the bias stands alone.
///
/// The bias is float32, and no integer: rounded to a unit of the sums it moves a whole channel by up to a thousandth of
/// a step, whereas float32 sums of fake quantization are off by a hundredth of that. With integers 0.01% to 0.05% of a
/// layer's elements are rounded in another way, each of which changes others behind it: of ResNet-20's logits on CIFAR
/// 1% were more than a step off, with float32 none.
HS_API Int8Weights int8_weights(const Tensor& integers, const Tensor& scale, const nn::detail::NormFactors& factors);

/// The product as a function of its input and, where there is one, the residual: conv2d_int8 with the convolution's
/// numbers, or linear_int8.
Node::Function int8_product(const nn::TracedCall& product, const Int8Weights& weights, Conv2dInt8Options options);

/// Whether a place has integers of more than 8 bits and up to 16, for the whole tensor.
bool is_wide(const Site& site);
/// The product of an input that lies on such a grid, in floating point: its integers are 256 h + l, two exact products
/// of 8-bit integers, each of which is rounded to float32, as is their sum.
Node::Function wide_product(const nn::TracedCall& product, const Int8Weights& weights, const Site& input);

/// An activation that the integer products apply themselves.
struct FusedActivation {
  Int8Activation activation = Int8Activation::none;
  double a = 0, b = 0;
};
std::optional<FusedActivation> fused_activation(const nn::TracedCall& call);

/// What a pad op fills with.
double pad_value(const PadAttributes& pad);
/// Whether that lies on the grid, or nothing is filled in.
bool padding_lies_on(const Int8Grid& grid, const PadAttributes& pad);
/// Whether an adaptive pool takes all places of an image.
bool pools_all(const AdaptivePoolAttributes& pool);

/// Whether the call applies one function to each element of its only tensor: tables can do it.
bool is_elementwise(const nn::TracedCall& call);

}  // namespace halfstep::infer::detail
