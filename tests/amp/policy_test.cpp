// SPDX-License-Identifier: Apache-2.0
#include "halfstep/amp/policy.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "halfstep/core/error.h"

namespace halfstep {
namespace {

TEST(Policy, EveryOpHasARowAndEveryRowAnOp) {
  const auto rows = amp::policy_table();
  const auto has_row = [&](std::string_view op) {
    return std::any_of(rows.begin(), rows.end(), [&](const amp::PolicyRow& r) { return r.op == op; });
  };
  for (const Op* op : all_ops()) {
    // Tests define ops of their own.
    if (std::string_view(op->name).starts_with("test_")) continue;
    EXPECT_TRUE(has_row(op->name)) << op->name << " has no row in amp/policy.cpp";
  }
  for (const auto& row : rows) {
    EXPECT_NE(find_op(row.op), nullptr) << "amp/policy.cpp has a row for " << row.op << ", which doesn't exist";
    EXPECT_GE(row.reason.size(), 10u) << row.op << " has no reason";
  }
}

// What a gradient rule calls has nothing for a policy to decide: the op itself says what it is.
TEST(Policy, OpsOfBackwardPassesNeedNoRow) {
  int count = 0;
  for (const Op* op : all_ops()) {
    if (!std::string_view(op->name).ends_with("_backward")) continue;
    ++count;
    EXPECT_TRUE(op->backward) << op->name;
  }
  EXPECT_GT(count, 30);
  const Op& own = define_op({.name = "test_own_backward", .backward = true});
  EXPECT_EQ(amp::policy_of(own), amp::Policy::pass_through);
  EXPECT_NE(amp::policy_row(own).reason.find("backward pass"), std::string::npos);
  const auto rows = amp::policy_table();
  EXPECT_EQ(std::count_if(rows.begin(), rows.end(), [](const auto& r) { return r.op == "test_own_backward"; }), 1);
  EXPECT_EQ(std::count_if(rows.begin(), rows.end(), [](const auto& r) { return r.op == "relu_backward"; }), 1);
  EXPECT_THROW(amp::add_policy("test_own_backward", amp::Policy::float32, "an op of a backward pass"), AmpError);
}

TEST(Policy, NamesRoundTrip) {
  for (int i = 0; i < 7; ++i) {
    const auto policy = static_cast<amp::Policy>(i);
    EXPECT_EQ(amp::parse_policy(amp::name(policy)), policy);
  }
  EXPECT_EQ(amp::parse_policy("lower_precision"), amp::Policy::lower_precision);
  EXPECT_FALSE(amp::parse_policy("fast").has_value());
}

TEST(Policy, RowsAreNotReplaced) {
  EXPECT_THROW(amp::add_policy("mm", amp::Policy::float32, "no"), AmpError);
  EXPECT_THROW(amp::add_policy("no_such_op", amp::Policy::float32, "no"), AmpError);
}

}  // namespace
}  // namespace halfstep
