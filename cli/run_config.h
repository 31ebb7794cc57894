// SPDX-License-Identifier: Apache-2.0
// What a run says of itself, in config.yaml beside its checkpoints.
#pragma once

#include <filesystem>
#include <map>
#include <string>

namespace halfstep::cli {

/// The configuration of a run.
struct RunConfig {
  std::filesystem::path file;                 ///< empty: the run has none
  std::map<std::string, std::string> values;  ///< by flag, without dashes

  /// Whether there is one.
  explicit operator bool() const { return !file.empty(); }
  /// The value of a flag, or an empty text.
  std::string value(const std::string& flag) const;
  /// Where its data lie; empty: the built-in digits. Throws IoError when they are not there any more.
  std::filesystem::path data() const;
};

/// config.yaml in the folder of a run, or beside a checkpoint; an empty one where there is none. Throws UsageError and
/// IoError as apply_config_file.
RunConfig read_run_config(const std::filesystem::path& run);

}  // namespace halfstep::cli
