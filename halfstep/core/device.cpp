// SPDX-License-Identifier: Apache-2.0
#include "halfstep/core/device.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <mutex>
#include <vector>

#include "halfstep/core/fail.h"

namespace halfstep {
namespace {

struct TypeNames {
  std::mutex mutex;
  std::vector<std::string> names{"cpu", "meta"};
};

TypeNames& type_names() {
  static TypeNames names;
  return names;
}

std::atomic<void (*)()> g_load{nullptr};
std::atomic<int (*)(std::uint8_t)> g_count{nullptr};
std::atomic<Device> g_default{Device{}};
thread_local Device t_device;
thread_local bool t_guarded = false;

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

void set_device_finder(void (*load)(), int (*count)(std::uint8_t type)) {
  g_load.store(load);
  g_count.store(count);
}

Device::Device(std::string_view name) {
  const std::string_view kind = name.substr(0, name.find(':'));
  auto& types = type_names();
  const auto find = [&] {
    std::lock_guard lock(types.mutex);
    const auto it = std::find(types.names.begin(), types.names.end(), kind);
    if (it == types.names.end()) return false;
    type = static_cast<std::uint8_t>(it - types.names.begin());
    return true;
  };
  bool found = find();
  if (!found) {
    if (auto* load = g_load.load()) load();
    found = find();
  }
  if (!found) {
    std::lock_guard lock(types.mutex);
    fail<DeviceError>("device: expected one of {}, got '{}'", fmt::join(types.names, ", "), name);
  }
  if (kind.size() != name.size()) {
    std::string_view number = name.substr(kind.size() + 1);
    unsigned value = 0;
    auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), value);
    if (error != std::errc{} || end != number.data() + number.size() || value > 255) {
      fail<DeviceError>("device: expected NAME or NAME:INDEX, got '{}'", name);
    }
    if (is_host() && value != 0) fail<DeviceError>("device: expected {0} or {0}:0, got '{1}'", kind, name);
    index = static_cast<std::uint8_t>(value);
  }
  if (is_host()) return;
  auto* count = g_count.load();
  const int n = count ? count(type) : -1;
  if (n >= 0 && index >= n) {
    fail<DeviceError>("device: there {} {} device{} of kind {}, got '{}'", n == 1 ? "is" : "are",
                      n == 0 ? "no" : fmt::to_string(n), n == 1 ? "" : "s", kind, name);
  }
}

Device default_device() { return t_guarded ? t_device : g_default.load(std::memory_order_relaxed); }
void set_default_device(Device device) { g_default.store(device, std::memory_order_relaxed); }

DeviceGuard::DeviceGuard(Device device) : outer_(t_device), had_outer_(t_guarded) {
  t_device = device;
  t_guarded = true;
}
DeviceGuard::~DeviceGuard() {
  t_device = outer_;
  t_guarded = had_outer_;
}

std::string Device::str() const {
  auto& types = type_names();
  std::lock_guard lock(types.mutex);
  std::string text = type < types.names.size() ? types.names[type] : fmt::format("device{}", type);
  if (!is_host()) text += fmt::format(":{}", index);
  return text;
}

}  // namespace halfstep
