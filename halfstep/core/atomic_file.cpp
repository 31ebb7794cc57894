// SPDX-License-Identifier: Apache-2.0
#include "halfstep/core/atomic_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/core/input_file_internal.h"
#include "halfstep/core/text.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kBuffer = std::size_t{256} << 10;
constexpr std::string_view kMark = ".tmp";
constexpr std::size_t kDigits = 16;
// Room for the mark and the digits in a name, of which file systems take 255 bytes.
constexpr std::size_t kMostOfName = 255 - kMark.size() - kDigits;

// Closes a descriptor that is only looked through.
class Descriptor {
 public:
  explicit Descriptor(int descriptor) : descriptor_(descriptor) {}
  ~Descriptor() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return descriptor_; }
  int release() { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_;
};

// Writing into a pipe that nobody reads, and beyond the limit on sizes of files, sends a signal that ends programs
// which didn't ask for it. Here it is an error like others.
class SignalsHeld {
 public:
  SignalsHeld() {
    sigset_t set;
    sigemptyset(&set);
    for (const int number : kSignals) sigaddset(&set, number);
    sigset_t pending;
    sigpending(&pending);
    for (std::size_t i = 0; i < std::size(kSignals); ++i) were_pending_[i] = sigismember(&pending, kSignals[i]) == 1;
    pthread_sigmask(SIG_BLOCK, &set, &before_);
  }
  ~SignalsHeld() {
    const int error = errno;
    for (std::size_t i = 0; i < std::size(kSignals); ++i) {
      if (were_pending_[i]) continue;
      sigset_t one;
      sigemptyset(&one);
      sigaddset(&one, kSignals[i]);
      const timespec now{};
      while (sigtimedwait(&one, nullptr, &now) == -1 && errno == EINTR) {
      }
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = error;
  }
  SignalsHeld(const SignalsHeld&) = delete;
  SignalsHeld& operator=(const SignalsHeld&) = delete;

 private:
  static constexpr int kSignals[] = {SIGPIPE, SIGXFSZ};
  bool were_pending_[2] = {};
  sigset_t before_{};
};

std::string random_digits() {
  std::uint64_t bits = 0;
  if (::getrandom(&bits, sizeof bits, 0) != sizeof bits) {
    std::random_device device;
    bits = std::uint64_t{device()} << 32 | device();
  }
  return fmt::format("{:016x}", bits);
}

std::string temporary_prefix(const std::string& name) { return name.substr(0, kMostOfName) + std::string(kMark); }

bool is_temporary(std::string_view name, std::string_view prefix) {
  if (name.size() != prefix.size() + kDigits || !name.starts_with(prefix)) return false;
  const std::string_view digits = name.substr(prefix.size());
  return digits.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

fs::path folder_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : fs::path("."); }

std::string reason(int error) {
  switch (error) {
    case ENOENT:
      return "its folder doesn't exist";
    case ELOOP:
      return "its links lead round in a circle";
    default:
      return std::strerror(error);
  }
}

std::optional<fs::path> read_link(const fs::path& link) {
  std::string text(256, '\0');
  for (;;) {
    const ssize_t n = ::readlink(link.c_str(), text.data(), text.size());
    if (n < 0) return std::nullopt;
    if (static_cast<std::size_t>(n) < text.size()) {
      text.resize(static_cast<std::size_t>(n));
      return fs::path(text);
    }
    text.resize(2 * text.size());
  }
}

// Links of /proc lead to open files, whatever their text says.
bool in_proc(const fs::path& path) {
  struct statfs info {};
  return ::statfs(folder_of(path).c_str(), &info) == 0 && info.f_type == PROC_SUPER_MAGIC;
}

// Where the last part of a path leads when it is a link; empty when that can only be opened.
std::optional<fs::path> follow(fs::path path, const std::string& shown) {
  constexpr int kMostLinks = 40;  // as many as the system follows
  for (int i = 0; i <= kMostLinks; ++i) {
    struct stat info {};
    if (::lstat(path.c_str(), &info) != 0 || !S_ISLNK(info.st_mode)) return path;
    if (in_proc(path)) return std::nullopt;
    const auto target = read_link(path);
    if (!target) return path;
    path = target->is_absolute() ? *target : path.parent_path() / *target;
  }
  fail<IoError>("{}: can't be written: {}", shown, reason(ELOOP));
}

// A process that was killed while it wrote `name` leaves its temporary file behind, without a lock.
void clear_away(int folder, const std::string& name) {
  const std::string prefix = temporary_prefix(name);
  const int listed = ::openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* const entries = listed < 0 ? nullptr : ::fdopendir(listed);
  if (entries == nullptr) {
    if (listed >= 0) ::close(listed);
    return;
  }
  std::vector<std::string> names;
  while (const dirent* entry = ::readdir(entries)) {
    if (is_temporary(entry->d_name, prefix)) names.emplace_back(entry->d_name);
  }
  ::closedir(entries);
  for (const std::string& left : names) {
    const Descriptor file(::openat(folder, left.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    struct stat info {
    }, same{};
    if (file.get() < 0 || ::fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) continue;
    if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) continue;
    if (::fstatat(folder, left.c_str(), &same, AT_SYMLINK_NOFOLLOW) != 0 || same.st_ino != info.st_ino) continue;
    ::unlinkat(folder, left.c_str(), 0);
  }
}

}  // namespace

AtomicFile::AtomicFile(fs::path path, bool durable) : path_(std::move(path)), durable_(durable) {
  const std::string shown = shown_path(path_);
  if (path_.empty()) fail<IoError>("a file can't be written: its name is empty");
  // Only to look: opening a device may do something, and opening a pipe waits. The system's own rules for links in
  // folders that all may write to hold here too.
  const Descriptor there(::open(path_.c_str(), O_PATH | O_CLOEXEC));
  struct stat info {};
  const bool exists = there.get() >= 0 && ::fstat(there.get(), &info) == 0;
  if (!exists && errno != ENOENT) fail<IoError>("{}: can't be written: {}", shown, reason(errno));
  if (exists && (S_ISDIR(info.st_mode) || S_ISSOCK(info.st_mode))) {
    fail<IoError>("{}: can't be written: it is {}", shown, detail::file_kind(info.st_mode));
  }
  const auto target = follow(path_, shown);
  direct_ = exists && (!S_ISREG(info.st_mode) || !target);
  if (target && exists && !direct_) {
    // A link that was turned elsewhere between the two looks.
    struct stat same {};
    direct_ = ::lstat(target->c_str(), &same) != 0 || same.st_ino != info.st_ino || same.st_dev != info.st_dev;
  }
  if (direct_) {
    file_ = ::open(path_.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC | O_NOCTTY);
    if (file_ < 0) fail<IoError>("{}: can't be written: {}", shown, std::strerror(errno));
    return;
  }
  if (!target || target->filename().empty() || target->filename() == "." || target->filename() == "..") {
    fail<IoError>("{}: can't be written: expected the name of a file", shown);
  }
  begin(*target, exists ? &info : nullptr);
}

void AtomicFile::begin(const fs::path& target, const void* there) {
  name_ = target.filename().native();
  folder_ = ::open(folder_of(target).c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (folder_ < 0) fail<IoError>("{}: can't be written: {}", shown_path(path_), reason(errno));
  if (name_.size() > 255) fail_errno("naming it", ENAMETOOLONG);
  clear_away(folder_, name_);
  if (there == nullptr) {
    open_temporary(0666);
    return;
  }
  const auto& old = *static_cast<const struct stat*>(there);
  open_temporary(0600);
  struct stat own {};
  if (::fstat(file_, &own) != 0) fail_errno("looking at it", errno);
  mode_t mode = old.st_mode & 07777;
  // Who may not give a file away keeps it; what the old group was allowed is not for another one.
  if (own.st_gid != old.st_gid && ::fchown(file_, static_cast<uid_t>(-1), old.st_gid) != 0) {
    mode = (mode & ~mode_t{02070}) | (mode & 0007) << 3;
  }
  if (own.st_uid != old.st_uid && ::fchown(file_, old.st_uid, static_cast<gid_t>(-1)) != 0) mode &= ~mode_t{04000};
  // Some file systems have no modes.
  if (::fchmod(file_, mode) != 0 && errno != EPERM && errno != ENOTSUP) fail_errno("setting its mode", errno);
}

// The lock says to others that whoever writes this file is alive, in whatever container.
void AtomicFile::open_temporary(unsigned mode) {
  constexpr int kTries = 100;
  for (int i = 0; i < kTries; ++i) {
    temporary_ = temporary_prefix(name_) + random_digits();
    file_ = ::openat(folder_, temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
    if (file_ < 0) {
      if (errno == EEXIST || errno == EINTR) continue;
      temporary_.clear();
      fail_errno("making it", errno);
    }
    struct stat info {};
    const bool locked = ::flock(file_, LOCK_EX | LOCK_NB) == 0;
    if (!locked && errno != EWOULDBLOCK) return;  // a file system without locks, where nobody clears away
    // Someone who cleared away took it for a leftover before it was locked.
    if (locked && ::fstat(file_, &info) == 0 && info.st_nlink > 0) return;
    discard();
  }
  fail<IoError>("{}: can't be written: no free name for a temporary file", shown_path(path_));
}

void AtomicFile::remove_leftovers(const fs::path& path) {
  const auto target = follow(path, shown_path(path));
  if (!target) return;
  const Descriptor folder(::open(folder_of(*target).c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() >= 0) clear_away(folder.get(), target->filename().native());
}

AtomicFile::~AtomicFile() {
  discard();
  if (folder_ >= 0) ::close(folder_);
}

void AtomicFile::discard() noexcept {
  const int error = errno;
  if (file_ >= 0) {
    // Before it is closed, and with it unlocked.
    if (!temporary_.empty()) ::unlinkat(folder_, temporary_.c_str(), 0);
    ::close(std::exchange(file_, -1));
  }
  temporary_.clear();
  errno = error;
}

void AtomicFile::fail_errno(const char* what, int error) {
  discard();
  fail<IoError>("{}: {} failed: {}{}", shown_path(path_), what, std::strerror(error),
                direct_ ? "" : "; what stood there before is unchanged");
}

void AtomicFile::write_through(const char* data, std::size_t bytes) {
  const SignalsHeld held;
  while (bytes > 0) {
    const ssize_t n = ::write(file_, data, std::min<std::size_t>(bytes, std::size_t{1} << 30));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_errno("writing", errno);
    data += n;
    bytes -= static_cast<std::size_t>(n);
  }
}

void AtomicFile::flush() {
  write_through(buffer_.data(), buffer_.size());
  buffer_.clear();
}

void AtomicFile::write(const void* data, std::size_t bytes) {
  if (file_ < 0) fail<IoError>("{}: can't be written: it is closed", shown_path(path_));
  const char* at = static_cast<const char*>(data);
  if (buffer_.size() + bytes > kBuffer) flush();
  if (bytes >= kBuffer) {
    write_through(at, bytes);
  } else if (bytes > 0) {
    buffer_.append(at, bytes);
  }
}

void AtomicFile::commit() {
  if (file_ < 0) fail<IoError>("{}: can't be written: it is closed", shown_path(path_));
  flush();
  if (direct_) {
    // Pipes and most devices have nothing to sync.
    if (durable_ && ::fsync(file_) != 0 && errno != EINVAL && errno != EROFS && errno != ENOTSUP)
      fail_errno("syncing", errno);
    if (::close(std::exchange(file_, -1)) != 0) fail_errno("closing", errno);
    return;
  }
  if (durable_ && ::fsync(file_) != 0) fail_errno("syncing", errno);
  if (::renameat(folder_, temporary_.c_str(), folder_, name_.c_str()) != 0) {
    fail_errno(errno == EBUSY ? "renaming over it (is it a mount of its own?)" : "renaming over it", errno);
  }
  temporary_.clear();
  // All that is in it was synced: closing has nothing left to fail for.
  ::close(std::exchange(file_, -1));
  if (!durable_) return;
  // The name is on the disk only when its folder is.
  const Descriptor listed(::openat(folder_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (listed.get() >= 0 && ::fsync(listed.get()) != 0 && errno != EINVAL && errno != EROFS && errno != ENOTSUP) {
    fail<IoError>("{}: syncing its folder failed: {}; the file is there, but may be gone after a power failure",
                  shown_path(path_), std::strerror(errno));
  }
}

}  // namespace halfstep
