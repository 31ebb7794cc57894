// SPDX-License-Identifier: Apache-2.0
// Images of any layout for kernels that are fast on channels-last ones.
#pragma once

#include <cstdint>
#include <span>

#include "halfstep/runtime/kernel.h"

namespace halfstep::cpu {

/// The strides of dense images of `sizes` [N, C, H, W] that lie channels-last.
void channels_last_strides(const std::int64_t* sizes, std::int64_t* strides);

/// Whether channels are worth to be brought side by side: there are enough for vectors, all images are floats of at
/// most 32 bits or integers, and those of some operands lie in another order.
bool reorders_images(std::span<const TensorView> in, std::span<const TensorView> out);

using ImageKernel = Status (*)(KernelContext*, const TensorView* in, int inputs, TensorView* out, int outputs,
                               const void* attributes);

/// Calls `kernel`, which treats each image by itself, for a few images at a time, with operands [N, C, H, W] brought to
/// channels-last in the workspace and results brought back, so that both stay in the cache. Of operands for which
/// reorders_images(), with the same N and C.
Status run_channels_last(KernelContext* context, ImageKernel kernel, std::span<const TensorView> in,
                         std::span<TensorView> out, const void* attributes);

}  // namespace halfstep::cpu
