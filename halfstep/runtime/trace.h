// SPDX-License-Identifier: Apache-2.0
// Time ranges on the host that a profile shows next to the ops: a loader preparing a batch, a loop waiting for one,
// user-defined ranges. Free if there is no listener.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "halfstep/core/export.h"

namespace halfstep {

/// Receives finished ranges, on the thread that created them; several threads may call at once.
class HS_API TraceListener {
 public:
  virtual ~TraceListener() = default;
  /// Times are nanoseconds of CLOCK_MONOTONIC, the clock of a device's records.
  virtual void range(std::string_view name, std::string_view category, std::uint64_t start_ns,
                     std::uint64_t end_ns) = 0;
};
/// Adds or removes a listener. Removing waits for its ongoing calls on other threads.
HS_API void add_trace_listener(TraceListener* listener);
HS_API void remove_trace_listener(TraceListener* listener);
/// Nanoseconds of CLOCK_MONOTONIC.
HS_API std::uint64_t trace_clock_ns();

namespace detail {
HS_API extern std::atomic<int> trace_listeners;
HS_API void end_trace_range(std::string_view name, std::string_view category, std::uint64_t start_ns);
}  // namespace detail

/// A named time range, from construction to destruction. Ranges of one thread nest.
///
///     debug::Range range{"augmentation"};
class HS_API TraceRange {
 public:
  /// Both texts are copied only if there is a listener. `category` groups ranges; `loader` is the data loader's.
  explicit TraceRange(std::string_view name, std::string_view category = "range") {
    if (detail::trace_listeners.load(std::memory_order_relaxed) != 0) [[unlikely]]
      start(name, category);
  }
  ~TraceRange() {
    if (start_ns_ != 0) [[unlikely]]
      detail::end_trace_range(name_, category_, start_ns_);
  }
  TraceRange(const TraceRange&) = delete;
  TraceRange& operator=(const TraceRange&) = delete;

 private:
  void start(std::string_view name, std::string_view category);
  std::string name_;
  std::string category_;
  std::uint64_t start_ns_ = 0;
};

}  // namespace halfstep
