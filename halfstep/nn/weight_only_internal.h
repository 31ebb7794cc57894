// SPDX-License-Identifier: Apache-2.0
// Internal: how a linear layer holds a weight of integers, which quant::quantize_weights() makes.
#pragma once

#include <string_view>

#include "halfstep/core/tensor.h"

namespace halfstep::nn::detail {

/// The module that is attached to such a layer, and the buffer in it: `fc1.weight_quantizer.scale` in a state dict.
inline constexpr std::string_view kWeightQuantizer = "weight_quantizer", kWeightScale = "scale";

/// As nn::replace_contents, for contents of other sizes too; the gradient is dropped.
void replace_tensor(const Tensor& tensor, const Tensor& contents);

}  // namespace halfstep::nn::detail
