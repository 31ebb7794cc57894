// SPDX-License-Identifier: Apache-2.0
// Winograd's convolutions of 3 x 3 windows side by side, and their gradients: F(2x2, 3x3) with 16 products for
// the 36 of four results, F(4x4, 3x3) with 36 for 144.
#pragma once

#include "halfstep/backends/cpu/conv.h"

namespace halfstep::cpu {

/// Whether convolve_winograd() serves the call: one group, 3 x 3 windows without stride or dilation, images
/// channels-last, dtypes of at most 32 bits.
bool winograd_serves(const ConvCall& call) noexcept;
/// The tiles to compute a part by: 2 or 4 where tiles of so many results a side, at most `most`, are faster than direct
/// kernels that multiply `speed` times as fast as float32 ones (only 4 where that is more than 1), else 0. By shape
/// alone.
HS_API int winograd_tiles(ConvPart part, const ConvGeometry& geometry, int most, int speed) noexcept;

/// The part by F(m x m, 3x3), m = 2 or 4: transforms, products and sums in float32, results rounded once. Bits depend
/// on neither the number of threads nor the other images. Unsupported where a result isn't finite (what was written is
/// to be written again): the transforms may overflow, or turn infinities into NaN, where products alone don't.
Status convolve_winograd(KernelContext* context, ConvCall& call, int m);

/// The same for the weight's gradient, whose sums over all images are those of terms, see weight_terms().
Status weight_by_winograd(KernelContext* context, ConvCall& call, int m);

}  // namespace halfstep::cpu
