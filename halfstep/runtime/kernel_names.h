// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "halfstep/core/export.h"

namespace halfstep {

/// The names of all kernel tables, in alphabetical order: one for each op (including those without kernels: views, and
/// ops composed of others) and one for each kernel that runs by itself. docs/devices/kernels.md documents those with
/// kernels.
HS_API std::vector<std::string> kernel_names();

}  // namespace halfstep
