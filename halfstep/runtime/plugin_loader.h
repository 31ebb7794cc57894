// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "halfstep/core/export.h"
#include "halfstep/runtime/plugin.h"

namespace halfstep {

/// What became of a library that was tried.
struct PluginReport {
  std::string path;
  std::string kind;     ///< the kind of device that it brought; empty when it could not be used
  std::string vendor;   ///< as it says, may be empty
  std::string version;  ///< of the plug-in, as it says, may be empty
  int devices = 0;
  std::string error;  ///< why it could not be used; empty when it could
};

/// Loads the plug-ins that HALFSTEP_PLUGINS names (libraries or folders, separated by colons) and those in the folder
/// `halfstep/plugins` beside the library (HALFSTEP_PLUGIN_DIR names another). Happens once, by itself, when a device is
/// asked for by a name that isn't known. What can't be used is said in the log (those that HALFSTEP_PLUGINS names as
/// errors, others as warnings) and in plugin_reports().
HS_API void load_plugins();
/// Loads one library and returns what it brought. Throws DeviceError when it can't be used: no such file, not a
/// plug-in, another major version of the interface, a mandatory entry missing, a name that is taken.
HS_API PluginReport load_plugin(const std::string& path);
/// The libraries tried so far.
HS_API std::vector<PluginReport> plugin_reports();

/// For programs that carry a device of their own, and for tests: uses `table` as if a library had returned it.
HS_API PluginReport register_plugin(const halfstep_plugin_table& table, const std::string& origin);
/// What is handed to plug-ins.
HS_API const halfstep_host& plugin_host();

}  // namespace halfstep
