// SPDX-License-Identifier: Apache-2.0
// Every op of ops_f64.json against PyTorch, results and gradients; one that nothing calls is an error.
#include <gtest/gtest.h>

#include <set>

#include "tests/support/golden_calls.h"
#include "tests/support/pointwise_table.h"

namespace halfstep {
namespace {

std::set<std::string> golden_ops() {
  std::set<std::string> ops;
  for (const auto& e : test::read_goldens("ops_f64.json")) ops.insert(e.op);
  return ops;
}

TEST(OpGoldens, EveryOpMatchesPyTorchInFloat64) {
  const auto ops = golden_ops();
  EXPECT_GT(ops.size(), 150u);
  // pointwise_test.cpp has its own bounds for elementwise functions.
  for (const std::string& op : ops) {
    if (test::pointwise_functions().contains(op)) continue;
    SCOPED_TRACE(op);
    const auto call = test::golden_calls().find(op);
    if (call == test::golden_calls().end()) {
      ADD_FAILURE() << op << " is not called by tests/support/golden_calls.cpp";
      continue;
    }
    test::check_op_goldens(op, call->second);
  }
}

}  // namespace
}  // namespace halfstep
