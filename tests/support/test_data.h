// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <optional>

namespace halfstep::test {

/// Folder of the real data sets (mnist/, fashion-mnist/ and others): $HALFSTEP_DATA, else ../shared/data beside the
/// source checkout. Empty when neither is there; tests that need it then skip and say so.
std::optional<std::filesystem::path> data_dir();

/// Folder of the committed expected values, tests/goldens. Always there.
std::filesystem::path goldens_dir();

/// The program `halfstep` of the same build, for tests of the command line.
std::filesystem::path program_path();

/// A new empty folder for the files of one test, removed with all that is in it when the object goes.
class TemporaryDir {
 public:
  TemporaryDir();
  ~TemporaryDir();
  TemporaryDir(const TemporaryDir&) = delete;
  TemporaryDir& operator=(const TemporaryDir&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace halfstep::test
