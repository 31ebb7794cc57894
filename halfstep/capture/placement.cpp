// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

#include "halfstep/capture/placement_internal.h"

namespace halfstep::detail {
namespace {

enum class Order { size, area, duration, time };
// With more, only the first way is tried: the time grows with the square.
constexpr std::size_t kManyPlaces = 6000;
// Gaps are sought for so many, the largest ones; the others take the places of others of their size.
constexpr std::size_t kMostSought = 10000;
// An end so little above the least possible one, as a part of it, is good enough.
constexpr std::size_t kCloseEnough = 256;

double duration(const Placement& p) { return static_cast<double>(p.last - p.first) + 1; }

// Where a number of bytes fits.
struct Gap {
  static constexpr std::size_t kEndless = std::numeric_limits<std::size_t>::max();
  bool found = false;
  std::size_t offset = 0, bytes = 0;
  void take(std::size_t from, std::size_t to, std::size_t needed, bool tightest) {
    if (to - from < needed || (found && (!tightest || to - from >= bytes))) return;
    found = true;
    offset = from, bytes = to - from;
  }
};

// The lowest or the tightest gap between those of `placed` that are in use at the same time; they are in the order of
// their offsets.
std::size_t gap_for(const Placement& p, std::span<const Placement> all, std::span<const std::uint32_t> placed,
                    std::size_t border, bool tightest) {
  Gap best;
  std::size_t end = 0;  // of what lies below
  const auto between = [&](std::size_t from, std::size_t to) {
    if (from < border && border < to) {
      best.take(from, border, p.bytes, tightest);
      from = border;
    }
    best.take(from, to, p.bytes, tightest);
  };
  for (const std::uint32_t i : placed) {
    const Placement& other = all[i];
    if (other.last < p.first || p.last < other.first) continue;
    if (other.offset > end) between(end, other.offset);
    end = std::max(end, other.offset + other.bytes);
  }
  between(end, Gap::kEndless);
  return best.offset;
}

// Behind `end`: each at the place of one of as many bytes that is no longer in use, or at one of its own.
std::size_t place_by_size(std::span<const std::uint32_t> blocks, std::span<Placement> all, std::size_t end) {
  std::vector<std::uint32_t> order(blocks.begin(), blocks.end());
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return all[a].first < all[b].first; });
  std::map<std::size_t, std::vector<std::size_t>> free;  // offsets by bytes
  using Used = std::pair<std::size_t, std::uint32_t>;    // the last call, and the block
  std::priority_queue<Used, std::vector<Used>, std::greater<>> used;
  for (const std::uint32_t i : order) {
    for (; !used.empty() && used.top().first < all[i].first; used.pop()) {
      const Placement& gone = all[used.top().second];
      free[gone.bytes].push_back(gone.offset);
    }
    auto& same = free[all[i].bytes];
    if (same.empty()) {
      all[i].offset = end;
      end += all[i].bytes;
    } else {
      all[i].offset = same.back();
      same.pop_back();
    }
    used.emplace(all[i].last, i);
  }
  return end;
}

std::size_t place_in(std::span<const std::uint32_t> order, std::span<Placement> all, std::size_t border,
                     bool tightest) {
  std::vector<std::uint32_t> placed;
  placed.reserve(all.size());
  const auto add = [&](std::uint32_t i) {
    const auto at = std::upper_bound(placed.begin(), placed.end(), i,
                                     [&](std::uint32_t a, std::uint32_t b) { return all[a].offset < all[b].offset; });
    placed.insert(at, i);
  };
  for (std::uint32_t i = 0; i < all.size(); ++i) {
    if (all[i].fixed) add(i);
  }
  std::size_t end = border;
  const std::size_t sought = std::min(order.size(), kMostSought);
  for (const std::uint32_t i : order.first(sought)) {
    all[i].offset = gap_for(all[i], all, placed, border, tightest);
    end = std::max(end, all[i].offset + all[i].bytes);
    add(i);
  }
  return place_by_size(order.subspan(sought), all, end);
}

}  // namespace

std::size_t most_in_use(std::span<const Placement> all) {
  struct Change {
    std::size_t call;
    bool begins;
    std::size_t bytes;
  };
  std::vector<Change> changes;
  for (const Placement& p : all) {
    changes.push_back({p.first, true, p.bytes});
    changes.push_back({p.last, false, p.bytes});
  }
  // What ends with a call is in use beside what begins with it.
  std::sort(changes.begin(), changes.end(), [](const Change& a, const Change& b) {
    return a.call != b.call ? a.call < b.call : a.begins && !b.begins;
  });
  std::size_t now = 0, most = 0;
  for (const Change& c : changes) {
    now = c.begins ? now + c.bytes : now - c.bytes;
    most = std::max(most, now);
  }
  return most;
}

std::size_t find_places(std::span<Placement> all, std::size_t border) {
  std::vector<std::uint32_t> order;
  for (std::uint32_t i = 0; i < all.size(); ++i) {
    if (!all[i].fixed) order.push_back(i);
  }
  const std::size_t least = std::max(border, most_in_use(all));
  std::vector<Placement> best;
  std::size_t best_end = std::numeric_limits<std::size_t>::max();
  const auto done = [&] { return best_end <= least + least / kCloseEnough || all.size() > kManyPlaces; };
  for (const Order by : {Order::size, Order::area, Order::duration, Order::time}) {
    const auto key = [&](std::uint32_t i) -> std::array<double, 2> {
      const Placement& p = all[i];
      const auto bytes = static_cast<double>(p.bytes);
      switch (by) {
        case Order::size:
          return {-bytes, -duration(p)};
        case Order::area:
          return {-bytes * duration(p), -bytes};
        case Order::duration:
          return {-duration(p), -bytes};
        case Order::time:
          return {static_cast<double>(p.first), -bytes};
      }
      return {};
    };
    std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) { return key(a) < key(b); });
    for (const bool tightest : {true, false}) {
      const std::size_t end = place_in(order, all, border, tightest);
      if (end < best_end) {
        best_end = end;
        best.assign(all.begin(), all.end());
      }
      if (done()) break;
    }
    if (done()) break;
  }
  std::copy(best.begin(), best.end(), all.begin());
  return order.empty() ? border : best_end;
}

}  // namespace halfstep::detail
