// SPDX-License-Identifier: Apache-2.0
// Weight gradients of float32 and float16 on the tiles of AMX, which multiply bfloat16: elements are split into sums of
// bfloat16 (split_block.h).
#pragma once

#include "halfstep/backends/cpu/conv.h"

namespace halfstep::cpu {

/// Whether weight_by_split() serves the call: one group, images and gradients channels-last, both of float32 or both of
/// float16, strides whose product is at most 16, and windows that span at most 65,536 places.
bool weight_split_serves(const ConvCall& call) noexcept;
/// Whether it is faster than the other paths on a processor with AMX, by shape alone.
HS_API bool weight_split_suits(const ConvGeometry& geometry) noexcept;

/// The weight's gradient, on the tiles of AMX or by their model. Sums are float32; their error has the same bound as
/// those of weight_by_products(), and the result is the same for any number of threads.
///
/// The tiles also multiply the zeros between lines by places of the input. Where a place isn't finite, that may give
/// NaN at taps that don't see it. For float32 the call then returns unsupported, and another path must compute the
/// gradient. For float16 such a gradient stands: the other path's workspace would be needed in every step whose
/// gradients overflow.
Status weight_by_split(KernelContext* context, ConvCall& call);

}  // namespace halfstep::cpu
