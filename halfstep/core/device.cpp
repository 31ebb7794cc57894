// SPDX-License-Identifier: Apache-2.0
#include "halfstep/core/device.h"

#include <charconv>
#include <mutex>
#include <vector>

#include "halfstep/core/fail.h"

namespace halfstep {
namespace {

struct TypeNames {
  std::mutex mutex;
  std::vector<std::string> names{"cpu"};
};

TypeNames& type_names() {
  static TypeNames names;
  return names;
}

}  // namespace

std::uint8_t register_device_type(std::string_view name) {
  auto& types = type_names();
  std::lock_guard lock(types.mutex);
  for (std::size_t i = 0; i < types.names.size(); ++i) {
    if (types.names[i] == name) return static_cast<std::uint8_t>(i);
  }
  if (types.names.size() >= kMaxDeviceTypes) {
    fail<DeviceError>("device: expected at most {} kinds of device, got one more: {}", kMaxDeviceTypes, name);
  }
  types.names.emplace_back(name);
  return static_cast<std::uint8_t>(types.names.size() - 1);
}

Device::Device(std::string_view name) {
  std::string_view kind = name.substr(0, name.find(':'));
  auto& types = type_names();
  std::lock_guard lock(types.mutex);
  bool found = false;
  for (std::size_t i = 0; i < types.names.size(); ++i) {
    if (types.names[i] == kind) {
      type = static_cast<std::uint8_t>(i);
      found = true;
    }
  }
  if (!found) fail<DeviceError>("device: expected one of {}, got '{}'", fmt::join(types.names, ", "), name);
  if (kind.size() != name.size()) {
    std::string_view number = name.substr(kind.size() + 1);
    unsigned value = 0;
    auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), value);
    if (error != std::errc{} || end != number.data() + number.size() || value > 255) {
      fail<DeviceError>("device: expected NAME or NAME:INDEX, got '{}'", name);
    }
    if (type == 0 && value != 0) fail<DeviceError>("device: expected cpu or cpu:0, got '{}'", name);
    index = static_cast<std::uint8_t>(value);
  }
}

std::string Device::str() const {
  auto& types = type_names();
  std::lock_guard lock(types.mutex);
  std::string text = type < types.names.size() ? types.names[type] : fmt::format("device{}", type);
  if (type != 0) text += fmt::format(":{}", index);
  return text;
}

}  // namespace halfstep
