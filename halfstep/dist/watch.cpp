// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/dist/thread_watch_internal.h"
#include "halfstep/dist/watch_internal.h"
#include "halfstep/runtime/device_wait_internal.h"

namespace halfstep::dist::detail {
namespace {

std::atomic<std::shared_ptr<Control>>& the_watch() {
  static auto& instance = *new std::atomic<std::shared_ptr<Control>>;
  return instance;
}
std::atomic<const GroupState*> g_world{nullptr};
std::atomic<bool> g_end_expected{false};
std::atomic<int> g_wait_for_ranks{0};

// Three heartbeats.
constexpr std::chrono::seconds kShortestHang{3};
constexpr double kLongestHangSeconds = 1e6;

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

std::chrono::milliseconds hang_timeout(std::chrono::milliseconds given) {
  const char* text = std::getenv("HALFSTEP_HANG_TIMEOUT");
  if (text && *text != '\0') {
    char* end = nullptr;
    const double seconds = std::strtod(text, &end);
    if (*end != '\0' || !(seconds >= 0 && seconds <= kLongestHangSeconds)) {
      fail<Error>("HALFSTEP_HANG_TIMEOUT: expected a number of seconds, or 0 for never, got {}", printable(text));
    }
    if (seconds != 0 && seconds < std::chrono::duration<double>(kShortestHang).count()) {
      fail<Error>("HALFSTEP_HANG_TIMEOUT: expected at least 3 s until a rank hangs, or 0 for never, got {}",
                  printable(text));
    }
    given = std::chrono::milliseconds(std::llround(seconds * 1000));
  }
  if (given.count() != 0 && given < kShortestHang) {
    fail<Error>("ProcessGroup::init: expected at least 3 s until a rank hangs, or 0 for never, got {} ms",
                given.count());
  }
  return given;
}

WaitsForRanks::WaitsForRanks() { ++g_wait_for_ranks; }
WaitsForRanks::~WaitsForRanks() { --g_wait_for_ranks; }

void start_watch(const std::shared_ptr<GroupState>& world, const Control::Exchange& exchange,
                 std::chrono::milliseconds hang, const std::atomic<bool>* stop) {
  // A rank that answers may be slow: reading its first batch, writing a checkpoint. As long as it moves it has the time
  // that a collective may wait, and is named a little before that is over.
  ControlOptions options{.out_of_step = world->timeout / 10 * 9, .hang = hang};
  options.blocked = [threads = ThreadWatch()]() mutable {
    return g_wait_for_ranks > 0 || DeviceWait::any() ? std::string() : threads.look();
  };
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

Busy::Busy(std::string_view with) {
  const std::shared_ptr<Control> control = detail::watch();
  if (!control) return;
  by_ = control;
  number_ = control->busy(with);
}
Busy::~Busy() {
  if (const std::shared_ptr<Control> control = by_.lock()) control->not_busy(number_);
}

}  // namespace halfstep::dist
