// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "halfstep/core/device.h"
#include "halfstep/core/export.h"

namespace halfstep::training {

/// The most memory of a device that tensors had at a time, in 10^6 bytes, as logs and last lines show it beside the
/// process's; 0 on the CPU, whose memory is the process's.
HS_API double device_peak_mb(Device device);

}  // namespace halfstep::training
