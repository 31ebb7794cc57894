// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace halfstep::cli {

/// `devices --watch`: memory, the queues' share and lost devices, again every so many seconds until a signal ends it.
/// `device`: only this one; empty: all but the CPU. Returns the exit status. Throws UsageError.
int watch_devices(const std::string& device, double seconds);

}  // namespace halfstep::cli
