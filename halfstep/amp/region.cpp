// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>
#include <vector>

#include "halfstep/amp/cast_cache.h"
#include "halfstep/amp/region_internal.h"
#include "halfstep/autograd/engine_internal.h"
#include "halfstep/runtime/log.h"

namespace halfstep::amp::detail {

struct Region {
  AutocastState outer;
  bool cached = false;
  int backwards = 0;  // backward passes under way where it was opened: their own change of the state lies between
  std::atomic<bool> closed{false};
};

namespace {

enum class Life { unborn, here, gone };
thread_local Life t_life = Life::unborn;

// This thread's open regions, the innermost last.
struct Stack {
  std::vector<std::shared_ptr<Region>> regions;
  Stack() { t_life = Life::here; }
  ~Stack() { t_life = Life::gone; }
};

// Null when the thread is ending: guards in variables that live longer than it have nothing left to undo.
Stack* stack() {
  if (t_life == Life::gone) return nullptr;
  thread_local Stack s;
  return &s;
}

void undo(Stack& s) {
  while (!s.regions.empty() && s.regions.back()->closed.load(std::memory_order_acquire) &&
         s.regions.back()->backwards >= halfstep::detail::backward_depth()) {
    const std::shared_ptr<Region> region = std::move(s.regions.back());
    s.regions.pop_back();
    if (region->cached) leave_region();
    thread_state().autocast = std::move(region->outer);
  }
}

void say(const char* text) noexcept {
  try {
    log(LogLevel::error, text);
  } catch (const std::exception&) {
    // A destructor can't pass on what a sink throws.
  }
}

}  // namespace

std::shared_ptr<Region> open_region(AutocastState inner, bool cached) {
  auto region = std::make_shared<Region>();
  Stack* const s = stack();
  region->outer = std::exchange(thread_state().autocast, std::move(inner));
  region->cached = cached;
  region->backwards = halfstep::detail::backward_depth();
  if (s) s->regions.push_back(region);
  if (cached) enter_region();
  return region;
}

void close_region(const std::shared_ptr<Region>& region) noexcept {
  if (!region) return;
  Stack* const s = stack();
  if (!s) return;
  const bool ours = std::find(s->regions.rbegin(), s->regions.rend(), region) != s->regions.rend();
  const bool innermost = ours && s->regions.back() == region;
  region->closed.store(true, std::memory_order_release);
  if (!ours) {
    return say(
        "autocast: a region was closed on another thread than it was opened on; there it ends with the next op. Give "
        "each thread its own region, made from an AutocastSnapshot");
  }
  if (!innermost) {
    say("autocast: a region was closed before one that was opened inside it; the inner one holds until it is closed, "
        "and then both have ended");
  }
  undo(*s);
}

void undo_closed() noexcept {
  Stack* const s = stack();
  if (s && !s->regions.empty() && s->regions.back()->closed.load(std::memory_order_relaxed)) undo(*s);
}

}  // namespace halfstep::amp::detail
