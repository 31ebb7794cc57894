// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/core/export.h"

namespace halfstep::detail {

/// Whether this thread runs a checkpointed function again (autograd/checkpoint.h): what the function counts and
/// observes was counted in its first run.
HS_API bool& recomputing();

}  // namespace halfstep::detail
