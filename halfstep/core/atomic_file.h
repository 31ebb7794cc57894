// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

#include "halfstep/core/export.h"

namespace halfstep {

/// A file that is written atomically: it is created under a random name in the same folder, synced and renamed by
/// commit(). Any existing file stays until then. If writing fails or commit() is not reached, the unfinished file is
/// removed; leftovers of killed processes for the same file are removed when writing begins.
///
/// - A replaced file's mode is kept, as are owner and group where the process may set them. A new file has mode 0666
///   less the umask.
/// - A symbolic link stays: its target is written, even if it does not exist yet.
/// - Devices, pipes and files under /proc (`/dev/null`, `/dev/stdout`, a named pipe) are written into as the data
///   arrive; a pipe waits for its reader.
///
/// The folder may be renamed and the working directory changed meanwhile. All members throw IoError naming the file.
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
