// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

namespace hscuda {

/// Whether this library has code for the current GPU: cudaSuccess, or what CUDA says.
cudaError_t probe();

}  // namespace hscuda
