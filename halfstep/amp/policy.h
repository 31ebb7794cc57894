// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/ops/op.h"

namespace halfstep::amp {

/// What autocast does with the floating inputs of an op (f64 and f8 tensors, integers and bools are always left alone).
enum class Policy : std::uint8_t {
  lower_precision,  ///< cast to the region's dtype
  float32,          ///< cast to f32
  float32_output,   ///< inputs stay; the result is f32 unless the caller named a dtype
  widest,           ///< cast to the widest dtype among the inputs
  pass_through,     ///< left as they are; mixed dtypes follow type promotion
  banned,           ///< an error with a suggestion
  low_output,       ///< inputs stay; the result has the region's dtype unless the caller named one
};

/// `lower precision`, `float32`, `float32 output`, `widest`, `pass through`, `banned`, `low output`.
HS_API const char* name(Policy policy);
/// The policy of that name (also with `_` for blanks), or none.
HS_API std::optional<Policy> parse_policy(std::string_view text);

/// A row of the policy table.
struct PolicyRow {
  std::string op;
  Policy policy;
  std::string reason;  ///< why; for banned ops the suggestion
};

/// The table for all devices, by class and name: PyTorch's CUDA list plus the deviations that
/// docs/guide/mixed-precision.md explains.
HS_API std::vector<PolicyRow> policy_table();
/// The row of an op; ops without one (custom ops, those of backward passes) pass through.
HS_API PolicyRow policy_row(const Op& op);
/// The policy of an op, from the table.
HS_API Policy policy_of(const Op& op);
/// Adds a row for a custom op. Throws AmpError when the op doesn't exist, has a row already, or is part of a backward
/// pass (Op::backward).
HS_API void add_policy(std::string_view op, Policy policy, std::string_view reason);

}  // namespace halfstep::amp
