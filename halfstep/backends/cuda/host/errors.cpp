// SPDX-License-Identifier: Apache-2.0
#include "host/errors.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace hscuda {
namespace {

// Without a destructor: a thread may end after the library was closed.
thread_local halfstep_error last = {sizeof(halfstep_error), HALFSTEP_OK, 0, {}};

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

halfstep_status fail(halfstep_status status, uint64_t call, const char* format, ...) {
  last.status = status;
  last.call = call;
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last.text, sizeof last.text, format, arguments);
  va_end(arguments);
  return status;
}

halfstep_status check(cudaError_t error, const char* what, uint64_t call) {
  if (error == cudaSuccess) return HALFSTEP_OK;
  cudaGetLastError();  // CUDA tells an error that isn't final again with the next call that asks
  const halfstep_status status = error == cudaErrorMemoryAllocation ? HALFSTEP_OUT_OF_MEMORY
                                 : is_final(error)                  ? HALFSTEP_LOST
                                                                    : HALFSTEP_FAILED;
  return fail(status, call, "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

void take_error(halfstep_error* error) {
  if (error == nullptr) return;
  const uint32_t size = std::min<uint32_t>(error->size, sizeof(halfstep_error));
  last.size = error->size;
  std::memcpy(error, &last, size);
  last = {sizeof(halfstep_error), HALFSTEP_OK, 0, {}};
}

}  // namespace hscuda
