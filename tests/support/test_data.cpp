// SPDX-License-Identifier: Apache-2.0
#include "tests/support/test_data.h"

#include <stdlib.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <system_error>

namespace halfstep::test {
namespace fs = std::filesystem;

// Both paths come from the build: tests run from the checkout that built them.
std::optional<fs::path> data_dir() {
  const char* given = std::getenv("HALFSTEP_DATA");
  const fs::path path =
      given != nullptr && *given != '\0' ? fs::path(given) : fs::path(HALFSTEP_SOURCE_DIR) / "../shared/data";
  std::error_code error;
  if (!fs::is_directory(path, error)) return std::nullopt;
  return fs::canonical(path);
}

fs::path goldens_dir() { return fs::path(HALFSTEP_SOURCE_DIR) / "tests/goldens"; }

fs::path program_path() { return HALFSTEP_PROGRAM_PATH; }

TemporaryDir::TemporaryDir() {
  std::string name = (fs::temp_directory_path() / "halfstep-test-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make a temporary folder: " + name);
  path_ = name;
}

TemporaryDir::~TemporaryDir() {
  std::error_code error;
  fs::remove_all(path_, error);
}

}  // namespace halfstep::test
