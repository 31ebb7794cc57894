// SPDX-License-Identifier: Apache-2.0
// Convolutions of 16-bit images by matrix products: weight gradients in float32, since cuBLASLt rounds no sum on the
// way, as cuDNN's engines for 16 bits do, and reads 16 bits, where cuDNN has to be given float32 copies; and those of
// images of few channels, such as the first of a network, for which cuDNN's heuristics choose slow engines.
#pragma once

#include "host/kernel.h"
#include "libraries/conv_plan.h"

namespace hscuda {

/// Whether products are the better way.
bool products_suit(const ConvCall& conv);

/// A call that suits.
halfstep_status convolve_by_products(Call& call, const ConvCall& conv);

}  // namespace hscuda
