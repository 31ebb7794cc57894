// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "halfstep/core/atomic_file.h"
#include "halfstep/core/export.h"

namespace halfstep::io {

using halfstep::AtomicFile;

/// Reads a whole file; throws IoError if it is missing, not a regular file, larger than `limit` bytes, or truncated
/// while it is read.
HS_API std::string read_file(const std::filesystem::path& path, std::uintmax_t limit);

}  // namespace halfstep::io
