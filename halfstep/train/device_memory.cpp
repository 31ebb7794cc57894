// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/device_memory.h"

#include "halfstep/runtime/caching_allocator.h"

namespace halfstep::training {

double device_peak_mb(Device device) {
  return device.is_cpu() ? 0 : static_cast<double>(memory_stats(device).allocated_peak) / 1e6;
}

}  // namespace halfstep::training
