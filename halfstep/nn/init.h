// SPDX-License-Identifier: Apache-2.0
// Initialisers: they fill a tensor in place, without recording, from the default generator (core/random.h).
#pragma once

#include "halfstep/core/tensor.h"

namespace halfstep::nn::init {

/// Uniform in [low, high).
HS_API Tensor uniform_(Tensor tensor, double low = 0, double high = 1);
/// Normal with this mean and standard deviation.
HS_API Tensor normal_(Tensor tensor, double mean = 0, double std = 1);
/// One value.
HS_API Tensor constant_(Tensor tensor, double value);

}  // namespace halfstep::nn::init
