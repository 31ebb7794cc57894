// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/machine_file.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <cctype>
#include <cstdlib>

#include "halfstep/runtime/machine.h"

namespace halfstep {

namespace fs = std::filesystem;

fs::path machine_file(std::string_view folder) {
  const auto path_in = [](const char* variable) {
    const char* value = std::getenv(variable);
    return fs::path(value ? value : "");
  };
  fs::path cache = path_in("XDG_CACHE_HOME");  // one that is not absolute is to be passed over
  if (!cache.is_absolute()) cache = path_in("HOME") / ".cache";
  if (!cache.is_absolute()) return {};
  const MachineInfo info = machine();
  std::string name;
  for (const char c : fmt::format("{} {} {}", info.cpu, info.isa, info.threads)) {
    const bool plain = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
    if (plain) {
      name += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    } else if (!name.empty() && name.back() != '-') {
      name += '-';
    }
  }
  return cache / "halfstep" / folder / (name + ".json");
}

// By the file that this code was loaded from.
std::string library_build() {
  Dl_info info{};
  struct stat s {};
  static const char here = 0;
  if (dladdr(&here, &info) == 0 || !info.dli_fname || stat(info.dli_fname, &s) != 0) return HALFSTEP_VERSION;
  return fmt::format("{} {} {}.{:09}", HALFSTEP_VERSION, s.st_size, s.st_mtim.tv_sec, s.st_mtim.tv_nsec);
}

}  // namespace halfstep
