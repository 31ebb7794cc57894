// SPDX-License-Identifier: Apache-2.0
// What went wrong, kept for the host to ask: one failure a thread, the last.
#pragma once

#include <cuda_runtime.h>

#include "halfstep/runtime/plugin.h"

namespace hscuda {

/// Notes a failure of this thread and returns its status. `call`: halfstep_context.call, or 0.
[[gnu::format(printf, 3, 4)]] halfstep_status fail(halfstep_status status, uint64_t call, const char* format, ...);

/// HALFSTEP_OK for cudaSuccess; else notes what CUDA says of it, with `what` was called. Too little memory is
/// HALFSTEP_OUT_OF_MEMORY, an error after which the context is of no use (cudaErrorIllegalAddress and its like)
/// HALFSTEP_LOST, everything else HALFSTEP_FAILED. CUDA's own last error is cleared.
halfstep_status check(cudaError_t error, const char* what, uint64_t call = 0);

/// Answers the table's `error`.
void take_error(halfstep_error* error);

}  // namespace hscuda
