// SPDX-License-Identifier: Apache-2.0
// The last failure of each thread, which the plug-in table's `error` hands out.
#pragma once

#include <exception>
#include <new>

#include "halfstep/runtime/plugin.h"

namespace sim {

/// Notes a failure for this thread and returns its status. `call` is that of the kernel that failed, 0 where it is not
/// known.
[[gnu::format(printf, 3, 4)]] halfstep_status fail(halfstep_status status, uint64_t call, const char* format, ...);
/// Hands out the failure and forgets it.
void take_error(halfstep_error* error);
/// The text of the failure that was noted last.
const char* error_text();

/// Calls f: no exception crosses the interface.
template <class F>
halfstep_status guarded(F&& f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return fail(HALFSTEP_FAILED, 0, "the host has no memory left");
  } catch (const std::exception& e) {
    return fail(HALFSTEP_FAILED, 0, "%s", e.what());
  }
}

}  // namespace sim
