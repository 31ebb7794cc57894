// SPDX-License-Identifier: Apache-2.0
// Internal: paths of modules by pattern.
#pragma once

#include <string_view>

namespace halfstep::quant::detail {

/// Whether the path is `pattern`, in which `*` stands for any text.
inline bool matches(std::string_view pattern, std::string_view path) {
  if (pattern.empty()) return path.empty();
  if (pattern[0] != '*') return !path.empty() && path[0] == pattern[0] && matches(pattern.substr(1), path.substr(1));
  for (std::size_t i = 0; i <= path.size(); ++i) {
    if (matches(pattern.substr(1), path.substr(i))) return true;
  }
  return false;
}

}  // namespace halfstep::quant::detail
