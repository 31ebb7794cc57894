// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/core/device.h"

namespace halfstep::bench {

/// A device whose kernels, copies and queues do nothing at all.
Device empty_device();

}  // namespace halfstep::bench
