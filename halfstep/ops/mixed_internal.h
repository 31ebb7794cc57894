// SPDX-License-Identifier: Apache-2.0
// Internal: notifies amp of calls whose inputs of different dtypes are promoted outside of autocast.
#pragma once

#include <span>

#include "halfstep/ops/op.h"

namespace halfstep::detail {

/// Called with a call's inputs before they are converted to `dtype`.
using MixedHook = void (*)(const Op& op, std::span<const Tensor* const> inputs, DType dtype);
/// The slot; set once, when the library is loaded.
HS_API MixedHook& mixed_hook();

}  // namespace halfstep::detail
