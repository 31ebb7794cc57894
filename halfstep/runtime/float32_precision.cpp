// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/float32_precision.h"

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string_view>

#include "halfstep/core/fail.h"
#include "halfstep/runtime/device_backend.h"
#include "halfstep/runtime/float32_precision_internal.h"
#include "halfstep/runtime/log.h"

namespace halfstep {
namespace {

// Orders a change and the plug-ins that come while it is under way.
std::mutex& mutex() {
  static std::mutex& instance = *new std::mutex;
  return instance;
}

Float32Precision from_environment() {
  const char* text = std::getenv("HALFSTEP_TF32");
  const std::string_view value = text ? text : "";
  if (value == "1") return Float32Precision::high;
  if (!value.empty() && value != "0") {
    log(LogLevel::warning, fmt::format("HALFSTEP_TF32: expected 0 or 1, got '{}'; not used", value));
  }
  return Float32Precision::highest;
}

std::atomic<Float32Precision>& current() {
  static std::atomic<Float32Precision> instance{from_environment()};
  return instance;
}

void tell(const DeviceBackend& backend, Float32Precision precision) {
  if (!backend.table.extension) return;
  using Function = void (*)(std::int32_t);
  if (const auto set = reinterpret_cast<Function>(backend.table.extension("set_float32_precision"))) {
    set(static_cast<std::int32_t>(precision));
  }
}

}  // namespace

void set_float32_precision(Float32Precision precision) {
  if (precision != Float32Precision::highest && precision != Float32Precision::high) {
    fail<Error>("set_float32_precision: expected highest (0) or high (1), got {}",
                static_cast<std::int32_t>(precision));
  }
  const std::lock_guard lock(mutex());
  current().store(precision, std::memory_order_relaxed);
  for (const DeviceBackend* backend : backends()) {
    if (!backend->ended()) tell(*backend, precision);
  }
}

Float32Precision float32_precision() { return current().load(std::memory_order_relaxed); }

const char* name(Float32Precision precision) { return precision == Float32Precision::high ? "high" : "highest"; }

namespace detail {
void tell_float32_precision(const DeviceBackend& backend) {
  const std::lock_guard lock(mutex());
  tell(backend, float32_precision());
}
}  // namespace detail

}  // namespace halfstep
