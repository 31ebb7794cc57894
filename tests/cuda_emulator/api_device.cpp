// SPDX-License-Identifier: Apache-2.0
// The runtime's functions for errors and devices.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "machine.h"

using namespace hscuda::emulator;

namespace {

struct ErrorText {
  cudaError_t error;
  const char *name, *text;
};
constexpr ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorCudartUnloading, "cudaErrorCudartUnloading", "driver shutting down"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidDevicePointer, "cudaErrorInvalidDevicePointer", "invalid device pointer"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
     "no kernel image is available for execution on the device"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {cudaErrorLaunchTimeout, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {cudaErrorPeerAccessNotEnabled, "cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
};

bool known(int device) { return device >= 0 && device < static_cast<int>(machine().devices.size()); }

}  // namespace

const char* cudaGetErrorName(cudaError_t error) {
  for (const ErrorText& e : kErrors) {
    if (e.error == error) return e.name;
  }
  return "cudaErrorUnknown";
}
const char* cudaGetErrorString(cudaError_t error) {
  for (const ErrorText& e : kErrors) {
    if (e.error == error) return e.text;
  }
  return "unknown error";
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = machine().devices.empty() ? 0 : CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = static_cast<int>(machine().devices.size());
  return noted(*count == 0 ? cudaErrorNoDevice : cudaSuccess);
}
cudaError_t cudaSetDevice(int device) {
  const std::lock_guard lock(machine().mutex);
  const cudaError_t error = machine().unusable(device);
  if (error != cudaErrorNoDevice && error != cudaErrorInvalidDevice) current_device() = device;
  return noted(error);
}
cudaError_t cudaGetDevice(int* device) {
  if (machine().devices.empty()) return noted(cudaErrorNoDevice);
  *device = current_device();
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!known(device)) return noted(machine().devices.empty() ? cudaErrorNoDevice : cudaErrorInvalidDevice);
  cudaDeviceProp p = {};
  std::strcpy(p.name, "CUDA emulated on the CPU");
  p.uuid.bytes[15] = static_cast<char>(device);
  p.totalGlobalMem = machine().memory;
  p.sharedMemPerBlock = 48 * 1024;
  p.sharedMemPerBlockOptin = 48 * 1024;
  p.sharedMemPerMultiprocessor = 100 * 1024;
  p.regsPerBlock = 65536;
  p.warpSize = 32;
  p.maxThreadsPerBlock = 1024;
  p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024, p.maxThreadsDim[2] = 64;
  p.maxGridSize[0] = 0x7fffffff, p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.major = 9, p.minor = 0;
  p.multiProcessorCount = 4;
  p.canMapHostMemory = p.concurrentKernels = p.unifiedAddressing = p.streamPrioritiesSupported = 1;
  p.memoryPoolsSupported = 1;
  p.pciBusID = device + 1;
  p.asyncEngineCount = 1;
  p.memoryBusWidth = 64;
  p.l2CacheSize = 1 << 20;
  p.maxThreadsPerMultiProcessor = 2048;
  *properties = p;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (const cudaError_t error = cudaGetDeviceProperties(&p, device); error != cudaSuccess) return error;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = p.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(p.sharedMemPerBlock);
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(p.sharedMemPerMultiprocessor);
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = p.multiProcessorCount;
      break;
    case cudaDevAttrPciBusId:
      *value = p.pciBusID;
      break;
    case cudaDevAttrClockRate:
    case cudaDevAttrMemoryClockRate:
      *value = 1000000;
      break;
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = p.memoryBusWidth;
      break;
    case cudaDevAttrL2CacheSize:
      *value = p.l2CacheSize;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = p.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrMemoryPoolsSupported:
      *value = 1;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = p.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = p.minor;
      break;
    case cudaDevAttrPciDeviceId:
    case cudaDevAttrPciDomainId:
    case cudaDevAttrHostNativeAtomicSupported:
    case cudaDevAttrConcurrentManagedAccess:
      *value = 0;
      break;
    default:
      return noted(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  if (machine().devices.empty()) return noted(cudaErrorNoDevice);
  if (function == nullptr) return noted(cudaErrorInvalidDeviceFunction);
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  if (!known(device)) return noted(cudaErrorInvalidDevice);
  std::snprintf(text, static_cast<std::size_t>(size), "0000:%02x:00.0", static_cast<unsigned>(device) + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (const cudaError_t error = m.unusable(current_device()); error != cudaSuccess) return noted(error);
  if (const cudaError_t error = m.fault("synchronize"); error != cudaSuccess) return noted(error);
  if (const cudaError_t error = m.may_wait(current_device()); error != cudaSuccess) return noted(error);
  m.drain_device(current_device());
  return noted(m.unusable(current_device()));
}
cudaError_t cudaDeviceReset() {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (m.devices.empty()) return noted(cudaErrorNoDevice);
  m.drain_device(current_device());
  m.devices[static_cast<std::size_t>(current_device())].lost = cudaSuccess;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (!known(device) || !known(peer)) return noted(cudaErrorInvalidDevice);
  *can = device != peer;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (const cudaError_t error = m.unusable(current_device()); error != cudaSuccess) return noted(error);
  if (flags != 0) return noted(cudaErrorInvalidValue);
  if (!known(peer) || peer == current_device()) return noted(cudaErrorInvalidDevice);
  const bool added = m.devices[static_cast<std::size_t>(current_device())].peers.insert(peer).second;
  return noted(added ? cudaSuccess : cudaErrorPeerAccessAlreadyEnabled);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (machine().devices.empty()) return noted(cudaErrorNoDevice);
  *least = 0, *greatest = -5;
  return cudaSuccess;
}

namespace hscuda::emulator {

// Newton's method on a start that is right to a few digits (Winitzki, "A handy approximation for the error function and
// its inverse"); erfc keeps the digits where erf is near 1.
double inverse_erf(double x) {
  if (!(std::fabs(x) < 1)) {
    const double infinity = std::numeric_limits<double>::infinity();
    return x == 1 ? infinity : x == -1 ? -infinity : std::numeric_limits<double>::quiet_NaN();
  }
  if (x == 0) return x;
  const double log = std::log1p(-x * x), a = 0.147, b = 2 / (3.14159265358979323846 * a) + log / 2;
  double y = std::sqrt(std::sqrt(b * b - log / a) - b);
  const double target = std::fabs(x);
  for (int i = 0; i < 4; ++i) {
    const double error = target < 0.5 ? std::erf(y) - target : (1 - target) - std::erfc(y);
    const double step = error / (1.12837916709551257390 * std::exp(-y * y));
    y -= step / (1 + y * step);
  }
  return std::copysign(y, x);
}
double inverse_normal(double x) {
  if (x > 0 && x < 1e-3) {
    // erfinv(2x - 1) has lost the digits of x: solve for them.
    double y = -std::sqrt(-2 * std::log(x));
    for (int i = 0; i < 60; ++i) {
      const double p = 0.5 * std::erfc(-y * 0.70710678118654752440);
      const double step = (p - x) / (0.39894228040143267794 * std::exp(-y * y / 2));
      y -= step / (1 + y * step / 2);
      if (std::fabs(step) < 1e-15 * std::fabs(y)) break;
    }
    return y;
  }
  return 1.41421356237309504880 * inverse_erf(2 * x - 1);
}

}  // namespace hscuda::emulator
