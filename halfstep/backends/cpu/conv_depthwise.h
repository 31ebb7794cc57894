// SPDX-License-Identifier: Apache-2.0
// Depthwise convolutions, in which each channel has a window of its own: about one multiply-add for each byte that is
// moved. oneDNN's kernels, made for products, are far from what memory allows, and have none of their own for some
// gradients in bf16 and for weight gradients of windows other than 3x3.
#pragma once

#include "halfstep/backends/cpu/conv.h"

namespace halfstep::cpu {

/// Whether convolve_depthwise() serves the call: as many groups as channels and filters, 16 or more; images
/// channels-last, of one dtype of at most 32 bits.
HS_API bool depthwise_serves(const ConvCall& call) noexcept;

/// Any part of such a convolution, whatever its window, strides, dilation and padding. Sums are float32, in a fixed
/// order of the window's rows and taps; a weight's gradient is an ordered sum of weight_terms() terms. Bits don't
/// depend on the number of threads. Zeros stand for what is around an image. Results are unsupported, with nothing
/// written, where a weight isn't finite; a channel's weight gradient may be NaN in any tap where its operands aren't
/// finite.
Status convolve_depthwise(KernelContext* context, ConvCall& call);

}  // namespace halfstep::cpu
