// SPDX-License-Identifier: Apache-2.0
// Numbers as the formats of archives, pickles and event files have them.
#pragma once

#include <cstdint>
#include <string>

namespace halfstep::io {

/// Appends the lowest `bytes` bytes of a number, the least significant first.
inline void little_endian(std::string& to, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) to += static_cast<char>(value >> (8 * i));
}

}  // namespace halfstep::io
