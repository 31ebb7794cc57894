// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <string>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/train/compression_internal.h"
#include "halfstep/train/flag_numbers_internal.h"

namespace halfstep::training {

Compression parse_compression(const std::string& text) {
  constexpr const char* kFlag = "--compress-gradients";
  constexpr const char* kForms =
      "expected off, f16, bf16 or powersgd[:RANK[,START]] with whole numbers, RANK at least 1";
  if (text == "off") return {};
  if (text == "f16" || text == "bf16") return {.dtype = parse_dtype(text)};
  const std::string name = text.substr(0, text.find(':'));
  if (name != "powersgd") fail<Error>("{}: {}, got '{}'", kFlag, kForms, text);
  dist::PowerSGDOptions options;
  if (name != text) {
    const std::vector<double> numbers = flag_numbers(kFlag, kForms, text.substr(name.size() + 1), text);
    constexpr double kMost = 1e9;
    bool fine = numbers.size() <= 2 && numbers[0] >= 1;
    for (const double n : numbers) fine = fine && n == std::floor(n) && n >= 0 && n <= kMost;
    if (!fine) fail<Error>("{}: {}, got '{}'", kFlag, kForms, text);
    options.rank = static_cast<int>(numbers[0]);
    if (numbers.size() == 2) options.start = static_cast<std::int64_t>(numbers[1]);
  }
  return {.power_sgd = options};
}

}  // namespace halfstep::training
