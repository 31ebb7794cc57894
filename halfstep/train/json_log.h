// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>
#include <utility>
#include <variant>

#include "halfstep/core/export.h"

namespace halfstep::train {

/// One JSON object a line: `{"event":"step","epoch":1,...}`. NaN and infinities are null. Each line is written out at
/// once.
class HS_API JsonLog {
 public:
  using Value = std::variant<bool, std::int64_t, std::uint64_t, double, std::string>;
  JsonLog() = default;
  /// Starts the file anew, or with `append` goes on behind what is there. Throws IoError.
  explicit JsonLog(const std::filesystem::path& path, bool append = false);
  /// Writes a line; nothing without a file. Throws IoError when the disk is full.
  void write(const char* event, std::initializer_list<std::pair<const char*, Value>> fields);

 private:
  std::filesystem::path path_;
  std::ofstream file_;
};

}  // namespace halfstep::train
