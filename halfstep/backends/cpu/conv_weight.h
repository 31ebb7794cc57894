// SPDX-License-Identifier: Apache-2.0
// Gradients of a convolution's weight as sums of outer products: where oneDNN's kernels leave half of the processor
// unused.
#pragma once

#include "halfstep/backends/cpu/conv.h"

namespace halfstep::cpu {

/// Whether weight_by_products() serves the call: one group, images channels-last, dtypes of at most 32 bits.
bool products_serve(const ConvCall& call) noexcept;
/// Whether it is the faster way, by shape alone.
HS_API bool products_suit(const ConvGeometry& geometry) noexcept;

/// The weight's gradient [O, KH KW C]: the sum over all output places of gradient [O] times the window of the input
/// [KH KW C] there. Some places at a time are widened to float32 in the second-level cache, multiplied with the tiles
/// of the matrix product, and added to sums in float32. Threads take terms of the sum (see weight_terms()), shares of
/// the filters and shares of the columns; the result is the same for any number of them.
Status weight_by_products(KernelContext* context, ConvCall& call);

/// The same of weight_by_pair_products(), on a processor with `isa`: AVX512-BF16 without AMX, and images and gradients
/// of bf16.
bool pair_products_serve(const ConvCall& call, Isa isa) noexcept;
HS_API bool pair_products_suit(const ConvGeometry& geometry) noexcept;
/// As weight_by_products(), on the processor's bfloat16 units: two places a step, with sums in float32. Where it has
/// none, plain loops take the tiles' place.
Status weight_by_pair_products(KernelContext* context, ConvCall& call);

}  // namespace halfstep::cpu
