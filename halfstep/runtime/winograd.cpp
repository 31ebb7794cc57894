// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/winograd.h"

#include <atomic>
#include <cstdlib>
#include <optional>

#include "halfstep/core/fail.h"
#include "halfstep/runtime/log.h"

namespace halfstep {
namespace {

constexpr Winograd kWinogradChoices[] = {Winograd::off, Winograd::tiles_2x2, Winograd::tiles_4x4};

std::optional<Winograd> find_winograd(std::string_view text) {
  for (const Winograd choice : kWinogradChoices) {
    if (text == name(choice)) return choice;
  }
  return std::nullopt;
}

Winograd winograd_from_environment() {
  const char* text = std::getenv("HALFSTEP_WINOGRAD");
  if (text == nullptr || *text == '\0') return Winograd::off;
  if (const auto found = find_winograd(text)) return *found;
  log(LogLevel::warning, fmt::format("HALFSTEP_WINOGRAD: expected off, 2x2 or 4x4, got '{}'; not used", text));
  return Winograd::off;
}

std::atomic<Winograd>& current_winograd() {
  static std::atomic<Winograd> instance{winograd_from_environment()};
  return instance;
}

}  // namespace

void set_winograd(Winograd winograd) {
  if (winograd != Winograd::off && winograd != Winograd::tiles_2x2 && winograd != Winograd::tiles_4x4) {
    fail<Error>("set_winograd: expected off (0), tiles_2x2 (2) or tiles_4x4 (4), got {}",
                static_cast<std::int32_t>(winograd));
  }
  current_winograd().store(winograd, std::memory_order_relaxed);
}

Winograd winograd() { return current_winograd().load(std::memory_order_relaxed); }

const char* name(Winograd winograd) {
  return winograd == Winograd::tiles_4x4 ? "4x4" : winograd == Winograd::tiles_2x2 ? "2x2" : "off";
}

Winograd winograd_from_string(std::string_view text) {
  const auto found = find_winograd(text);
  if (!found) fail<Error>("Winograd's tiles: expected off, 2x2 or 4x4, got '{}'", text);
  return *found;
}

}  // namespace halfstep
