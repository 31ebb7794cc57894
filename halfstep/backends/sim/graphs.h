// SPDX-License-Identifier: Apache-2.0
// Graphs: what is queued while one is recorded, to be queued again as often as it is launched.
#pragma once

#include "halfstep/runtime/plugin.h"
#include "queue.h"

namespace sim::graphs {

/// Puts the graphs' entries into the table.
void fill(halfstep_plugin_table& table);

}  // namespace sim::graphs
