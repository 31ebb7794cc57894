// SPDX-License-Identifier: Apache-2.0
// Internal: which threads wait for a device.
#pragma once

#include "halfstep/core/export.h"

namespace halfstep {

/// Counts, for its lifetime, a thread that waits for a device: it may wait for long without running itself.
class HS_API DeviceWait {
 public:
  DeviceWait() noexcept;
  ~DeviceWait();
  DeviceWait(const DeviceWait&) = delete;
  DeviceWait& operator=(const DeviceWait&) = delete;
  /// Whether a thread of this process waits for one.
  static bool any() noexcept;
};

}  // namespace halfstep
