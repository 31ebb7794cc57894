// SPDX-License-Identifier: Apache-2.0
#include "host/probe.h"

namespace hscuda {
namespace {
__global__ void nothing() {}
}  // namespace

cudaError_t probe() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(nothing));
}

}  // namespace hscuda
