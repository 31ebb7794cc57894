// SPDX-License-Identifier: Apache-2.0
#include "halfstep/io/atomic_file.h"

#include "halfstep/core/input_file_internal.h"

namespace halfstep::io {

std::string read_file(const std::filesystem::path& path, std::uintmax_t limit) { return read_whole_file(path, limit); }

}  // namespace halfstep::io
