// SPDX-License-Identifier: Apache-2.0
// Max pooling of images whose channels lie side by side, in vectors of channels.
#pragma once

#include "halfstep/backends/cpu/window.h"

namespace halfstep::cpu {

/// The windows of an image as tables, and the size of the largest, whose places count row by row.
struct MaxWindows {
  Taps rows, columns;
  std::int64_t height = 1, width = 1;
};

/// Whether max_pool_rows() or max_pool_backward_rows() serves these: an image, the result and the index, or their
/// gradients and the index, in float32 or 16 bits. An image and its result must be of one dtype.
bool max_pools_by_rows(const TensorView& from, const TensorView& to, const TensorView& index);

/// y and the index of x; false where there is no memory.
bool max_pool_rows(KernelContext* context, const TensorView& x, const TensorView& y, const TensorView& index,
                   const MaxWindows& windows);

/// The image's gradient dx from that of the result, g, in float32 sums, each rounded once; `rows` and `columns`: the
/// windows that a place of the image is in. False where there is no memory.
bool max_pool_backward_rows(KernelContext* context, const TensorView& g, const TensorView& index, const TensorView& dx,
                            const Taps& rows, const Taps& columns, std::int64_t width);

}  // namespace halfstep::cpu
