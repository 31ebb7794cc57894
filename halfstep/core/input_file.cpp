// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "halfstep/core/fail.h"
#include "halfstep/core/input_file_internal.h"
#include "halfstep/core/text.h"

namespace halfstep {
const char* detail::file_kind(unsigned mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

InputFile::InputFile(const std::filesystem::path& path) : name_(shown_path(path)) {
  // Looked at before it is opened: opening some devices does something.
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    const int error = errno;
    if (error == ENOENT) fail<IoError>("{}: there is no such file", name_);
    fail<IoError>("{}: can't be opened: {}", name_, std::strerror(error));
  }
  if (!S_ISREG(info.st_mode)) fail<IoError>("{}: expected a file, got {}", name_, detail::file_kind(info.st_mode));
  file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (file_ < 0) fail<IoError>("{}: can't be opened: {}", name_, std::strerror(errno));
  if (::fstat(file_, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(file_);
    fail<IoError>("{}: expected a file, got {}", name_, detail::file_kind(info.st_mode));
  }
  size_ = static_cast<std::uint64_t>(info.st_size);
  seconds_ = info.st_mtim.tv_sec;
  nanoseconds_ = info.st_mtim.tv_nsec;
}

InputFile::~InputFile() { ::close(file_); }

void InputFile::read(std::uint64_t at, void* to, std::size_t bytes) const {
  char* place = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t n = ::pread(file_, place, std::min<std::size_t>(bytes, std::size_t{1} << 30), static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail<IoError>("{}: can't be read: {}", name_, std::strerror(errno));
    if (n == 0) {
      fail<IoError>("{}: changed while it was read: it had {} bytes and ends at byte {} now", name_, size_, at);
    }
    place += n;
    at += static_cast<std::uint64_t>(n);
    bytes -= static_cast<std::size_t>(n);
  }
}

void InputFile::check_unchanged() const {
  struct stat info {};
  if (::fstat(file_, &info) != 0) fail<IoError>("{}: can't be read: {}", name_, std::strerror(errno));
  if (static_cast<std::uint64_t>(info.st_size) != size_) {
    fail<IoError>("{}: changed while it was read: it had {} bytes and has {} now", name_, size_, info.st_size);
  }
  if (info.st_mtim.tv_sec != seconds_ || info.st_mtim.tv_nsec != nanoseconds_) {
    fail<IoError>("{}: changed while it was read: it was written meanwhile", name_);
  }
}

std::string read_whole_file(const std::filesystem::path& path, std::uint64_t limit) {
  const InputFile file(path);
  if (file.size() > limit) fail<IoError>("{}: expected at most {} bytes, got {}", file.name(), limit, file.size());
  std::string text;
  try {
    text.resize(static_cast<std::size_t>(file.size()));
  } catch (const std::bad_alloc&) {
    fail<IoError>("{}: no memory for its {} bytes", file.name(), file.size());
  }
  file.read(0, text.data(), text.size());
  return text;
}

}  // namespace halfstep
