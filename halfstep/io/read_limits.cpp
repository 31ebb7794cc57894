// SPDX-License-Identifier: Apache-2.0
#include "halfstep/io/read_limits.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <limits>
#include <mutex>
#include <string_view>

#include "halfstep/core/fail.h"
#include "halfstep/io/read_limits_internal.h"

namespace halfstep::io {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t kRatio = 8;

struct Limits {
  std::mutex mutex;
  ReadLimits limits;
};
Limits& the_limits() {
  static Limits& instance = *new Limits;
  return instance;
}

// A number that a file of the system's holds; `max` and all else are no limit.
std::uint64_t number_in(const fs::path& path) {
  std::ifstream file(path);
  std::string text;
  std::uint64_t value = 0;
  if (!std::getline(file, text)) return kNoLimit;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? value : kNoLimit;
}

// Of the control group of this process and of those around it.
std::uint64_t group_memory() {
  std::uint64_t least = kNoLimit;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // number:controllers:path; version 2 has no controllers.
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool unified = controllers == ",,";
    if (!unified && controllers.find(",memory,") == std::string::npos) continue;
    const fs::path root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    fs::path group = fs::path(line.substr(second + 1)).relative_path();
    for (;; group = group.parent_path()) {
      least = std::min(least, number_in(root / group / (unified ? "memory.max" : "memory.limit_in_bytes")));
      if (group.empty()) break;
    }
  }
  return least;
}

std::uint64_t machine_memory() {
  const long pages = ::sysconf(_SC_PHYS_PAGES), size = ::sysconf(_SC_PAGESIZE);
  return pages > 0 && size > 0 ? static_cast<std::uint64_t>(pages) * static_cast<std::uint64_t>(size) : kNoLimit;
}

}  // namespace

ReadLimits read_limits() {
  Limits& l = the_limits();
  const std::lock_guard lock(l.mutex);
  return l.limits;
}

void set_read_limits(const ReadLimits& limits) {
  Limits& l = the_limits();
  const std::lock_guard lock(l.mutex);
  l.limits = limits;
}

namespace detail {

std::uint64_t most_bytes(const ReadLimits& limits) {
  static const std::uint64_t memory = std::min(machine_memory(), group_memory());
  return limits.max_bytes != 0 ? limits.max_bytes : memory;
}

void check_bytes(std::uint64_t bytes, const ReadLimits& limits, const std::string& file) {
  const std::uint64_t most = most_bytes(limits);
  if (bytes <= most) return;
  fail<IoError>("{}: its tensors take {} bytes, at most {} are allowed{}", file, bytes, most,
                limits.max_bytes == 0 ? ", which is the memory there is; --max-bytes or ReadLimits changes it"
                                      : " (--max-bytes, ReadLimits::max_bytes)");
}

void check_unpacked(std::uint64_t bytes, std::uint64_t file_bytes, const ReadLimits& limits, const std::string& file) {
  std::uint64_t most = 0;
  if (__builtin_mul_overflow(file_bytes, kRatio, &most) || __builtin_add_overflow(most, limits.max_unpacked, &most)) {
    return;
  }
  if (bytes <= most) return;
  fail<IoError>(
      "{}: its tensors take {} bytes, counting what is compressed, shared or repeated; of a file of {} bytes at most "
      "{} "
      "times as many and {} more are read (--max-unpacked, ReadLimits::max_unpacked)",
      file, bytes, file_bytes, kRatio, limits.max_unpacked);
}

}  // namespace detail
}  // namespace halfstep::io
