// SPDX-License-Identifier: Apache-2.0
// Internal: whether a backward pass is under way.
#pragma once

#include "halfstep/core/export.h"

namespace halfstep::detail {

/// Backward passes that this thread is in: more than one where a hook or a custom function starts another.
HS_API int& backward_depth();

}  // namespace halfstep::detail
