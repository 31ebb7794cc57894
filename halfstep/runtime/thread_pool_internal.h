// SPDX-License-Identifier: Apache-2.0
// The threads behind parallel_for. Whoever runs takes the next range of a call: the caller, or any worker that the
// system lets run. The caller waits only for ranges that somebody has begun, never for a thread that the system has put
// aside before it began one, and waits and idles passively as soon as the machine shows that others want its
// processors. So a call costs about a microsecond on a quiet machine, and a busy one loses no time slices to threads
// that spin.
#pragma once

#include <cstdint>

#include "halfstep/runtime/parallel.h"

namespace halfstep::detail {

/// Calls body(context, range) for each range in [0, ranges), each once, on this thread and on up to `threads` - 1
/// workers, and returns when all have returned. `body` must not throw.
void pool_run(std::int64_t ranges, int threads, void (*body)(void* context, std::int64_t range), void* context);

}  // namespace halfstep::detail
