// SPDX-License-Identifier: Apache-2.0
// Exchange between processes by NCCL: the table's group of collectives.
#pragma once

#include "halfstep/runtime/plugin.h"

namespace hscuda::collectives {

/// Puts the group's entries into the table. NCCL is opened by the first of their calls; without it they fail and say
/// what was tried.
void fill(halfstep_plugin_table& table);

}  // namespace hscuda::collectives
