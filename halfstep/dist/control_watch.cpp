// SPDX-License-Identifier: Apache-2.0
// What a rank concludes from the heartbeats of others, or from their absence.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "halfstep/dist/control_impl_internal.h"
#include "halfstep/runtime/log.h"

namespace halfstep::dist {
namespace {

using namespace detail;
using std::chrono::milliseconds;

}  // namespace

void Control::Impl::watch(Clock::time_point now) {
  // Who has reached rank 0 leaves it to rank 0 to say who is missing.
  if (!(rank == 0 ? all_here : peers[0] != nullptr) && passed(started, now) > options.connect) {
    if (rank != 0) {
      return decide(Failure::What::silent, 0,
                    fmt::format("{} can't reach {} within {}{}", rank_text(ranks, rank), rank_text(ranks, 0),
                                seconds_text(options.connect), connect_error.empty() ? "" : ": " + connect_error));
    }
    const auto missing = std::find_if(ranks.begin(), ranks.end(), [](const RankState& r) { return !r.here; });
    const int who = static_cast<int>(missing - ranks.begin());
    return decide(
        Failure::What::silent, who,
        fmt::format("{} has not connected to rank 0 within {}", rank_text(ranks, who), seconds_text(options.connect)));
  }
  // Those who will be silent for too long at the next ticks: with the network of a machine all its ranks are lost.
  std::vector<int> silent;
  bool lost = false;
  for (int r = 0; r < size; ++r) {
    const RankState& other = ranks[static_cast<std::size_t>(r)];
    if (!watches(r) || !other.here || other.left) continue;
    const milliseconds silence = passed(other.heard, now);
    if (silence > options.lost - 2 * options.heartbeat) silent.push_back(r);
    lost = lost || silence > options.lost;
  }
  if (lost) {
    std::vector<std::string> names;
    for (const int r : silent) names.push_back(rank_text(ranks, r));
    const RankState& first = ranks[static_cast<std::size_t>(silent[0])];
    return decide(Failure::What::silent, silent[0],
                  fmt::format("{} {} answered for {}: stopped, or cut off; {}{}", fmt::join(names, " and "),
                              silent.size() == 1 ? "hasn't" : "haven't", seconds_text(passed(first.heard, now)),
                              silent.size() == 1 ? "" : fmt::format("of rank {}: ", silent[0]),
                              circumstances(ranks, silent[0], silent)));
  }
  if (rank == 0) watch_steps(now);
}

void Control::Impl::watch_steps(Clock::time_point now) {
  std::vector<RankState> current = ranks;
  for (int r = 1; r < size; ++r) {
    RankState& other = current[static_cast<std::size_t>(r)];
    // Of one that is silent nobody knows what it does now.
    other.activity.elapsed_ms += static_cast<std::uint64_t>(passed(other.heard, now).count());
    if (!other.left && passed(other.heard, now) > 3 * options.heartbeat) return;
  }
  std::string text;
  if (options.hang.count() > 0) {
    const int hung = hung_rank(current, options.hang, text);
    if (hung >= 0) return decide(Failure::What::hung, hung, std::move(text));
    const int soon = hung_rank(current, options.hang / 4 * 3, text);
    if (soon >= 0 && soon != warned_of) {
      log(LogLevel::warning,
          fmt::format("{}; when it is {}, the job ends (HALFSTEP_HANG_TIMEOUT)", text, seconds_text(options.hang)));
    }
    warned_of = soon;
  }
  if (options.out_of_step.count() == 0) return;
  const int late = out_of_step(current, options.out_of_step, text);
  if (late >= 0) decide(Failure::What::out_of_step, late, std::move(text));
}

// Time counts from the last look at which something moved, which may be a heartbeat after it did so for the last time.
void Control::Impl::look_for_movement(Clock::time_point now, bool was_away) {
  if (!options.blocked || options.hang.count() == 0) return;
  const auto [state, since] = [&] {
    const std::lock_guard lock(mutex);
    return std::pair(busy.empty() ? mine.state : Activity::State::working, mine_since);
  }();
  const bool began_anew = std::exchange(last_activity, since) != since;
  blocked = state == Activity::State::idle ? options.blocked() : "";
  if (was_away || began_anew) blocked.clear();
  if (blocked.empty()) moved = now;
}

}  // namespace halfstep::dist
