// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <atomic>
#include <cstdlib>
#include <utility>

#include "halfstep/dist/watch_internal.h"

namespace halfstep::dist::detail {
namespace {

std::atomic<std::shared_ptr<Control>>& the_watch() {
  static auto& instance = *new std::atomic<std::shared_ptr<Control>>;
  return instance;
}
std::atomic<const GroupState*> g_world{nullptr};
std::atomic<bool> g_end_expected{false};

// Before MPI ends. Where the communication thread is still in a collective, there is no goodbye.
void end_watch(int status) {
  const std::shared_ptr<Control> control = the_watch().exchange(nullptr);
  if (control && status != 0 && !g_end_expected && !control->failed()) {
    control->report_failure(fmt::format("it exited with status {}", status));
  }
}

}  // namespace

std::shared_ptr<Control> watch() { return the_watch().load(); }

bool end_is_expected() { return g_end_expected; }

void start_watch(const std::shared_ptr<GroupState>& world, const Control::Exchange& exchange,
                 const std::atomic<bool>* stop) {
  // A rank that answers may be slow: reading its first batch, writing a checkpoint. It has the time that a collective
  // may wait, and is named a little before that is over.
  ControlOptions options{.out_of_step = world->timeout / 10 * 9};
  if (stop) options.stop = [stop] { return stop->load(std::memory_order_relaxed); };
  auto control = std::make_shared<Control>(world->rank, world->size, world->hosts, exchange, std::move(options));
  g_world = world.get();
  the_watch().store(std::move(control));
  set_abort_check([]() -> std::string {
    const std::shared_ptr<Control> control = watch();
    if (!control || !control->failed()) return {};
    const std::optional<Failure> failure = control->failure();
    return failure ? failure->text : std::string();
  });
#if defined(__GLIBC__)
  on_exit([](int status, void*) { end_watch(status); }, nullptr);
#else
  std::atexit([] { end_watch(0); });
#endif
}

Watched::Watched(const Call& call) : by_(watch()) {
  if (!by_) return;
  by_->doing({.sequence = call.sequence,
              .name = name(call.kind),
              .label = call.label,
              .bytes = static_cast<std::uint64_t>(call.bytes()),
              .of_all = call.group.get() == g_world.load()});
}
Watched::~Watched() {
  if (by_) by_->done();
}

}  // namespace halfstep::dist::detail

namespace halfstep::dist {

void expect_end() { detail::g_end_expected = true; }

}  // namespace halfstep::dist
