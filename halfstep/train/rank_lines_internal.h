// SPDX-License-Identifier: Apache-2.0
// Named values as the text that ranks send each other.
#pragma once

#include <fmt/format.h>

#include <cstdlib>
#include <map>
#include <sstream>
#include <string>

namespace halfstep::training {

/// A value and its name; hexadecimal, so that no bit is lost.
inline std::string line_of(const std::string& name, double value) { return fmt::format("{:a} {}\n", value, name); }

/// Adds up values by name, in the order of their lines.
inline void add_lines(const std::string& lines, std::map<std::string, double>& sums) {
  std::istringstream in(lines);
  for (std::string value, name; std::getline(in, value, ' ') && std::getline(in, name);) {
    sums[name] += std::strtod(value.c_str(), nullptr);
  }
}

}  // namespace halfstep::training
