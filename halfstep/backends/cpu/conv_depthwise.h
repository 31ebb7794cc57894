// SPDX-License-Identifier: Apache-2.0
// Depthwise convolutions, in which each channel has a window of its own: a tenth of a multiply-add or so for each byte
// that is moved, so that oneDNN's kernels, made for products, are far from what memory allows, and in 16 bits and
// windows other than 3x3 have no kernel of their own.
#pragma once

#include "halfstep/backends/cpu/conv.h"

namespace halfstep::cpu {

/// Whether convolve_depthwise() serves the call: as many groups as channels and filters, 16 or more; images
/// channels-last, of one dtype of at most 32 bits.
HS_API bool depthwise_serves(const ConvCall& call) noexcept;

/// Any part of such a convolution, whatever its window, strides, dilation and padding. Sums are float32, in the order
/// of the window's rows and taps; a weight's gradient is an ordered sum of weight_terms() terms. Bits don't depend on
/// the number of threads. Unsupported, with nothing written, where a weight isn't finite, since zeros stand for what is
/// around an image.
Status convolve_depthwise(KernelContext* context, ConvCall& call);

}  // namespace halfstep::cpu
