// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/devices.h"

#include "halfstep/core/fail.h"
#include "halfstep/runtime/device_backend.h"
#include "halfstep/runtime/machine.h"
#include "halfstep/runtime/plugin_loader.h"

namespace halfstep {
namespace {

std::vector<DType> dtypes_of(std::uint32_t mask) {
  std::vector<DType> list;
  for (int i = 0; i < kNumDTypes; ++i) {
    if (mask >> i & 1) list.push_back(static_cast<DType>(i));
  }
  return list;
}

DeviceInfo cpu_info() {
  const MachineInfo m = machine();
  DeviceInfo info;
  info.name = m.cpu;
  info.memory_total = static_cast<std::uint64_t>(m.memory_bytes);
  info.dtypes.assign(kAllDTypes.begin(), kAllDTypes.end());
  info.native_dtypes = {DType::f32, DType::f64};
  if (m.bf16_units) info.native_dtypes.push_back(DType::bf16);
  if (m.f16_units) info.native_dtypes.push_back(DType::f16);
  return info;
}

DeviceInfo meta_info() {
  DeviceInfo info;
  info.device = kMeta;
  info.name = "tensors without values";
  info.dtypes.assign(kAllDTypes.begin(), kAllDTypes.end());
  return info;
}

}  // namespace

DeviceInfo device_info(Device device) {
  if (device.is_cpu()) return cpu_info();
  if (device.is_meta()) return meta_info();
  DeviceBackend& backend = backend_for(device, "device_info");
  const halfstep_device_info& given = backend.info(device.index);
  DeviceInfo info;
  info.device = device;
  info.name = given.name;
  info.vendor = backend.table.vendor ? backend.table.vendor : "";
  info.version = backend.table.version ? backend.table.version : "";
  info.memory_total = given.memory;
  std::uint64_t free_bytes = 0, total = 0;
  try {
    backend.check(backend.table.memory_info(device.index, &free_bytes, &total), "device_info", device.index);
    info.memory_free = free_bytes;
    if (total != 0) info.memory_total = total;
  } catch (const DeviceLostError&) {
    info.lost = true;
  }
  info.dtypes = dtypes_of(given.dtypes);
  info.native_dtypes = dtypes_of(given.low_dtypes);
  info.priorities = given.priorities;
  info.pinned = backend.has_pinned();
  info.graphs = backend.has_graphs();
  info.collectives = backend.has_collectives();
  info.profile = backend.has_profile();
  return info;
}

std::vector<DeviceInfo> devices() {
  load_plugins();
  std::vector<DeviceInfo> list{cpu_info()};
  for (DeviceBackend* b : backends()) {
    for (int i = 0; i < b->count; ++i) list.push_back(device_info(b->device(i)));
  }
  return list;
}

int device_count(std::string_view kind) noexcept {
  if (kind == "cpu" || kind == "meta") return 1;
  try {
    load_plugins();
    for (DeviceBackend* b : backends()) {
      if (b->kind == kind) return b->count;
    }
  } catch (...) {  // a plug-in in trouble has no devices
  }
  return 0;
}

OpSupport op_support(Device device, std::string_view op, DType dtype) {
  const KernelTable& table = kernel_table(op);
  if (device.is_host()) {
    const bool native = table.find(Device{}, dtype) != nullptr;
    return {.native = native, .strided = native, .reason = ""};
  }
  DeviceBackend::Answer answer = backend_for(device, "op_support").ask(std::string(op), table.version, dtype);
  return {.native = answer.native, .strided = answer.strided, .reason = std::move(answer.reason)};
}

std::optional<double> device_busy_seconds(Device device) {
  if (device.is_host()) return std::nullopt;
  void* const extension = device_extension(device, "busy_time");
  if (!extension) return std::nullopt;
  const auto busy_time = reinterpret_cast<std::uint64_t (*)(std::int32_t)>(extension);
  return static_cast<double>(busy_time(device.index)) * 1e-9;
}

void* device_extension(Device device, const char* name) {
  if (device.is_meta()) return nullptr;
  DeviceBackend& backend = backend_for(device, "device_extension");
  return backend.table.extension ? backend.table.extension(name) : nullptr;
}

}  // namespace halfstep
