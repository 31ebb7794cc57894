// SPDX-License-Identifier: Apache-2.0
// 1x1 convolutions as matrix products.
#pragma once

#include "halfstep/backends/cpu/conv.h"

namespace halfstep::cpu {

/// Whether convolve_matrix() serves the call: an output or an input gradient of one group, with windows of one place
/// that see every place once, and images of at most 32 bits that lie channels-last.
HS_API bool matrix_serves(const ConvCall& call) noexcept;
/// Whether it is faster than oneDNN's float32 kernels on a processor with `isa`: where images of 16 bits would have to
/// be widened for them, with 8 channels and filters or more (32 with AVX2), and, with AVX-512, where images of float32
/// are too large for the cache and a sum is made in one go.
HS_API bool matrix_suits(const ConvCall& call, Isa isa) noexcept;

/// Whether convolve_matrix() serves other calls of 1x1 convolutions in float32 or float16, which are only worth it with
/// AMX's products (gemm_split.cpp): a weight's gradient, or the output of a convolution with strides, for which the
/// places that it sees are first copied next to each other.
bool split_matrix_serves(const ConvCall& call) noexcept;

/// Whether it is faster than oneDNN's kernels where this process may use the tiles of AMX. Outputs and input gradients:
/// in bf16 throughout, with channels or filters that are a multiple of 32, or in f32 or f16 throughout, with at least
/// 32 channels and filters. Weight gradients of f32 and f16: with at least 32 of both, where
/// weight_repays_packing(); in f16 only those of few places.
HS_API bool matrix_suits_tiles(const ConvCall& call) noexcept;

/// All places by all channels, times the weight: 16 bits are widened while the product packs its operands. A weight's
/// gradient is the transposed gradient of the output, times all places of the input.
Status convolve_matrix(KernelContext* context, ConvCall& call);

}  // namespace halfstep::cpu
