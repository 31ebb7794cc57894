// SPDX-License-Identifier: Apache-2.0
// Files of networks whose linear layers have weights in integers (quant/weight_only.h).
#pragma once

#include <map>
#include <optional>
#include <string>

#include "halfstep/autograd/parameter.h"
#include "halfstep/quant/weight_only.h"

namespace halfstep::training {

/// What flags that were saved with weights say of it: `weight-only`, `quant-weight-bits`, `group-size` and
/// `quant-skip`; none: the weights are floating. Throws Error for text that is none of them.
HS_API std::optional<quant::WeightOnlyOptions> saved_weight_only(const std::map<std::string, std::string>& recipe);
/// The same as it is saved.
HS_API std::map<std::string, std::string> weight_only_recipe(const quant::WeightOnlyOptions& options);
/// Throws Error for scales and integers in a state dict that aren't of these options, naming the tensor.
HS_API void check_weight_only(const NamedTensors& tensors, const quant::WeightOnlyOptions& options);
/// Float32 weights in place of integers that have scales (`fc1.weight` beside `fc1.weight_quantizer.scale`), which are
/// left out: the state dict of a network that wasn't converted. Throws Error for scales that don't fit.
HS_API void widen_weights(NamedTensors& tensors);

}  // namespace halfstep::training
