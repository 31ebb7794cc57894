// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/core/device.h"
#include "halfstep/core/dtype.h"
#include "halfstep/core/export.h"

namespace halfstep {

/// A device and what it can do.
struct DeviceInfo {
  Device device;
  std::string name;                  ///< of the hardware
  std::string vendor;                ///< of the plug-in, may be empty
  std::string version;               ///< of the plug-in and its driver, may be empty
  std::uint64_t memory_total = 0;    ///< bytes
  std::uint64_t memory_free = 0;     ///< bytes
  std::vector<DType> dtypes;         ///< that tensors there may have
  std::vector<DType> native_dtypes;  ///< whose matrix products run in dedicated units
  int priorities = 1;                ///< of queues
  bool pinned = false;               ///< has pinned host memory
  bool graphs = false;               ///< can record and replay
  bool collectives = false;
  bool lost = false;     ///< failed permanently; its free memory is then unknown
  bool profile = false;  ///< reports how long its work took
};

/// The CPU and every device of every plug-in, which are loaded for it; not meta, which computes nothing.
HS_API std::vector<DeviceInfo> devices();
/// What one device is. Throws DeviceError.
HS_API DeviceInfo device_info(Device device);
/// How many devices of a kind there are; 0 for a kind that isn't known. Doesn't throw.
HS_API int device_count(std::string_view kind) noexcept;

/// How an op would run on a device.
struct OpSupport {
  bool native = false;
  bool strided = false;  ///< takes any strides; otherwise tensors are made contiguous first
  std::string reason;    ///< why it isn't native, as the plug-in says; may be empty
};
/// Asks the plug-in of `device` about an op's kernel; on the CPU looks into its table.
HS_API OpSupport op_support(Device device, std::string_view op, DType dtype);

/// Seconds that the queues of a device have worked so far, if its plug-in says so (extension "busy_time"): the
/// difference of two calls by the time between them is the share of a queue that was used.
HS_API std::optional<double> device_busy_seconds(Device device);

/// A function or object of the plug-in that is not part of the interface, by name; null if it has no such extension.
HS_API void* device_extension(Device device, const char* name);

}  // namespace halfstep
