// SPDX-License-Identifier: Apache-2.0
// The search for layers that stay in floating point, by measures whose answer is known.
#include "halfstep/quant/assignment.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <set>

#include "halfstep/core/error.h"
#include "tests/support/errors.h"

namespace halfstep::quant {
namespace {

using Names = std::vector<std::string>;

Names numbered(int n) {
  Names names;
  for (int i = 0; i < n; ++i) names.push_back(fmt::format("layer{}", i));
  return names;
}

// What each quantized layer costs, in percent; those of `needed` are the only ones that cost anything.
struct Costs {
  std::set<std::string> needed = {};
  double cost = 1;
  std::vector<Names> asked = {};
  double operator()(std::span<const std::string> left) {
    asked.emplace_back(left.begin(), left.end());
    double lost = 0;
    for (const std::string& name : needed) lost += std::find(left.begin(), left.end(), name) == left.end() ? cost : 0;
    return (90 - lost) / 100;
  }
};

Assignment assign(const Names& order, Costs& costs, double least, std::size_t most = 1000) {
  return assign_precision(order, [&](std::span<const std::string> left) { return costs(left); },
                          {.least_accuracy = least, .most = most});
}

// For each set of layers that have to be left, wherever they stand in the order, that set is found.
TEST(Assignment, FindsTheSmallestSet) {
  const Names order = numbered(8);
  for (unsigned bits = 0; bits < 128; ++bits) {  // not the last one: one layer is quantized in any case
    Costs costs;
    for (unsigned i = 0; i < 7; ++i) {
      if ((bits >> i & 1) != 0) costs.needed.insert(order[i]);
    }
    const Assignment found = assign(order, costs, 0.9);
    ASSERT_TRUE(found.met) << bits;
    EXPECT_EQ(std::set<std::string>(found.left.begin(), found.left.end()), costs.needed);
    EXPECT_EQ(found.accuracy, 0.9);
    // k is how many of the first it takes; log2(8) is 3.
    const auto k = static_cast<std::size_t>(std::bit_width(bits));
    EXPECT_LE(found.rounds.size(), 2 + 2 * 3 + k) << bits;
    EXPECT_EQ(found.rounds.size(), costs.asked.size());
    const std::set<Names> different(costs.asked.begin(), costs.asked.end());
    EXPECT_EQ(different.size(), costs.asked.size()) << "nothing is measured twice";
  }
}

TEST(Assignment, AllowsTheDropThatIsAskedFor) {
  const Names order = numbered(16);
  for (int allowed = 0; allowed <= 10; ++allowed) {
    Costs costs{.needed = {order.begin(), order.begin() + 10}};
    const Assignment found = assign(order, costs, (90 - allowed) / 100.0 - 1e-9);
    EXPECT_TRUE(found.met);
    // Each layer costs a point: all but so many are left.
    EXPECT_EQ(found.left.size(), static_cast<std::size_t>(10 - allowed));
    EXPECT_TRUE(std::is_sorted(found.left.begin(), found.left.end(), [&](const auto& a, const auto& b) {
      return std::find(order.begin(), order.end(), a) < std::find(order.begin(), order.end(), b);
    }));
  }
}

TEST(Assignment, RoundsAreToldAsTheyAreMeasured) {
  const Names order{"a", "b", "c", "d", "e"};
  Costs costs{.needed = {"a", "c"}};
  std::vector<Names> told;
  std::vector<bool> met;
  const Assignment found = assign_precision(order, [&](std::span<const std::string> left) { return costs(left); },
                                            {.least_accuracy = 0.9, .on_round = [&](const AssignmentRound& r) {
                                               told.push_back(r.left);
                                               met.push_back(r.met);
                                             }});
  // Doubling, the middle between 2 and 4, and each of the first three but the last taken away.
  EXPECT_EQ(told,
            (std::vector<Names>{{}, {"a"}, {"a", "b"}, {"a", "b", "c", "d"}, {"a", "b", "c"}, {"a", "c"}, {"c"}}));
  EXPECT_EQ(met, (std::vector<bool>{false, false, false, true, true, true, false}));
  EXPECT_EQ(found.left, (Names{"a", "c"}));
}

TEST(Assignment, NotMetIsTheBestThatWasMeasured) {
  const Names order = numbered(8);
  Costs costs{.needed = {order.begin(), order.end()}};
  Assignment found = assign(order, costs, 0.9);
  EXPECT_FALSE(found.met);
  EXPECT_EQ(found.left, Names(order.begin(), order.begin() + 7));
  EXPECT_DOUBLE_EQ(found.accuracy, 0.89);
  // A smaller set that is as good goes before; and no more than `most` are tried.
  costs = {.needed = {"layer0"}};
  found = assign(order, costs, 0.95);
  EXPECT_FALSE(found.met);
  EXPECT_EQ(found.left, Names{"layer0"});
  costs = {.needed = {order.begin(), order.end()}};
  found = assign(order, costs, 0.9, 3);
  EXPECT_EQ(found.left, (Names{"layer0", "layer1", "layer2"}));
  for (const Names& asked : costs.asked) EXPECT_LE(asked.size(), 3u);
  // NaN isn't enough, and nothing is worse.
  int calls = 0;
  found = assign_precision(order, [&](std::span<const std::string>) { return ++calls == 2 ? 0.1 : NAN; },
                           {.least_accuracy = 0.5});
  EXPECT_FALSE(found.met);
  EXPECT_EQ(found.left, Names{"layer0"});
  EXPECT_EQ(found.accuracy, 0.1);
  // Of one layer or none there is nothing to be left.
  for (const Names& few : {Names{}, Names{"a"}}) {
    found = assign_precision(few, [](std::span<const std::string>) { return 0.5; }, {.least_accuracy = 0.6});
    EXPECT_FALSE(found.met);
    EXPECT_EQ(found.rounds.size(), 1u);
  }
}

TEST(Assignment, RefusesALayerTwice) {
  const Names order{"a", "b", "a"};
  EXPECT_EQ(
      test::error_of<Error>([&] { assign_precision(order, [](std::span<const std::string>) { return 1.0; }, {}); }),
      "assign_precision: expected layers to be named once, got 'a' twice");
}

}  // namespace
}  // namespace halfstep::quant
