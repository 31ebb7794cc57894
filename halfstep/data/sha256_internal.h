// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace halfstep::data::detail {

/// SHA-256 (FIPS 180-4) of bytes that come piece by piece; OpenSSL's.
class Sha256 {
 public:
  /// Throws Error when the library refuses, as one that is configured to forbid the sum does.
  Sha256();
  ~Sha256();
  void add(const void* data, std::size_t bytes);
  /// The sum of all bytes so far as 64 lower-case hexadecimal digits. Nothing can be added afterwards.
  std::string finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace halfstep::data::detail
