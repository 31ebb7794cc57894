// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "halfstep/core/text.h"
#include "halfstep/dist/control_text_internal.h"

namespace halfstep::dist::detail {
namespace {

using Doing = Activity::State;

std::string list_of_ranks(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

std::string bytes_text(std::uint64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes >= 1u << 20) return fmt::format("{:.1f} MiB", value / (1 << 20));
  if (bytes >= 1u << 10) return fmt::format("{:.1f} KiB", value / (1 << 10));
  return fmt::format("{} bytes", bytes);
}

std::string state_text(const Activity& a, bool was) {
  const char* is = was ? "was" : "is";
  switch (a.state) {
    case Doing::collective:
    case Doing::subgroup:
      return fmt::format("{} in {}", is, collective_text(a));
    case Doing::working:
      return fmt::format("{} busy with {}", is, printable(a.name));
    case Doing::idle:
      break;
  }
  if (a.sequence == 0) return fmt::format("{} in no collective yet", is);
  return fmt::format("{} in no collective, after {}", is, collective_text(a));
}

bool in_collective(const Activity& a) { return a.state == Doing::collective || a.state == Doing::subgroup; }

// Whether both are in one and the same collective.
bool together(const Activity& a, const Activity& b) {
  return in_collective(a) && a.state == b.state && a.sequence == b.sequence && a.name == b.name;
}

}  // namespace

std::string rank_text(const std::vector<RankState>& ranks, int rank) {
  const RankState& r = ranks[static_cast<std::size_t>(rank)];
  return fmt::format("rank {} (host {}, pid {})", rank, printable(r.host), r.pid);
}

std::string collective_text(const Activity& a) {
  std::string inside = printable(a.label);
  if (a.bytes > 0) inside += (inside.empty() ? "" : ", ") + bytes_text(a.bytes);
  return fmt::format("{} #{}{}", printable(a.name), a.sequence, inside.empty() ? "" : " (" + inside + ")");
}

std::string seconds_text(std::chrono::milliseconds time) {
  return fmt::format("{:.4g} s", static_cast<double>(time.count()) / 1000);
}

std::string circumstances(const std::vector<RankState>& ranks, int rank, const std::vector<int>& silent) {
  const Activity& own = ranks[static_cast<std::size_t>(rank)].activity;
  std::string text = "it " + state_text(own, true);
  // One clause for all that do the same.
  std::vector<std::pair<std::string, std::vector<int>>> clauses;
  for (int r = 0; r < static_cast<int>(ranks.size()); ++r) {
    const RankState& other = ranks[static_cast<std::size_t>(r)];
    if (r == rank || !other.here || std::find(silent.begin(), silent.end(), r) != silent.end()) continue;
    std::string what;
    if (other.left) {
      what = "finished";
    } else if (together(own, other.activity)) {
      what = "same";
    } else {
      what = in_collective(other.activity) ? collective_text(other.activity) : state_text(other.activity, false);
    }
    auto same = std::find_if(clauses.begin(), clauses.end(), [&](const auto& c) { return c.first == what; });
    if (same == clauses.end()) same = clauses.insert(clauses.end(), {what, {}});
    same->second.push_back(r);
  }
  for (const auto& [what, who] : clauses) {
    const bool one = who.size() == 1;
    const Activity& first = ranks[static_cast<std::size_t>(who[0])].activity;
    text += "; " + list_of_ranks(who);
    if (what == "finished") {
      text += one ? " has finished" : " have finished";
    } else if (what == "same") {
      text += one ? " waits in the same" : " wait in the same";
    } else if (in_collective(first)) {
      text += (one ? " waits in " : " wait in ") + what;
    } else {
      text += (one ? " is " : " are ") + what.substr(3);
    }
  }
  return text;
}

int out_of_step(const std::vector<RankState>& ranks, std::chrono::milliseconds limit, std::string& text) {
  const auto elapsed = [](const RankState& r) { return std::chrono::milliseconds(r.activity.elapsed_ms); };
  // The collective that others have waited in for too long; the furthest, where they wait in several.
  const RankState* waiting = nullptr;
  for (const RankState& r : ranks) {
    if (!r.here || r.left || r.activity.state != Doing::collective) continue;
    if (elapsed(r) > limit && (!waiting || r.activity.of_all > waiting->activity.of_all)) waiting = &r;
  }
  if (!waiting) return -1;
  const std::uint64_t sequence = waiting->activity.of_all;
  int found = -1;
  std::vector<int> others;
  for (int i = 0; i < static_cast<int>(ranks.size()); ++i) {
    const RankState& r = ranks[static_cast<std::size_t>(i)];
    if (!r.here) continue;
    if (r.activity.of_all == sequence && r.activity.state == Doing::collective) others.push_back(i);
    // One that goes from collective to collective catches up, and one that said that it takes longer isn't lost.
    if (r.activity.of_all >= sequence) continue;
    if (!r.left && (r.activity.state == Doing::working || elapsed(r) <= limit)) continue;
    if (found < 0 || r.activity.of_all < ranks[static_cast<std::size_t>(found)].activity.of_all) found = i;
  }
  if (found < 0) return -1;
  const RankState& late = ranks[static_cast<std::size_t>(found)];
  text =
      fmt::format("{} is out of step: it {}, while {} {} waited for {} in {}", rank_text(ranks, found),
                  late.left ? "has finished"
                            : fmt::format("{} for {}", state_text(late.activity, false), seconds_text(elapsed(late))),
                  list_of_ranks(others), others.size() == 1 ? "has" : "have", seconds_text(elapsed(*waiting)),
                  collective_text(waiting->activity));
  return found;
}

int hung_rank(const std::vector<RankState>& ranks, std::chrono::milliseconds limit, std::string& text) {
  using std::chrono::milliseconds;
  int found = -1;
  const RankState* waiting = nullptr;  // for the one that was found
  for (int i = 0; i < static_cast<int>(ranks.size()); ++i) {
    const RankState& r = ranks[static_cast<std::size_t>(i)];
    if (!r.here || r.left || r.activity.state != Doing::idle || milliseconds(r.activity.still_ms) < limit) continue;
    const RankState* longest = nullptr;
    for (const RankState& other : ranks) {
      const Activity& a = other.activity;
      if (!other.here || other.left || !in_collective(a) || milliseconds(a.elapsed_ms) < limit / 3) continue;
      // One that has done its part already isn't waited for. Who is in a group of some ranks nobody knows here.
      if (a.state == Doing::collective && r.activity.of_all >= a.of_all) continue;
      if (!longest || a.elapsed_ms > longest->activity.elapsed_ms) longest = &other;
    }
    if (!longest || (found >= 0 && r.activity.still_ms <= ranks[static_cast<std::size_t>(found)].activity.still_ms)) {
      continue;
    }
    found = i;
    waiting = longest;
  }
  if (found < 0) return -1;
  std::vector<int> others;
  for (int i = 0; i < static_cast<int>(ranks.size()); ++i) {
    const RankState& r = ranks[static_cast<std::size_t>(i)];
    if (r.here && !r.left && together(r.activity, waiting->activity)) others.push_back(i);
  }
  const Activity& own = ranks[static_cast<std::size_t>(found)].activity;
  text = fmt::format(
      "{} hangs: it {} for {}, and none of its threads has run for {}{}, while {} {} waited for {} in {}",
      rank_text(ranks, found), state_text(own, false), seconds_text(milliseconds(own.elapsed_ms)),
      seconds_text(milliseconds(own.still_ms)), own.blocked.empty() ? "" : fmt::format(" ({})", printable(own.blocked)),
      list_of_ranks(others), others.size() == 1 ? "has" : "have",
      seconds_text(milliseconds(waiting->activity.elapsed_ms)), collective_text(waiting->activity));
  return found;
}

}  // namespace halfstep::dist::detail
