// SPDX-License-Identifier: Apache-2.0
#include "host/errors.h"

namespace hscuda {
namespace {

// After these the context of the process is of no use, as CUDA says of each of them.
bool is_final(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorExternalDevice:
    case cudaErrorMpsClientTerminated:
      return true;
    default:
      // Newer than the oldest toolkit: cudaErrorContained and cudaErrorTensorMemoryLeak.
      return error == static_cast<cudaError_t>(226) || error == static_cast<cudaError_t>(721);
  }
}

}  // namespace

halfstep_status check(cudaError_t error, const char* what, uint64_t call) {
  if (error == cudaSuccess) return HALFSTEP_OK;
  cudaGetLastError();  // CUDA tells an error that isn't final again with the next call that asks
  const halfstep_status status = error == cudaErrorMemoryAllocation ? HALFSTEP_OUT_OF_MEMORY
                                 : is_final(error)                  ? HALFSTEP_LOST
                                                                    : HALFSTEP_FAILED;
  return fail(status, call, "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

}  // namespace hscuda
