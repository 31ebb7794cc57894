// SPDX-License-Identifier: Apache-2.0
// Ranges of a trained network without training it: post-training quantization.
#pragma once

#include <functional>

#include "halfstep/core/export.h"
#include "halfstep/nn/module.h"

namespace halfstep::quant {

/// Finds the ranges of a prepared network's activations and weights without training it. Calls `next` until it returns
/// false; each call runs the network on another batch of samples. Meanwhile the network is in evaluation mode, nothing
/// is recorded or rounded, and the observers see what passes; afterwards they are off, the fake quantization is on, and
/// modules have the mode that they had, also when `next` throws. What torch.ao.quantization calls prepare, calibrate:
///
///     quant::prepare(net, example);
///     quant::calibrate(net, [&, i = 0]() mutable { return net(batches[i]), ++i < 8; });
///
/// A batch for which `next` returns false counts as well. Throws Error where the network isn't prepared
/// (quant::prepare), and what `next` throws.
HS_API void calibrate(const nn::ModuleBase& network, const std::function<bool()>& next);

}  // namespace halfstep::quant
