// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/run_folder.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <string>
#include <thread>
#include <utility>

#include "halfstep/core/atomic_file.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/io/checkpoint_shards_internal.h"
#include "halfstep/runtime/log.h"

namespace halfstep::training {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLock = "run.lock";
// First those that make a folder a run's, then what people look at, which anybody may have a file of the name of, then
// the reports of debugging.
constexpr const char* kFiles[] = {kLastCheckpoint,   kBestCheckpoint,    "config.yaml",          "log.jsonl",
                                  "results.csv",     "curves.svg",       "classes.csv",          "confusion.svg",
                                  "predictions.png", "labels.svg",       "train-batch.png",      "f1.svg",
                                  "precision.svg",   "recall.svg",       "precision-recall.svg", "debug-nonfinite.txt",
                                  "debug-twin.txt",  "debug-compare.txt"};
constexpr std::span<const char*const> kCheckpoints = std::span(kFiles).first(2), kMarks = std::span(kFiles).first(4),
                                      kShown = std::span(kFiles).subspan(4, 11);
constexpr std::chrono::milliseconds kMoment{5};

[[noreturn]] void cannot_be_made(const fs::path& path, int error) {
  fail<IoError>("{}: can't be made: {}", shown_path(path), std::strerror(error));
}

// "who": what the holder wrote into the lock, a moment after it took it.
[[noreturn]] void in_use(const fs::path& folder, int lock) {
  char text[200];
  ssize_t n = 0;
  for (int tries = 0; tries < 10 && (n = ::pread(lock, text, sizeof text, 0)) == 0; ++tries) {
    std::this_thread::sleep_for(kMoment);
  }
  std::string who(text, n > 0 ? static_cast<std::size_t>(n) : 0);
  for (char& c : who) c = static_cast<unsigned char>(c) < 0x20 || c == 0x7F ? ' ' : c;
  while (!who.empty() && who.back() == ' ') who.pop_back();
  fail<IoError>("{}: another program writes a run there{}{}; wait for it, or give another folder", shown_path(folder),
                who.empty() ? "" : ": ", who);
}

std::string this_program() {
  char host[256] = {};
  if (::gethostname(host, sizeof host - 1) != 0) host[0] = '\0';
  return fmt::format("process {} on {} since {:%Y-%m-%d %H:%M:%S}\n", ::getpid(), host,
                     fmt::localtime(std::time(nullptr)));
}

bool same_file(const struct stat& a, const struct stat& b) { return a.st_dev == b.st_dev && a.st_ino == b.st_ino; }

std::vector<fs::path> those_in(const fs::path& folder, std::span<const char* const> names) {
  std::vector<fs::path> found;
  for (const char* name : names) {
    std::error_code error;
    if (fs::exists(fs::symlink_status(folder / name, error))) found.push_back(folder / name);
  }
  return found;
}

void check_free(const fs::path& folder, ExistingRun existing) {
  if (existing == ExistingRun::resume) return;
  const auto files = those_in(folder, kMarks);
  if (files.empty()) {
    // Without a run beside them they are somebody's own, and this run would write files of the same names.
    if (const auto own = those_in(folder, kShown); !own.empty()) {
      fail<IoError>(
          "{}: a run writes a file of that name, and this one is in a folder without a run; move it away, or "
          "give another folder",
          shown_path(own[0]));
    }
    return;
  }
  if (existing == ExistingRun::replace) return;
  const bool saved = fs::exists(folder / kLastCheckpoint) || fs::exists(folder / kBestCheckpoint);
  fail<IoError>("{}: holds a run already ({}); {}", shown_path(folder), shown_path(files[0]),
                saved ? fmt::format("--resume {} continues it, --overwrite replaces it", shown_path(folder))
                      : "it has no checkpoint to resume from; --overwrite replaces it");
}

// Only looks: the lock is let go at once.
void check_unlocked(const fs::path& folder) {
  const int lock = ::open((folder / kLock).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (lock < 0) return;
  const bool held = ::flock(lock, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  try {
    if (held) in_use(folder, lock);
  } catch (...) {
    ::close(lock);
    throw;
  }
  ::close(lock);
}

}  // namespace

std::span<const char* const> run_file_names() { return kFiles; }

std::vector<fs::path> run_files(const fs::path& folder) {
  std::vector<fs::path> files = those_in(folder, kFiles);
  for (const char* name : kCheckpoints) {
    for (const fs::path& shard : io::shards_beside(folder / name)) {
      std::error_code error;
      if (fs::exists(fs::symlink_status(shard, error))) files.push_back(shard);
    }
  }
  return files;
}

fs::path run_lock(const fs::path& folder) { return folder / kLock; }

bool holds_run(const fs::path& folder) { return !those_in(folder, kMarks).empty(); }

bool is_run_in(const fs::path& resume, const fs::path& folder) {
  if (resume.empty()) return false;
  std::error_code error;
  fs::path from = fs::is_directory(resume, error) ? resume : resume.parent_path();
  if (from.empty()) from = ".";
  return fs::equivalent(from, folder, error) && !error;
}

void RunFolder::check(const fs::path& path, ExistingRun existing) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) {
    if (errno != ENOENT) cannot_be_made(path, errno);
    fs::path above = path;
    do {
      above = above.has_parent_path() ? above.parent_path() : fs::path(".");
    } while (::lstat(above.c_str(), &info) != 0 && errno == ENOENT && above != "." && above != "/");
    if (::access(above.c_str(), W_OK | X_OK) != 0 || !fs::is_directory(above)) {
      cannot_be_made(path, fs::is_directory(above) ? errno : ENOTDIR);
    }
    return;
  }
  if (S_ISLNK(info.st_mode) && ::stat(path.c_str(), &info) != 0) {
    fail<IoError>("{}: can't be made: it is a link to {}, which is not there", shown_path(path),
                  shown_path(fs::read_symlink(path)));
  }
  if (!S_ISDIR(info.st_mode)) cannot_be_made(path, ENOTDIR);
  if (::access(path.c_str(), W_OK | X_OK) != 0) {
    fail<IoError>("{}: can't be written: {}", shown_path(path), std::strerror(errno));
  }
  check_unlocked(path);
  // What the one who writes there has written so far is no finished run to go on with or to replace.
  check_free(path, existing);
}

void RunFolder::make_folders(const fs::path& path) {
  std::vector<fs::path> missing;
  for (fs::path at = path; !at.empty(); at = at.parent_path()) {
    struct stat info {};
    if (::stat(at.c_str(), &info) == 0) {
      if (!S_ISDIR(info.st_mode)) cannot_be_made(path, ENOTDIR);
      break;
    }
    if (errno != ENOENT) cannot_be_made(path, errno);
    missing.push_back(at);
    if (at == at.parent_path()) break;
  }
  for (; !missing.empty(); missing.pop_back()) {
    // "a/" has an empty last part.
    if (!missing.back().has_filename()) continue;
    if (::mkdir(missing.back().c_str(), 0777) == 0) {
      made_.push_back(missing.back());
    } else if (const int error = errno; error != EEXIST || !fs::is_directory(missing.back())) {
      cannot_be_made(path, error);
    }
  }
}

void RunFolder::lock() {
  const fs::path file = path_ / kLock;
  // Whoever lets a folder go removes the lock's name: a lock is one only while the name leads to it.
  constexpr int kMostLooks = 20;
  int looks = 0;
  for (int tries = 0; tries < 100; ++tries) {
    const int lock = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (lock < 0 && errno == ENOENT) {  // another start that failed took the empty folder with it
      make_folders(path_);
      continue;
    }
    if (lock < 0) fail<IoError>("{}: can't be written: {}", shown_path(path_), std::strerror(errno));
    if (::flock(lock, LOCK_EX | LOCK_NB) != 0) {
      const int error = errno;
      if (error == EINTR) {
        ::close(lock);
        continue;
      }
      if (error != EWOULDBLOCK) {
        log(LogLevel::warning,
            fmt::format("{}: can't be locked ({}): two programs that write there would not notice each other",
                        shown_path(path_), std::strerror(error)));
        ::close(lock);
        ::unlink(file.c_str());
        return;
      }
      // Who only looks has it for a moment.
      if (++looks < kMostLooks) {
        ::close(lock);
        std::this_thread::sleep_for(kMoment);
        continue;
      }
      try {
        in_use(path_, lock);
      } catch (...) {
        ::close(lock);
        throw;
      }
    }
    struct stat open {
    }, named{};
    if (::fstat(lock, &open) == 0 && ::stat(file.c_str(), &named) == 0 && same_file(open, named)) {
      lock_ = lock;
      // Only for the message that others give: a full disk may take it.
      const std::string who = this_program();
      if (::ftruncate(lock, 0) == 0 && ::pwrite(lock, who.data(), who.size(), 0) < 0) errno = 0;
      return;
    }
    ::close(lock);
  }
  fail<IoError>("{}: can't be locked: others come and go there", shown_path(path_));
}

RunFolder::RunFolder(const fs::path& path, ExistingRun existing) : path_(path) {
  check(path, existing);
  try {
    make_folders(path_);
    lock();
    check_free(path_, existing);
  } catch (...) {
    release();
    throw;
  }
}

RunFolder RunFolder::make(const fs::path& path) {
  constexpr int kMostTries = 10000;
  RunFolder folder;
  try {
    if (path.has_parent_path()) folder.make_folders(path.parent_path());
    for (int number = 1; number < kMostTries; ++number) {
      folder.path_ = path;
      if (number > 1) folder.path_ += fmt::format("-{}", number);
      if (::mkdir(folder.path_.c_str(), 0777) == 0) {
        folder.made_.push_back(folder.path_);
        folder.lock();
        return folder;
      }
      if (errno == EEXIST) continue;
      if (errno != ENOENT) break;
      folder.make_folders(path.parent_path());  // as above: it was there and was empty
    }
    cannot_be_made(folder.path_, errno);
  } catch (...) {
    folder.release();
    throw;
  }
}

void RunFolder::release() {
  if (lock_ >= 0) {
    ::unlink((path_ / kLock).c_str());
    ::close(std::exchange(lock_, -1));
  }
  // The system removes empty folders only.
  for (; !made_.empty(); made_.pop_back()) {
    if (::rmdir(made_.back().c_str()) != 0) break;
  }
  made_.clear();
}

RunFolder::~RunFolder() { release(); }

RunFolder::RunFolder(RunFolder&& other) noexcept
    : path_(std::move(other.path_)), made_(std::move(other.made_)), lock_(std::exchange(other.lock_, -1)) {
  other.path_.clear();
  other.made_.clear();
}

RunFolder& RunFolder::operator=(RunFolder&& other) noexcept {
  if (this == &other) return *this;
  release();
  path_ = std::exchange(other.path_, {});
  made_ = std::exchange(other.made_, {});
  lock_ = std::exchange(other.lock_, -1);
  return *this;
}

void RunFolder::remove_run(const std::vector<fs::path>& keep) {
  // What makes it a run's goes last: who is killed here leaves a run that can be replaced still.
  std::vector<fs::path> files = run_files(path_);
  std::reverse(files.begin(), files.end());
  for (const fs::path& file : files) {
    std::error_code error;
    const auto same = [&](const fs::path& other) { return file == other || fs::equivalent(file, other, error); };
    if (std::any_of(keep.begin(), keep.end(), same)) continue;
    fs::remove(file, error);
    if (error) fail<IoError>("{}: can't be removed: {}", shown_path(file), error.message());
  }
  // The curves of two runs would be shown as one.
  std::error_code error;
  const fs::path curves = path_ / "tensorboard";
  for (const auto& entry : fs::directory_iterator(curves, error)) {
    if (entry.path().filename().string().starts_with("events.out.tfevents.")) fs::remove(entry.path(), error);
    if (error) fail<IoError>("{}: can't be removed: {}", shown_path(entry.path()), error.message());
  }
  if (fs::is_directory(curves, error)) fs::remove(curves, error);  // only when it is empty
}

void RunFolder::remove_leftovers() {
  if (lock_ < 0) return;
  for (const char* name : kFiles) AtomicFile::remove_leftovers(path_ / name);
  for (const char* name : kCheckpoints) io::remove_stale_shards(path_ / name);
}

}  // namespace halfstep::training
