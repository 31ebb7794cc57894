// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <filesystem>
#include <span>
#include <string>

#include "halfstep/core/export.h"

namespace halfstep::io {

/// A file that is there whole or not at all: written under another name in the same folder, synced and renamed by
/// commit(). Whatever stood there before stays until then; when writing fails or commit() is not reached, the
/// unfinished file is removed, and what killed processes left of the same file is removed when writing begins. All
/// members throw IoError naming the file.
class HS_API AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  void write(const void* data, std::size_t bytes);
  void commit();

 private:
  [[noreturn]] void fail_errno(const char* what, int error);
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int file_ = -1;
};

/// Reads a whole file; throws IoError when it is missing, no regular file, or larger than `limit` bytes.
HS_API std::string read_file(const std::filesystem::path& path, std::uintmax_t limit);

}  // namespace halfstep::io
