// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cstring>
#include <fstream>

#include "halfstep/core/fail.h"
#include "halfstep/debug/files_internal.h"

namespace halfstep::debug::detail {

namespace fs = std::filesystem;

void write_text(const fs::path& path, const std::string& text) {
  fs::path part = path;
  part += ".part";
  std::error_code ignored;
  errno = 0;
  std::ofstream file(part, std::ios::binary | std::ios::trunc);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  file.close();
  if (!file) {
    const int error = errno;
    fs::remove(part, ignored);
    fail<IoError>("{}: can't be written: {}", path.string(), error ? std::strerror(error) : "is the disk full?");
  }
  std::error_code error;
  fs::rename(part, path, error);
  if (error) {
    fs::remove(part, ignored);
    fail<IoError>("{}: can't be written: {}", path.string(), error.message());
  }
}

fs::path make_new_folder(const fs::path& wanted) {
  std::error_code error;
  if (wanted.has_parent_path()) fs::create_directories(wanted.parent_path(), error);
  fs::path folder = wanted;
  for (int i = 1; !error; ++i) {
    // True only for the one who made it: two processes don't get the same folder.
    if (fs::create_directory(folder, error)) return folder;
    if (error && error != std::errc::file_exists) break;
    error.clear();
    folder = wanted;
    folder += "." + std::to_string(i);
  }
  fail<IoError>("{}: can't be made: {}", folder.string(), error.message());
}

}  // namespace halfstep::debug::detail
