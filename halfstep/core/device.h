// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "halfstep/core/export.h"

namespace halfstep {

/// At most this many kinds of device (the CPU is kind 0, meta kind 1; plug-ins take the others as they are loaded).
inline constexpr int kMaxDeviceTypes = 16;
/// At most this many devices of one kind.
inline constexpr int kMaxDevices = 64;

/// Where a tensor lives: a kind of device and the index of the device within its kind. The CPU is `Device{}`. Kinds are
/// identified by name, so that a plug-in can add one.
///
/// Tensors of the device `meta` have sizes, strides and a dtype, but no values: an op there makes results of the right
/// kind and computes nothing, and memory_stats() counts what the CPU would have allocated. Reading a value throws
/// DeviceError.
struct HS_API Device {
  std::uint8_t type = 0;   ///< kind; 0 is the CPU
  std::uint8_t index = 0;  ///< which of that kind

  constexpr Device() = default;
  constexpr Device(std::uint8_t type, std::uint8_t index) : type(type), index(index) {}

  /// Parses `cpu`, `meta`, `cuda`, `cuda:1`, ...; a name without a number means number 0. An unknown kind is looked up
  /// among the plug-ins. Throws DeviceError with the known names when there is no such kind or number.
  explicit Device(std::string_view name);

  /// Whether it is the CPU.
  constexpr bool is_cpu() const { return type == 0; }
  /// Whether tensors there have no values.
  constexpr bool is_meta() const { return type == 1; }
  /// Whether a call is over when it returns, without queues or a plug-in: the CPU, and meta, which goes the CPU's ways.
  constexpr bool is_host() const { return type <= 1; }
  /// `cpu`, `meta`, or `cuda:0` for kinds that may have several.
  std::string str() const;

  friend constexpr bool operator==(Device, Device) = default;
};

/// The device without values.
inline constexpr Device kMeta{1, 0};

/// The number of the kind called `name`, registered if it is new. Throws DeviceError when kMaxDeviceTypes are taken.
HS_API std::uint8_t register_device_type(std::string_view name);
/// For the runtime: `load` is called when an unknown name is requested, and may register it; `count` returns how many
/// devices of a kind there are (-1: unknown).
HS_API void set_device_finder(void (*load)(), int (*count)(std::uint8_t type));

/// The device of new tensors if none is given: this thread's DeviceGuard, else set_default_device(), else the CPU.
HS_API Device default_device();
/// Changes it for all threads without a guard.
HS_API void set_default_device(Device device);

/// Makes `device` the default on this thread for the guard's lifetime; guards nest.
class HS_API DeviceGuard {
 public:
  explicit DeviceGuard(Device device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  Device outer_;
  bool had_outer_;
};

}  // namespace halfstep
