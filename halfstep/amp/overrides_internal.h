// SPDX-License-Identifier: Apache-2.0
// Internal: what stands behind AutocastState::overrides.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "halfstep/amp/autocast.h"

namespace halfstep::amp::detail {

/// A policy for each op, by its id, in place of the policy table.
struct OpPolicies {
  std::vector<Policy> of;
  Policy others = Policy::pass_through;  ///< of ops that were defined later
};

/// What a region, or a module's precision, changes about the table.
struct Overrides {
  std::shared_ptr<const OpPolicies> table;  ///< null: the policy table
  std::map<int, Policy> ops;                ///< by op id; wins over the table
  std::vector<ModuleOverride> modules;
};

/// Whether a module's path has the pattern's names, `*` standing for any one.
bool path_matches(std::string_view pattern, std::string_view path);

}  // namespace halfstep::amp::detail
