// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "halfstep/core/device.h"

namespace halfstep::cli {

/// The device that `--device` and `--gpu` name. `--gpu N` is device N of the only kind of accelerator that there is
/// here; the simulated one counts where there is no other. `device` is `--device`, if that was `given`, or its default;
/// `gpu` under 0: no `--gpu`. Throws UsageError, also where both are given and name different devices.
Device chosen_device(const std::string& device, bool given, int gpu);

}  // namespace halfstep::cli
