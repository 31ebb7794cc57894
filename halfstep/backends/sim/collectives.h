// SPDX-License-Identifier: Apache-2.0
// Collectives between the devices of several processes: the table's group of entries.
#pragma once

#include "halfstep/runtime/plugin.h"

namespace sim::collectives {

/// Puts the group's entries into the table.
void fill(halfstep_plugin_table& table);

/// What HALFSTEP_SIM_COLLECTIVES asks for.
enum class Promise { none, ring, in_order };
/// `ring`: sums begin with another rank in each part, and are rounded at every step, as those of a ring are.
void set_promise(Promise promise);
Promise promise();

}  // namespace sim::collectives
