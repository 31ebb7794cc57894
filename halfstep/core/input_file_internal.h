// SPDX-License-Identifier: Apache-2.0
// Internal: files that are read, by whoever trusts nothing of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include "halfstep/core/export.h"

namespace halfstep {

/// A regular file, open for reading at any place. Nothing is mapped: a file that becomes shorter is an error and no
/// signal. All members throw IoError naming the file.
class HS_API InputFile {
 public:
  /// Folders, pipes and devices are refused without being opened, as opening a pipe would wait for its writer.
  explicit InputFile(const std::filesystem::path& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  /// How it is called in messages.
  const std::string& name() const { return name_; }
  /// Bytes when it was opened.
  std::uint64_t size() const { return size_; }
  /// Exactly `bytes` bytes from `at` on; an error when it ends before.
  void read(std::uint64_t at, void* to, std::size_t bytes) const;
  /// An error when it has another size or was written since it was opened.
  void check_unchanged() const;

 private:
  std::string name_;
  int file_ = -1;
  std::uint64_t size_ = 0;
  std::int64_t seconds_ = 0;
  std::int64_t nanoseconds_ = 0;
};

/// The whole of a regular file of at most `limit` bytes, as long as it was when it was opened: logs may grow meanwhile.
HS_API std::string read_whole_file(const std::filesystem::path& path, std::uint64_t limit);

namespace detail {

/// Of the mode of something that is no regular file (stat()): `a folder`, `a pipe`, ...
const char* file_kind(unsigned mode);

}  // namespace detail
}  // namespace halfstep
