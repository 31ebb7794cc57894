// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <cmath>

#include "halfstep/core/fail.h"
#include "halfstep/train/flag_numbers_internal.h"

namespace halfstep::training {

std::vector<double> flag_numbers(const char* flag, const char* forms, const std::string& list,
                                 const std::string& whole) {
  std::vector<double> result;
  std::size_t at = 0;
  while (true) {
    const std::size_t comma = std::min(list.find(',', at), list.size());
    double value = 0;
    const auto [end, error] = std::from_chars(list.data() + at, list.data() + comma, value);
    if (error != std::errc{} || end != list.data() + comma || !std::isfinite(value)) {
      fail<Error>("{}: {}, got '{}'", flag, forms, whole);
    }
    result.push_back(value);
    if (comma == list.size()) return result;
    at = comma + 1;
  }
}

}  // namespace halfstep::training
