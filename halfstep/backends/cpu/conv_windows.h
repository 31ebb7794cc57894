// SPDX-License-Identifier: Apache-2.0
// Convolutions of bfloat16 on the tiles of AMX, which read windows where they lie.
#pragma once

#include "halfstep/backends/cpu/conv.h"

namespace halfstep::cpu {

/// Whether convolve_windows() serves the call: an output, or an input gradient without strides whose padding is smaller
/// than the window, of one group, all of bfloat16, images channels-last, the weight channels-last or row-major, and a
/// multiple of 32 channels (of an input gradient, filters) to sum over. Not where windows reach so far that one line of
/// results sees more than 8 MB.
HS_API bool windows_serve(const ConvCall& call) noexcept;
/// Whether it is faster than oneDNN's kernels for AMX, by shape alone.
HS_API bool windows_suit(const ConvCall& call) noexcept;

/// Images are copied into the second-level cache, between zeros for what windows see outside of them, and one copy for
/// each place that windows begin at where they move by several. Windows that begin side by side are then rows at a
/// constant distance, each of which lies in one piece for every line, or tap, of the window: a product of matrices
/// whose first operand is read in place (amx_tile.h). Of windows that begin in those zeros the sums are dropped.
/// An input gradient is the convolution of the output's gradient by turned windows.
/// Results are the same for any number of threads.
Status convolve_windows(KernelContext* context, ConvCall& call);

}  // namespace halfstep::cpu
