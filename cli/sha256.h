// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace halfstep::cli {

/// SHA-256 (FIPS 180-4) of bytes that come piece by piece.
class Sha256 {
 public:
  void add(const void* data, std::size_t bytes);
  /// The sum of all bytes so far as 64 lower-case hexadecimal digits. Nothing can be added afterwards.
  std::string finish();

 private:
  void block(const std::uint8_t* bytes);

  std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::uint8_t, 64> rest_{};  // bytes that don't fill a block yet
  std::uint64_t total_ = 0;
};

}  // namespace halfstep::cli
