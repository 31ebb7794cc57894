// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/debugging.h"

#include <charconv>
#include <limits>

#include "halfstep/core/fail.h"
#include "halfstep/train/flags.h"

namespace halfstep::training {

StepRange parse_steps(const std::string& text, const std::string& flag) {
  constexpr std::int64_t kEnd = std::numeric_limits<std::int64_t>::max();
  if (text == "all") return {1, kEnd};
  const auto whole = [&](std::string_view part) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    if (error != std::errc{} || end != part.data() + part.size() || part.empty() || value < 1) {
      fail<Error>("{}: expected N, FIRST-LAST, FIRST- or all, steps counted from 1, got '{}'", flag, text);
    }
    return value;
  };
  const std::string_view view = text;
  const auto dash = view.find('-', 1);
  StepRange range;
  range.first = whole(view.substr(0, dash));
  range.last = dash == std::string_view::npos ? range.first
               : dash + 1 == view.size()      ? kEnd
                                              : whole(view.substr(dash + 1));
  if (range.last < range.first) fail<Error>("{}: expected a last step behind the first, got '{}'", flag, text);
  return range;
}

void check(const DebugConfig& config) {
  DebugConfig c = config;
  check(flags(c));
}

}  // namespace halfstep::training
