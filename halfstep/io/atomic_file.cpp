// SPDX-License-Identifier: Apache-2.0
#include "halfstep/io/atomic_file.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>

#include "halfstep/core/fail.h"

namespace halfstep::io {

namespace {

// A process that was killed while it wrote leaves its temporary file behind. Whoever writes the same file next removes
// those of processes that are gone.
void remove_leftovers(const std::filesystem::path& path) {
  const std::string prefix = path.filename().string() + ".tmp";
  const auto folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with(prefix)) continue;
    pid_t process = 0;
    const auto [last, bad] = std::from_chars(name.data() + prefix.size(), name.data() + name.size(), process);
    if (bad != std::errc{} || last != name.data() + name.size() || process <= 0) continue;
    if (::kill(process, 0) != 0 && errno == ESRCH) ::unlink(it->path().c_str());
  }
}

}  // namespace

AtomicFile::AtomicFile(std::filesystem::path path) : path_(std::move(path)) {
  remove_leftovers(path_);
  temporary_ = path_;
  temporary_ += fmt::format(".tmp{}", ::getpid());
  file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file_ < 0) {
    const int error = errno;
    fail<IoError>("{}: can't be written: {}", path_.string(), std::strerror(error));
  }
}

AtomicFile::~AtomicFile() {
  if (file_ < 0) return;
  ::close(file_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::fail_errno(const char* what, int error) {
  ::close(std::exchange(file_, -1));
  ::unlink(temporary_.c_str());
  fail<IoError>("{}: {} failed: {}; what stood there before is unchanged", path_.string(), what, std::strerror(error));
}

void AtomicFile::write(const void* data, std::size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(file_, at, std::min<std::size_t>(bytes, std::size_t{1} << 30));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_errno("writing", errno);
    at += n;
    bytes -= static_cast<std::size_t>(n);
  }
}

void AtomicFile::commit() {
  if (::fsync(file_) != 0) fail_errno("syncing", errno);
  if (::close(std::exchange(file_, -1)) != 0) {
    const int error = errno;
    ::unlink(temporary_.c_str());
    fail<IoError>("{}: closing failed: {}", path_.string(), std::strerror(error));
  }
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary_.c_str());
    fail<IoError>("{}: renaming over it failed: {}; what stood there before is unchanged", path_.string(),
                  std::strerror(error));
  }
  // The name is on the disk only when its folder is.
  const auto folder = path_.has_parent_path() ? path_.parent_path() : std::filesystem::path(".");
  const int dir = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (dir >= 0) {
    ::fsync(dir);
    ::close(dir);
  }
}

std::string read_file(const std::filesystem::path& path, std::uintmax_t limit) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (error || !std::filesystem::exists(status)) fail<IoError>("{}: there is no such file", path.string());
  if (!std::filesystem::is_regular_file(status))
    fail<IoError>("{}: expected a file, got {}", path.string(),
                  std::filesystem::is_directory(status) ? "a folder" : "something else");
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (error) fail<IoError>("{}: {}", path.string(), error.message());
  if (size > limit) fail<IoError>("{}: expected at most {} bytes, got {}", path.string(), limit, size);
  std::ifstream stream(path, std::ios::binary);
  std::string text(static_cast<std::size_t>(size), '\0');
  if (!stream || !stream.read(text.data(), static_cast<std::streamsize>(text.size()))) {
    fail<IoError>("{}: can't be read: {}", path.string(), std::strerror(errno));
  }
  return text;
}

}  // namespace halfstep::io
