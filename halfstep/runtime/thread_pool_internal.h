// SPDX-License-Identifier: Apache-2.0
// The threads behind parallel_for. Whoever runs takes the next range of a call: the caller, or any worker that the
// system lets run. The caller waits only for ranges that somebody has begun, never for a thread that the system has put
// aside before it began one. A worker that had to wait for a processor, since another program wants it too, rests for a
// while: it neither spins nor takes ranges, except of long calls. So a call costs about a microsecond on a quiet
// machine, and on a busy one each program has processors of its own, as far as the system shares them out.
#pragma once

#include <cstdint>

#include "halfstep/runtime/parallel.h"

namespace halfstep::detail {

/// Calls body(context, range) for each range in [0, ranges), each once, on this thread and on up to `threads` - 1
/// workers, and returns when all have returned. `body` must not throw.
void pool_run(std::int64_t ranges, int threads, void (*body)(void* context, std::int64_t range), void* context);

/// For `body` whenever it has done a part of a range: workers that rest since others want their processors are offered
/// a call once it has taken long enough.
void pool_between_jobs() noexcept;

/// Has one worker rest after the next call, and how many rest. For tests.
HS_API void pool_ask_for_rest() noexcept;
HS_API int pool_resting() noexcept;

}  // namespace halfstep::detail
