// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

#include "halfstep/core/export.h"

namespace halfstep {

/// A file that is there whole or not at all: written under a random name in the same folder, synced and renamed by
/// commit(). Whatever stood there before stays until then; when writing fails or commit() is not reached, the
/// unfinished file is removed, and what killed processes left of the same file is removed when writing begins.
///
/// - A file that is replaced gives its mode to the new one, and owner and group where the process may set them. A new
///   one has mode 0666 less the umask.
/// - A link stays: the file that it leads to is written, also one that is not there yet.
/// - Devices, pipes and what lies under /proc (`/dev/null`, `/dev/stdout`, a named pipe) are written into as the data
///   come; a pipe waits for its reader.
///
/// The folder may be renamed and the working folder changed meanwhile. All members throw IoError naming the file.
class HS_API AtomicFile {
 public:
  /// With `durable` off nothing is synced: after a power failure the file may be damaged.
  explicit AtomicFile(std::filesystem::path path, bool durable = true);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  /// Adds bytes at the end.
  void write(const void* data, std::size_t bytes);
  /// Puts the file in its place. Nothing may be written after it.
  void commit();

  /// Removes what killed processes left of that file, which need not be there itself; what others are writing stays.
  static void remove_leftovers(const std::filesystem::path& path);

 private:
  void begin(const std::filesystem::path& target, const void* there);
  void open_temporary(unsigned mode);
  void write_through(const char* data, std::size_t bytes);
  void flush();
  void discard() noexcept;
  [[noreturn]] void fail_errno(const char* what, int error);

  std::filesystem::path path_;  // as it was given
  std::string name_;            // of the file that is replaced, in its folder
  std::string temporary_;       // in the same folder
  std::string buffer_;
  int folder_ = -1;
  int file_ = -1;
  bool durable_ = true;
  bool direct_ = false;  // written into, not replaced
};

}  // namespace halfstep
