// SPDX-License-Identifier: Apache-2.0
// Gradients of a convolution's weight on the tiles of AMX, which multiply bfloat16. Elements of float32 and float16 are
// split into sums of bfloat16 (split_block.h).
#pragma once

#include "halfstep/backends/cpu/conv.h"

namespace halfstep::cpu {

/// Whether weight_by_tiles() serves the call: AMX that this process may use; one group; images and gradients
/// channels-last, both of bf16, both of f16 or both of f32; strides whose product is at most 64 (of lines alone, with
/// fewer than 16 channels and windows of several columns without dilation); and windows that span at most 65,536
/// places.
bool tiles_serve(const ConvCall& call) noexcept;
/// Whether the weight is large enough that multiplying on tiles saves more time than packing the images takes, by shape
/// and dtype. Also for weight gradients as matrix products (conv_matrix.h).
bool weight_repays_packing(const ConvCall& call) noexcept;
/// Whether it is faster than the other paths on a processor with AMX, by shape and dtype.
bool tiles_suit(const ConvCall& call) noexcept;

/// The weight's gradient, on the tiles of AMX or by their model. Sums are float32. Their error has the same bound as
/// that of weight_by_products(), or of weight_by_pair_products() for bf16; Float32Precision::high adds 2^-15 of the sum
/// of the products' magnitudes. The result is the same for any number of
/// threads.
///
/// The tiles also multiply the zeros between lines by places of the input. Where a place isn't finite, that may give
/// NaN at taps that don't see it. For float32 the call then returns unsupported, and another path must compute the
/// gradient. For bf16 and f16 such a gradient stands: the other path's workspace would be needed in every step whose
/// gradients overflow.
HS_API Status weight_by_tiles(KernelContext* context, ConvCall& call);

}  // namespace halfstep::cpu
