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

/// Whether a thread competes with another program for its processor, by what Linux counts.
class HS_API Contention {
 public:
  /// The thread's counters at `now`: how long it ran, and how long it was runnable without a processor. All are
  /// nanoseconds. True if it was kept from running since the last call, and another time within the last 50 ms: a
  /// program that competes takes the processor again and again, a daemon takes it for some milliseconds now and then.
  bool check(std::int64_t now, std::int64_t ran, std::int64_t delayed) noexcept;
  /// The thread rested until `now`: the next time that it is kept from running counts at once.
  void rested(std::int64_t now) noexcept { last_ = now, kept_ = true; }

 private:
  bool known_ = false, kept_ = false;
  std::int64_t last_ = 0;  // when it was kept from running
  std::int64_t ran_ = 0, delayed_ = 0;
};

/// For tests: lets one worker rest after the next call; the number of workers that rest now.
HS_API void pool_ask_for_rest() noexcept;
HS_API int pool_resting() noexcept;

}  // namespace halfstep::detail
