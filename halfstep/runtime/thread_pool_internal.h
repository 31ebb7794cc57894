// SPDX-License-Identifier: Apache-2.0
// The threads behind parallel_for. Whoever runs takes the next range of a call: the caller, or any worker that the
// system lets run. The caller waits only for ranges that somebody has begun, never for a thread that the system
// preempted before it began one. A worker that competes with another program for its processor rests for a while: it
// doesn't spin, and takes ranges of long calls only. A call costs about a microsecond on an idle machine. On a busy
// one, short calls run on their caller at the speed of one thread instead of waiting for preempted workers.
#pragma once

#include <cstdint>

#include "halfstep/runtime/parallel.h"

namespace halfstep::detail {

/// Calls body(context, range) for each range in [0, ranges), each once, on this thread and on up to `threads` - 1
/// workers, and returns when all have returned. `body` must not throw.
void pool_run(std::int64_t ranges, int threads, void (*body)(void* context, std::int64_t range), void* context);

/// To be called by `body` after each part of a range: offers the call to resting workers once it has run long enough.
void pool_between_jobs() noexcept;

/// For tests: lets one worker rest after the next call; the number of workers that rest now.
HS_API void pool_ask_for_rest() noexcept;
HS_API int pool_resting() noexcept;

}  // namespace halfstep::detail
