// SPDX-License-Identifier: Apache-2.0
// A plug-in's table as a host sees it, without any of Halfstep between: for the tests of plug-ins.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "halfstep/runtime/plugin.h"
#include "halfstep/runtime/plugin_loader.h"

namespace halfstep::test {

/// The table of the library in `file`; what the plug-in logs fails the test. Throws std::runtime_error.
inline const halfstep_plugin_table& opened_plugin(const char* file) {
  void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  const auto open = reinterpret_cast<halfstep_plugin_fn>(dlsym(library, HALFSTEP_PLUGIN_SYMBOL));
  static const halfstep_host host = {sizeof(halfstep_host),
                                     HALFSTEP_PLUGIN_MAJOR,
                                     HALFSTEP_PLUGIN_MINOR,
                                     "test",
                                     [](int32_t, const char* text) { ADD_FAILURE() << text; },
                                     plugin_host().cpu_kernel};
  return *open(&host);
}

/// The last error, which the plug-in then forgets.
inline halfstep_error taken_error(const halfstep_plugin_table& table) {
  halfstep_error error = {};
  error.size = sizeof error;
  table.error(&error);
  return error;
}

}  // namespace halfstep::test
