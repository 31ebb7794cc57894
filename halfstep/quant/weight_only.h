// SPDX-License-Identifier: Apache-2.0
// Weights of linear layers in integers of 8 or 4 bits, with activations as they are: for networks whose time is that of
// reading their weights, and for small files. It needs no data.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "halfstep/nn/module.h"

namespace halfstep::quant {

/// Options of quantize_weights.
struct WeightOnlyOptions {
  int bits = 8;                 ///< 8, or 4: two weights in a byte
  std::int64_t group_size = 0;  ///< elements of a row that share a scale, a divisor of the layer's inputs; 0: a row
  /// Layers that stay in floating point: paths, in which `*` stands for any text, such as `fc` or `decoder.*`.
  std::vector<std::string> skip = {};
};

/// A weight in integers: what linear_weight_only() takes.
struct QuantizedWeight {
  Tensor integers;  ///< i8 [O, K]; of 4 bits u8 [O, K / 2], the first of two in the low half
  Tensor scale;     ///< f32 [O], or [O, K / group_size]
};
/// A floating weight [O, K] in integers, to nearest: those of a row (or group) are the weights over a scale of
/// max|w| / 127, for 4 bits max|w| / 7; where all are 0, the scale is 1. Throws Error for weights that aren't finite
/// and for a group_size that doesn't fit K.
HS_API QuantizedWeight quantize_weight(const Tensor& weight, const WeightOnlyOptions& options = {});
/// The weight f32 [O, K] that they stand for: integer times scale. Throws Error for tensors that are none of these.
HS_API Tensor dequantize_weight(const QuantizedWeight& weight);

/// A linear layer whose weight is integers.
struct WeightOnlyLayer {
  std::string path;             ///< such as `fc1`; empty: the network itself
  int bits = 8;                 ///< of its weight
  std::int64_t group_size = 0;  ///< as in WeightOnlyOptions
  std::int64_t bytes = 0;       ///< of integers and scales
};

/// Turns the weights of all nn::Linear layers in `network` (itself included) into integers, in place and for inference:
///
///     quant::quantize_weights(net, {.bits = 4, .group_size = 32});
///     Tensor logits = net(x);  // f32, f16 or bf16, as x is or autocast says
///
/// Such a layer computes linear_weight_only(), in sessions (infer/session.h) too. Its `weight` holds the integers and
/// takes no gradient, and the scales are the buffer `weight_quantizer.scale` in it: state_dict() has both, and
/// load_state_dict() of a network that was converted with the same options takes them. Copies of the network change
/// with it, clones are their own. Layers that share a weight stay so. Returns the layers that were converted.
///
/// Throws Error, before anything is changed, where nothing is converted, where a layer doesn't fit the options (naming
/// it), for paths in `skip` that name no linear layer, and for networks that prepare() has prepared. The scheme is
/// torchao's Int8WeightOnlyConfig and Int4WeightOnlyConfig without zero points.
HS_API std::vector<WeightOnlyLayer> quantize_weights(const nn::ModuleBase& network,
                                                     const WeightOnlyOptions& options = {});
/// The layers of a network that were converted.
HS_API std::vector<WeightOnlyLayer> weight_only_layers(const nn::ModuleBase& network);

}  // namespace halfstep::quant
