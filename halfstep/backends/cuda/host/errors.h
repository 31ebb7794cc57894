// SPDX-License-Identifier: Apache-2.0
// What CUDA says went wrong, as a failure of the plug-in.
#pragma once

#include <cuda_runtime.h>

#include "halfstep/runtime/plugin_helpers.h"

namespace hscuda {

using halfstep_plugin_helpers::fail;

/// HALFSTEP_OK for cudaSuccess; else notes what CUDA says of it, with `what` was called. Too little memory is
/// HALFSTEP_OUT_OF_MEMORY, an error after which the context is of no use (cudaErrorIllegalAddress and its like)
/// HALFSTEP_LOST, everything else HALFSTEP_FAILED. CUDA's own last error is cleared.
halfstep_status check(cudaError_t error, const char* what, uint64_t call = 0);

}  // namespace hscuda
