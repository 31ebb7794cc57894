// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/runtime/plugin_numbers.h"

namespace sim {
using namespace halfstep_plugin_numbers;
}
