// SPDX-License-Identifier: Apache-2.0
// How long a training step takes, from the calls that it is made of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "halfstep/debug/call_trace.h"
#include "halfstep/runtime/machine_limits.h"
#include "halfstep/train/call_times.h"

namespace halfstep::training {

/// The calls of one kind in a step.
struct StepTimePart {
  std::string kind = {};     ///< one of step_time_kinds()
  std::uint64_t calls = 0;   ///< that run a kernel
  double seconds = 0;        ///< predicted
  double limit = 0;          ///< the least seconds that the machine could take
  double multiply_adds = 0;  ///< of matrix products and convolutions
  double bytes = 0;          ///< read and written, each operand of a call once
};

/// A training step in time.
struct HS_API StepTime {
  std::vector<StepTimePart> parts = {};  ///< those that there are, in the order of step_time_kinds()
  double calling = 0;                    ///< seconds beside kernels: 0 in a step that is replayed
  std::uint64_t unknown = 0;             ///< calls that can't be measured by themselves, and are left out

  double seconds() const;  ///< of the step: all parts, and `calling`
  double limit() const;
};

/// Options of predict_time.
struct StepTimeOptions {
  bool captured = true;  ///< the step is replayed (capture/capture.h): calls cost their kernels only
  /// Called before each call with the number of those that are done, since measuring takes up to a minute; may be null.
  std::function<void(std::size_t done, std::size_t all)> progress = {};
};

/// Kinds of calls, in the order in which they are listed: `convolutions, forward`, ..., `optimizer`.
HS_API std::span<const char* const> step_time_kinds();
/// The kind of a call.
HS_API const char* step_time_kind(const debug::TracedCall& call);

/// For each call of a step that is repeated, the share of its operands' bytes that lies in a cache of so many bytes
/// when it begins: what was read or written so shortly before that no more than `cache_bytes` have been touched since,
/// in blocks of 4 KiB. Calls that run no kernel have 0.
HS_API std::vector<double> shares_in_cache(std::span<const debug::TracedCall> calls, std::int64_t cache_bytes);

/// The time of a step of these calls on the CPU: the sum of their kernels' times. Each is the mean of those with
/// operands in the processors' own caches, in the last cache and in memory, weighted by the shares_in_cache() of both
/// sizes. Limits are the larger of operations over the
/// machine's peak and of bytes over its bandwidth, call by call. What `times` doesn't know it measures. Throws as it
/// does.
HS_API StepTime predict_time(std::span<const debug::TracedCall> calls, CallTimes& times,
                             const StepTimeOptions& options = {});

}  // namespace halfstep::training
