// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/recomputing.h"

namespace halfstep {

bool& detail::recomputing() {
  thread_local bool on = false;
  return on;
}

}  // namespace halfstep
