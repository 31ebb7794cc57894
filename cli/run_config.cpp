// SPDX-License-Identifier: Apache-2.0
#include "cli/run_config.h"

#include <fmt/format.h>

#include "cli/config_file.h"
#include "halfstep/core/error.h"
#include "halfstep/core/text.h"

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;

}  // namespace

std::string RunConfig::value(const std::string& flag) const {
  const auto it = values.find(flag);
  return it == values.end() ? std::string() : it->second;
}

fs::path RunConfig::data() const {
  fs::path folder = value("data");
  std::error_code error;
  if (!folder.empty() && !fs::exists(folder, error)) {
    throw IoError(fmt::format("{}: the run's data, as {} says, are not there any more; --data names where they are{}",
                              shown_path(folder), shown_path(file),
                              folder.is_relative() ? " (the path is seen from where the program is started)" : ""));
  }
  return folder;
}

RunConfig read_run_config(const fs::path& run) {
  std::error_code error;
  const fs::path folder = fs::is_directory(run, error) ? run : run.parent_path();
  RunConfig config;
  const fs::path file = folder / "config.yaml";
  if (!fs::exists(file, error)) return config;
  config.file = file;
  config.values = config_values(file);
  return config;
}

}  // namespace halfstep::cli
