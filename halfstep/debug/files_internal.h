// SPDX-License-Identifier: Apache-2.0
// Internal: files and folders of this layer.
#pragma once

#include <filesystem>
#include <string>

namespace halfstep::debug::detail {

/// Writes a file under another name and renames it. Throws IoError, leaving nothing behind.
void write_text(const std::filesystem::path& path, const std::string& text);
/// Makes `wanted`, or `wanted.1`, `wanted.2`, ... where that is there already. Throws IoError.
std::filesystem::path make_new_folder(const std::filesystem::path& wanted);

}  // namespace halfstep::debug::detail
