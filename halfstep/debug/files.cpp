// SPDX-License-Identifier: Apache-2.0
#include "halfstep/core/atomic_file.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/debug/files_internal.h"

namespace halfstep::debug::detail {

namespace fs = std::filesystem;

// Not synced: a dump has thousands of such files, and is made anew.
void write_text(const fs::path& path, const std::string& text) {
  AtomicFile file(path, false);
  file.write(text.data(), text.size());
  file.commit();
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
  fail<IoError>("{}: can't be made: {}", shown_path(folder), error.message());
}

}  // namespace halfstep::debug::detail
