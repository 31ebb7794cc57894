// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/tuning.h"

#include <atomic>
#include <cstdlib>
#include <string_view>

#include "halfstep/core/fail.h"
#include "halfstep/runtime/log.h"

namespace halfstep {
namespace {

bool tuning_from_environment() {
  const char* text = std::getenv("HALFSTEP_TUNE");
  const std::string_view value = text ? text : "";
  if (value == "1") return true;
  if (!value.empty() && value != "0") {
    log(LogLevel::warning, fmt::format("HALFSTEP_TUNE: expected 0 or 1, got '{}'; not used", value));
  }
  return false;
}

std::atomic<bool>& current_tuning() {
  static std::atomic<bool> instance{tuning_from_environment()};
  return instance;
}

}  // namespace

void set_tuning(bool on) { current_tuning().store(on, std::memory_order_relaxed); }

bool tuning() { return current_tuning().load(std::memory_order_relaxed); }

}  // namespace halfstep
