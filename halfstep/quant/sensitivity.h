// SPDX-License-Identifier: Apache-2.0
// Which layers of a network bear quantization worst.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "halfstep/nn/module.h"

namespace halfstep::quant {

/// What a network loses when one of its layers alone is quantized.
struct LayerSensitivity {
  std::string module = {};   ///< path of the convolution or linear layer
  double loss = 0;           ///< with this layer quantized
  double increase = 0;       ///< over the loss of the network in floating point
  bool weight_only = false;  ///< no activation goes with it: none that is computed there is quantized
};

/// Calls `loss` with no fake quantization of a prepared network, and then once for each of its quantized convolutions
/// and linear layers, with its weight and the activations that are computed from its result up to the next such layer
/// alone (of the first one the network's input too). The largest increase comes first; NaN before all numbers. Switches
/// are as before afterwards, and ranges aren't changed as long as `loss` is computed in evaluation mode. Throws Error
/// where the network isn't prepared, and what `loss` throws.
HS_API std::vector<LayerSensitivity> sensitivity(const nn::ModuleBase& network, const std::function<double()>& loss);

}  // namespace halfstep::quant
