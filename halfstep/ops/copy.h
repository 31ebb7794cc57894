// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/ops/op.h"

namespace halfstep {

/// `source` as a new tensor of another dtype, not recorded; the layout is kept.
HS_API Tensor cast_unrecorded(const Tensor& source, DType dtype);
/// Writes `source`, broadcast and converted, into `destination`: not recorded, versions untouched.
HS_API void copy_unrecorded(Tensor& destination, const Tensor& source);
/// Recorded conversion (Tensor::to with one dtype); `source` itself when there is nothing to do.
HS_API Tensor cast(const Tensor& source, DType dtype);

/// The op `to`, for the autocast cache and engine.
HS_API const Op& cast_op();

}  // namespace halfstep
