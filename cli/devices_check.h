// SPDX-License-Identifier: Apache-2.0
// A device beside the CPU, and what is known of it from before.
#pragma once

#include <string>

#include "halfstep/runtime/devices.h"

namespace halfstep::cli {

/// Checks a device, prints a line a family of cases, and keeps a record when all of them pass. Returns the program's
/// status. Throws UsageError for a device that isn't there.
int run_check(const std::string& device, bool quick);
/// `checked 2026-11-21`, that it has to be checked (again), or nothing.
std::string check_state(const DeviceInfo& info);

}  // namespace halfstep::cli
