// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/observer.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <vector>

namespace halfstep {
namespace {

struct Observers {
  std::atomic<int> count{0};
  std::atomic<int> in_parts{0};
  std::shared_mutex mutex;
  std::vector<OpObserver*> list;
};
Observers& observers() {
  static Observers& instance = *new Observers;
  return instance;
}

// An observer's own calls are not observed: it would see itself without end, and wait for its own lock.
thread_local bool t_inside = false;

template <class F>
void for_each_observer(F&& f) {
  struct Inside {
    Inside() { t_inside = true; }
    ~Inside() { t_inside = false; }
  } inside;
  Observers& all = observers();
  std::shared_lock lock(all.mutex);
  for (OpObserver* o : all.list) f(*o);
}

}  // namespace

const char* name(ExecutionPath path) {
  switch (path) {
    case ExecutionPath::native:
      return "native";
    case ExecutionPath::contiguous:
      return "contiguous";
    case ExecutionPath::fallback:
      return "fallback";
    case ExecutionPath::view:
      return "view";
    case ExecutionPath::transfer:
      return "transfer";
  }
  return "unknown";
}

void add_observer(OpObserver* observer) {
  Observers& all = observers();
  std::lock_guard lock(all.mutex);
  all.list.push_back(observer);
  all.count.fetch_add(1);
  if (!observer->takes_fused()) all.in_parts.fetch_add(1);
}

void remove_observer(OpObserver* observer) {
  Observers& all = observers();
  std::lock_guard lock(all.mutex);
  if (std::erase(all.list, observer) == 0) return;
  all.count.fetch_sub(1);
  if (!observer->takes_fused()) all.in_parts.fetch_sub(1);
}

bool observed() { return observers().count.load(std::memory_order_relaxed) != 0 && !t_inside; }

bool observed_in_parts() { return observers().in_parts.load(std::memory_order_relaxed) != 0 && !t_inside; }

CallOrigin& call_origin() {
  thread_local CallOrigin here;
  return here;
}

detail::Observation::Observation(const ObservedCall& call) : call_(call), active_(observed()) {
  if (active_ && call_.path != ExecutionPath::view) for_each_observer([&](OpObserver& o) { o.before_call(call_); });
}

void detail::Observation::done(ExecutionPath path, std::uint64_t number) {
  done_ = true;
  if (!active_) return;
  call_.path = path;
  call_.number = number;
  for_each_observer([&](OpObserver& o) { o.after_call(call_); });
}

detail::Observation::~Observation() {
  if (!active_ || done_) return;
  try {
    for_each_observer([&](OpObserver& o) { o.failed_call(call_); });
  } catch (...) {  // the call's own exception is on its way already
  }
}

}  // namespace halfstep
