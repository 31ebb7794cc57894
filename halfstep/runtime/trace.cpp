// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/trace.h"

#include <time.h>

#include <mutex>
#include <shared_mutex>
#include <vector>

namespace halfstep {
namespace {

struct Listeners {
  std::shared_mutex mutex;
  std::vector<TraceListener*> list;
};
Listeners& listeners() {
  static Listeners& instance = *new Listeners;
  return instance;
}

}  // namespace

std::atomic<int> detail::trace_listeners{0};

void add_trace_listener(TraceListener* listener) {
  Listeners& all = listeners();
  const std::lock_guard lock(all.mutex);
  all.list.push_back(listener);
  detail::trace_listeners.fetch_add(1);
}

void remove_trace_listener(TraceListener* listener) {
  Listeners& all = listeners();
  const std::lock_guard lock(all.mutex);
  if (std::erase(all.list, listener) != 0) detail::trace_listeners.fetch_sub(1);
}

std::uint64_t trace_clock_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(now.tv_nsec);
}

void detail::end_trace_range(std::string_view name, std::string_view category, std::uint64_t start_ns) {
  const std::uint64_t end_ns = trace_clock_ns();
  Listeners& all = listeners();
  const std::shared_lock lock(all.mutex);
  for (TraceListener* listener : all.list) listener->range(name, category, start_ns, end_ns);
}

void TraceRange::start(std::string_view name, std::string_view category) {
  name_ = name;
  category_ = category;
  start_ns_ = trace_clock_ns();
}

}  // namespace halfstep
