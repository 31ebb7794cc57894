// SPDX-License-Identifier: Apache-2.0
// What the environment may say (docs/devices/cuda.md). Read once by whoever asks.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace hscuda {

/// A switch: 0 is off, anything else on.
inline bool switch_setting(const char* name, bool otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr || text[0] == '\0' ? otherwise : std::strcmp(text, "0") != 0;
}

/// A number of bytes; `otherwise` where there is none above 0.
inline int64_t bytes_setting(const char* name, int64_t otherwise) {
  const char* const text = std::getenv(name);
  const long long wanted = text == nullptr ? 0 : std::strtoll(text, nullptr, 10);
  return wanted > 0 ? static_cast<int64_t>(wanted) : otherwise;
}

}  // namespace hscuda
