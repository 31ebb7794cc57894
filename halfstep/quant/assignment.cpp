// SPDX-License-Identifier: Apache-2.0
#include "halfstep/quant/assignment.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "halfstep/core/error.h"
#include "halfstep/core/fail.h"

namespace halfstep::quant {

Assignment assign_precision(std::span<const std::string> order,
                            const std::function<double(std::span<const std::string> left)>& accuracy,
                            const AssignmentOptions& options) {
  std::set<std::string> names;
  for (const std::string& name : order) {
    if (!names.insert(name).second)
      fail<Error>("assign_precision: expected layers to be named once, got '{}' twice", name);
  }
  Assignment result;
  const auto measure = [&](std::vector<std::string> left) {
    const double found = accuracy(left);
    result.rounds.push_back({std::move(left), found, found >= options.least_accuracy});
    if (options.on_round) options.on_round(result.rounds.back());
    return result.rounds.back().met;
  };
  const auto first = [&](std::size_t k) {
    return std::vector<std::string>(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(k));
  };
  const auto done = [&](const AssignmentRound& round) {
    result.met = round.met;
    result.left = round.left;
    result.accuracy = round.accuracy;
    return result;
  };
  if (measure({})) return done(result.rounds.back());
  const std::size_t most = std::min(options.most, order.empty() ? 0 : order.size() - 1);
  std::size_t below = 0, enough = 0;  // enough: how many of the first do
  for (std::size_t k = 1; below < most && enough == 0; k *= 2) {
    const std::size_t tried = std::min(k, most);
    (measure(first(tried)) ? enough : below) = tried;
  }
  if (enough == 0) {
    const auto worse = [](const AssignmentRound& a, const AssignmentRound& b) {
      const auto size = [](const AssignmentRound& r) { return std::isnan(r.accuracy) ? -HUGE_VAL : r.accuracy; };
      return size(a) != size(b) ? size(a) < size(b) : a.left.size() > b.left.size();
    };
    return done(*std::max_element(result.rounds.begin(), result.rounds.end(), worse));
  }
  while (enough - below > 1) {
    const std::size_t middle = below + (enough - below) / 2;
    (measure(first(middle)) ? enough : below) = middle;
  }
  // Without the last of them it was measured.
  std::vector<std::string> left = first(enough);
  for (std::size_t i = enough - 1; i-- > 0;) {
    std::vector<std::string> fewer = left;
    fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
    if (measure(fewer)) left = std::move(fewer);
  }
  return done(*std::find_if(result.rounds.begin(), result.rounds.end(),
                            [&](const AssignmentRound& r) { return r.left == left; }));
}

}  // namespace halfstep::quant
