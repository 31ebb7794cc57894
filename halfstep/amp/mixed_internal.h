// SPDX-License-Identifier: Apache-2.0
// Internal: for tests.
#pragma once

#include "halfstep/core/export.h"

namespace halfstep::amp::detail {

/// The warnings of 16-bit inputs to float32 weights, said once for each op, are said again.
HS_API void forget_mixed_warnings();

}  // namespace halfstep::amp::detail
