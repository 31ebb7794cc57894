// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "halfstep/core/export.h"
#include "halfstep/runtime/devices.h"

namespace halfstep::conformance {

/// A record that a device has passed check_device() on this machine, for this user.
struct HS_API DeviceRecord {
  std::string kind;      ///< of device: `cuda`
  std::string hardware;  ///< its name
  std::string version;   ///< of the plug-in and its driver
  std::string halfstep;  ///< version of Halfstep
  std::string date;      ///< `2026-11-21`, of the universal time
  std::string seconds;   ///< that the check took
};

/// Where records are: `halfstep/devices` in $XDG_STATE_HOME, or in ~/.local/state; empty where there is neither that
/// nor a home.
HS_API std::filesystem::path device_records_folder();
/// The record to write for a device that has just passed.
HS_API DeviceRecord make_device_record(const DeviceInfo& device, double seconds);
/// Writes a record atomically, replacing an older one of the same kind and hardware. Throws IoError.
HS_API void save_device_record(const DeviceRecord& record, const std::filesystem::path& folder);
/// The record of a device of this kind and hardware, if there is one that can be read. It may be for another version of
/// plug-in, driver or Halfstep: see is_current().
HS_API std::optional<DeviceRecord> load_device_record(const DeviceInfo& device, const std::filesystem::path& folder);
/// Whether the record matches the current versions.
HS_API bool is_current(const DeviceRecord& record, const DeviceInfo& device);
/// Whether the plug-in requests the check: its `extension("needs_check")` is not null.
HS_API bool needs_check(Device device);
/// The kind of a device: `cuda` of cuda:1.
HS_API std::string kind_of(Device device);

}  // namespace halfstep::conformance
