// SPDX-License-Identifier: Apache-2.0
#include "libraries/library.h"

#if defined(HALFSTEP_CUDA_EMULATED)
#include "cuda_emulator/functions.h"
#else
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <vector>
#endif

namespace hscuda {

#if defined(HALFSTEP_CUDA_EMULATED)

Library::Library(const char* name, int major)
    : handle_(this), path_("emulated lib" + std::string(name) + ".so." + std::to_string(major)) {}

void* Library::address(const char* symbol) {
  if (!failure_.empty()) return nullptr;
  void* const found = emulator::find_function(symbol);
  if (found == nullptr) failure_ = path_ + " has no " + symbol;
  return found;
}

#else

namespace {

/// Where to look for `file`, in order.
std::vector<std::string> places(const std::string& file) {
  std::vector<std::string> all = {file};
  // Not for a program that runs with another user's rights.
  const char* const folders = secure_getenv("HALFSTEP_CUDA_LIBRARIES");
  std::string_view rest = folders ? folders : "";
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find(':'), rest.size());
    if (end > 0) all.push_back(std::string(rest.substr(0, end)) + '/' + file);
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
#if defined(HALFSTEP_CUDA_LIBRARY_DIR)
  all.push_back(std::string(HALFSTEP_CUDA_LIBRARY_DIR) + '/' + file);
#endif
  return all;
}

}  // namespace

Library::Library(const char* name, int major) {
  const std::string file = "lib" + std::string(name) + ".so." + std::to_string(major);
  std::string said;
  for (const std::string& path : places(file)) {
    handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ != nullptr) {
      path_ = path;
      return;
    }
    const char* const error = dlerror();
    said += std::string(said.empty() ? "" : "; ") + (error ? error : path.c_str());
  }
  failure_ = file + " can't be opened (its folder can be named in HALFSTEP_CUDA_LIBRARIES): " + said;
}

void* Library::address(const char* symbol) {
  if (!failure_.empty()) return nullptr;
  void* const found = dlsym(handle_, symbol);
  if (found == nullptr) failure_ = path_ + " has no " + symbol;
  return found;
}

#endif

}  // namespace hscuda
