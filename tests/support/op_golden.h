// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "halfstep/core/tensor.h"
#include "tests/support/golden.h"

namespace halfstep::test {

/// Calls an op as a golden entry says and returns its outputs.
using GoldenCall = std::function<std::vector<Tensor>(const GoldenEntry& entry, const std::vector<Tensor>& inputs)>;

/// The tensor of a golden, of the golden's dtype.
Tensor to_tensor(const GoldenTensor& golden, bool requires_grad = false);

/// Runs the entries of ops_f64.json (or another file of its kind) for `op` and checks outputs and gradients: floats
/// within 1e-12 + 1e-11 |expected| (both sides round in float64, in different orders, over some dozens of terms), other
/// dtypes exactly. Fails when there are no entries.
void check_op_goldens(const std::string& op, const GoldenCall& call, const std::string& file = "ops_f64.json");

/// Runs the entries of policy_ops.json for `op` in regions of their dtype and checks dtypes exactly and values within
/// u |exact| + 16 u32 scale, as tests/goldens/README.md derives. Entries that must throw are checked for it.
void check_policy_goldens(const std::string& op, const GoldenCall& call);

/// Dimensions of the attribute `dim`: an integer, a list, or none at all (empty).
Shape golden_dims(const GoldenEntry& entry);

}  // namespace halfstep::test
