// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "halfstep/core/export.h"

namespace halfstep::io {

/// Limits on a weight file, so that an untrusted one can't exhaust a machine's memory or take hours to read. Readers
/// check them before they allocate memory, and throw IoError naming the limit.
struct ReadLimits {
  /// Bytes of all tensors of a file together. 0: the machine's memory, or the program's cgroup limit.
  std::uint64_t max_bytes = 0;
  /// The number of bytes by which the tensors may exceed eight times the file's size: compressed data expand, and
  /// tensors of a .pth file may repeat or share elements. Each tensor counts in full.
  std::uint64_t max_unpacked = std::uint64_t{1} << 30;
};

/// The default limits, for calls without any.
HS_API ReadLimits read_limits();
/// Sets them for the whole program; call it before other threads read.
HS_API void set_read_limits(const ReadLimits& limits);

}  // namespace halfstep::io
