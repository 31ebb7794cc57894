// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "halfstep/core/export.h"

namespace halfstep::io {

/// What a file of weights may take, so that one from outside can't take a machine's memory or hours of its time.
/// Readers compare before they take memory, and throw IoError naming the limit.
struct ReadLimits {
  /// Bytes of all tensors of a file together. 0: as many as the machine has memory, or the control group that the
  /// program runs in.
  std::uint64_t max_bytes = 0;
  /// By how many bytes the tensors may exceed eight times the file's own size: compressed data unpack to more than
  /// they are, and tensors of a .pth file may repeat their elements or share them. Each tensor counts in full.
  std::uint64_t max_unpacked = std::uint64_t{1} << 30;
};

/// The limits of all calls that are given none.
HS_API ReadLimits read_limits();
/// Sets them for the whole program; before other threads read.
HS_API void set_read_limits(const ReadLimits& limits);

}  // namespace halfstep::io
