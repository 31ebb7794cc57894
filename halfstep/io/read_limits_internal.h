// SPDX-License-Identifier: Apache-2.0
// Internal: comparing files with ReadLimits.
#pragma once

#include <cstdint>
#include <string>

#include "halfstep/io/read_limits.h"

namespace halfstep::io::detail {

/// ReadLimits::max_bytes, or the memory of the machine or the control group.
HS_API std::uint64_t most_bytes(const ReadLimits& limits);
/// Throws IoError when tensors of `bytes` bytes are too many for a file.
void check_bytes(std::uint64_t bytes, const ReadLimits& limits, const std::string& file);
/// Throws IoError when a file of `file_bytes` bytes makes too many of them.
void check_unpacked(std::uint64_t bytes, std::uint64_t file_bytes, const ReadLimits& limits, const std::string& file);

}  // namespace halfstep::io::detail
