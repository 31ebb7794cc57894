// SPDX-License-Identifier: Apache-2.0
// Convolutions by kernels of our own: whatever no library is asked for, or refuses. Any strides and sizes; simple, and
// slow.
#pragma once

#include "host/kernel.h"
#include "libraries/conv_plan.h"

namespace hscuda {

halfstep_status convolve_directly(Call& call, const ConvCall& conv);

/// to = sums + bias of its channel, rounded once. `sums` are f32 or f64; `to` may be sums.
void add_channel_bias(const Call& call, const Tensor& to, const Tensor& sums, const Tensor& bias);

}  // namespace hscuda
