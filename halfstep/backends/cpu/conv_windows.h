// SPDX-License-Identifier: Apache-2.0
// Convolutions on the tiles of AMX, whose windows are read in place.
#pragma once

#include "halfstep/backends/cpu/conv.h"

namespace halfstep::cpu {

/// Whether convolve_windows() serves the call: an output, or an input gradient whose padding and stride together are at
/// most the window (with strides, one without dilations, and strides whose product is at most 64), of one group; all of
/// bfloat16, of float32 or of float16; images channels-last, the weight channels-last or row-major; a multiple of 32
/// channels (of an input gradient, filters) to sum over. Not if one line of results sees more than 4 Mi elements, as
/// with wide dilations.
HS_API bool windows_serve(const ConvCall& call) noexcept;
/// Whether it is faster than oneDNN's kernels, by shape alone, where this process may use the tiles of AMX.
HS_API bool windows_suit(const ConvCall& call) noexcept;

/// Copies images, or bands of their lines, into the second-level cache with their padding, so that 16 neighbouring
/// windows see a tile at each tap (window_copies.h). The convolution is then a matrix product whose first operand tiles
/// load in place (amx_tile.h); float32 and float16 are split into sums of bfloat16 (split_block.h). The sums of windows
/// that start in the padding are dropped. An input gradient is the convolution of the output's gradient with the
/// weight's taps reversed; with strides, one such convolution for each remainder of places by them. The result has the
/// same bits for any number of threads. Packs the weight, and keeps it packed while it does not change
/// (packed_weight.h).
///
/// Returns failed without memory for the workspace. For float32 it returns unsupported where a result isn't finite
/// before its bias is added: infinities may have become NaN, and another path must compute the call. For float16 such
/// results stand, because the other path's workspace would be needed in every step whose gradients overflow; the same
/// results aren't finite as with float32 arithmetic.
Status convolve_windows(KernelContext* context, ConvCall& call);

}  // namespace halfstep::cpu
