// SPDX-License-Identifier: Apache-2.0
// How a kernel says that a value is wrong. The host learns of it when it next waits; until then the kernel must neither
// read nor write what the value points to.
#pragma once

#include "host/device.h"

namespace hscuda {

/// The first report since the host last asked is kept; later ones are dropped.
__device__ inline void report(Fault* fault, unsigned long long call, FaultCode code, long long value = 0,
                              long long low = 0, long long high = 0, long long place = 0, long long places = 0) {
  // Claimed in the GPU's own memory: across the bus to the host's not every machine has atomic operations.
  if (atomicExch(fault->claim, 1u) != 0u) return;
  fault->call = call;
  fault->code = code;
  fault->value = value;
  fault->low = low;
  fault->high = high;
  fault->place = place;
  fault->places = places;
  __threadfence_system();
  *static_cast<volatile int*>(&fault->ready) = 1;
}

}  // namespace hscuda
