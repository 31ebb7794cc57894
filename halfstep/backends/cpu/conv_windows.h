// SPDX-License-Identifier: Apache-2.0
// Convolutions of bfloat16 on the tiles of AMX, which load windows in place.
#pragma once

#include "halfstep/backends/cpu/conv.h"

namespace halfstep::cpu {

/// Whether convolve_windows() serves the call: an output, or an input gradient without strides whose padding is smaller
/// than the window, of one group, all of bfloat16, of float32 or of float16, images channels-last, the weight
/// channels-last or row-major, and a multiple of 32 channels (of an input gradient, filters) to sum over. Not if one
/// line of results sees more than 8 MB, as with wide dilations.
HS_API bool windows_serve(const ConvCall& call) noexcept;
/// Whether it is faster than oneDNN's kernels for AMX, by shape alone.
HS_API bool windows_suit(const ConvCall& call) noexcept;

/// Copies images, or bands of their lines, into the second-level cache with their padding; with strides, one copy for
/// each phase. Neighbouring windows then start a constant distance apart, and every line (or tap) of a window is
/// contiguous, so that the convolution is a matrix product whose first operand tiles load in place (amx_tile.h). The
/// sums of windows that start in the padding are dropped. An input gradient is the convolution of the output's gradient
/// with the weight's taps reversed. The result has the same bits for any number of threads. Packs the weight, and keeps
/// it packed while it does not change (packed_weight.h). float32 and float16 are multiplied in parts (split_block.h).
/// Returns failed without memory for the workspace, and, of float32, unsupported where a result isn't finite before its
/// bias is added. Of float16 an infinite result may be NaN; which results are finite is as in float32, so that the
/// memory of another way, which would be needed in each step whose gradients overflow, is saved.
Status convolve_windows(KernelContext* context, ConvCall& call);

}  // namespace halfstep::cpu
