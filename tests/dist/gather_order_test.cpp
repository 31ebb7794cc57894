// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/gather_order_internal.h"

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

namespace halfstep::dist::detail {
namespace {

// What is expected behind each unit of a pass, `-` where nothing is.
std::string expected(GatherOrder& order, bool with_gradients, std::initializer_list<std::size_t> pass) {
  order.begin(with_gradients);
  std::string text;
  for (const std::size_t unit : pass) {
    const GatherOrder::Unit* next = order.next({unit});
    text += next ? std::to_string(next->at(0)) : "-";
  }
  return text;
}

TEST(GatherOrder, IsThatOfTheLastPass) {
  GatherOrder order;
  EXPECT_EQ(expected(order, true, {0, 1, 2, 2, 1, 0}), "------");
  EXPECT_EQ(expected(order, true, {0, 1, 2, 2, 1, 0}), "12210-");
  // Without gradients, in between.
  EXPECT_EQ(expected(order, false, {0, 1, 2}), "---");
  EXPECT_EQ(expected(order, false, {0, 1, 2}), "12-");
  EXPECT_EQ(expected(order, true, {0, 1, 2, 2, 1, 0}), "12210-");
}

TEST(GatherOrder, IsLearntAnewWhereItChanges) {
  GatherOrder order;
  expected(order, true, {0, 1, 2, 3});
  EXPECT_EQ(expected(order, true, {0, 2, 3}), "1--");
  EXPECT_EQ(expected(order, true, {0, 2, 3}), "23-");
  EXPECT_EQ(expected(order, true, {0, 2}), "23") << "a pass may end early";
  EXPECT_EQ(expected(order, true, {0, 2, 3, 4}), "23--");
  EXPECT_EQ(expected(order, true, {0, 0, 1}), "2--") << "a module twice";
  EXPECT_EQ(expected(order, true, {0, 0, 1}), "01-");
}

TEST(GatherOrder, IsOfUnitsAsAWhole) {
  GatherOrder order;
  order.begin(true);
  order.next({0, 1});
  order.next({2});
  order.begin(true);
  EXPECT_EQ(order.next({0}), nullptr);
  order.begin(true);
  EXPECT_EQ(order.next({0}), nullptr) << "the rest was forgotten";
}

}  // namespace
}  // namespace halfstep::dist::detail
