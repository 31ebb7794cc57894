// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "halfstep/core/export.h"
#include "halfstep/runtime/plugin.h"

namespace halfstep {

/// The result of trying to load a library.
struct PluginReport {
  std::string path;
  std::string kind;     ///< the kind of device that it provides; empty if it could not be used
  std::string vendor;   ///< as it reports, may be empty
  std::string version;  ///< of the plug-in, as it reports, may be empty
  int devices = 0;
  std::string error;  ///< why it could not be used; empty when it could
};

/// Loads the plug-ins that HALFSTEP_PLUGINS names (libraries or folders, separated by colons) and those in the folder
/// `halfstep/plugins` next to the library (HALFSTEP_PLUGIN_DIR names another). This happens once, automatically, when a
/// device with an unknown name is requested. Libraries that can't be used are reported in the log (those named by
/// HALFSTEP_PLUGINS as errors, others as warnings) and in plugin_reports().
HS_API void load_plugins();
/// Loads one library and returns its report. Throws DeviceError if it can't be used: no such file, not a plug-in,
/// another major version of the interface, a mandatory entry missing, a name that is taken.
HS_API PluginReport load_plugin(const std::string& path);
/// The libraries tried so far.
HS_API std::vector<PluginReport> plugin_reports();

/// For programs with a built-in device, and for tests: uses `table` as if a library had returned it.
HS_API PluginReport register_plugin(const halfstep_plugin_table& table, const std::string& origin);
/// The host table passed to plug-ins.
HS_API const halfstep_host& plugin_host();

}  // namespace halfstep
