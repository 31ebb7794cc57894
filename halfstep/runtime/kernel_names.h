// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "halfstep/core/export.h"

namespace halfstep {

/// The names of all kernel tables, in alphabetical order: one for each op (also for those that no kernel serves: views,
/// and ops composed of others) and one for each kernel that runs by itself. docs/kernels.md has those with kernels.
HS_API std::vector<std::string> kernel_names();

}  // namespace halfstep
