// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/image_archive.h"

#include <archive.h>
#include <archive_entry.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <tuple>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/data/image_folder.h"
#include "halfstep/runtime/log.h"

namespace halfstep::data {
namespace {

struct FreeArchive {
  void operator()(archive* a) const { archive_read_free(a); }
};
using Archive = std::unique_ptr<archive, FreeArchive>;

Archive new_archive() {
  Archive a(archive_read_new());
  if (!a) fail<IoError>("ImageArchive: no memory");
  // Only these: libarchive would run other programs for some of the others.
  archive_read_support_filter_gzip(a.get());
  archive_read_support_filter_bzip2(a.get());
  archive_read_support_filter_xz(a.get());
  archive_read_support_filter_zstd(a.get());
  archive_read_support_format_tar(a.get());
  return a;
}

[[noreturn]] void refuse(const std::string& name, archive* a) {
  const char* text = archive_error_string(a);
  fail<IoError>("ImageArchive: {}: expected a sound tar archive, got: {}", name,
                text != nullptr ? printable_start(text, 300) : "an unknown error");
}

/// A header with a wrong checksum is "to be retried" with the next block for libarchive; here it is damage.
bool usable(int status) { return status == ARCHIVE_OK || status == ARCHIVE_WARN; }

/// The last parts of "a/b/c": folder "a", class "b", file "c".
struct Parts {
  std::string_view folder, class_name, file;
};
std::optional<Parts> split(std::string_view path) {
  while (path.starts_with("./")) path.remove_prefix(2);
  const std::size_t last = path.find_last_of('/');
  if (last == std::string_view::npos || last == 0) return std::nullopt;
  const std::string_view above = path.substr(0, last);
  const std::size_t before = above.find_last_of('/');
  if (before == std::string_view::npos) return Parts{{}, above, path.substr(last + 1)};
  return Parts{above.substr(0, before), above.substr(before + 1), path.substr(last + 1)};
}

// The parts of a path inside the archive, or of what a link says, from the archive's top on. None for one that leads
// out of it.
std::optional<std::vector<std::string>> parts_of(std::vector<std::string> folder, std::string_view path) {
  if (path.starts_with('/')) return std::nullopt;
  while (!path.empty()) {
    const std::string_view part = path.substr(0, path.find('/'));
    path.remove_prefix(std::min(part.size() + 1, path.size()));
    if (part.empty() || part == ".") continue;
    if (part == "..") {
      if (folder.empty()) return std::nullopt;
      folder.pop_back();
    } else {
      folder.emplace_back(part);
    }
  }
  return folder;
}

std::string joined(const std::vector<std::string>& parts) { return fmt::format("{}", fmt::join(parts, "/")); }

// Paths in an archive begin at its top, with a slash or without.
std::string_view without_slashes(std::string_view path) {
  while (path.starts_with('/')) path.remove_prefix(1);
  return path;
}

// One form for all ways to write a path; empty for one that leads out of the archive.
std::string normal(std::string_view path) {
  const auto parts = parts_of({}, without_slashes(path));
  return parts ? joined(*parts) : std::string();
}

}  // namespace

struct ImageArchive::Link {
  std::string target;
  bool hard = false;  // the target is a path from the archive's top on, not from the link's folder
};

struct ImageArchive::Loading {
  std::function<void(archive*)> open;
  std::uint64_t packed;  // bytes of the archive itself
  const ArchiveLimits& limits;
  std::map<std::string, Link> links = {};  // by normal(); of folders too, as others lead through them
  std::vector<std::string> wanted = {};    // links called as pictures, in the archive's order
};

ImageArchive::ImageArchive(const std::filesystem::path& path, const ArchiveLimits& limits) : name_(shown_path(path)) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    fail<IoError>("ImageArchive: expected a file, got {} ({})", name_,
                  std::filesystem::exists(path, error) ? "something else" : "no such file");
  }
  constexpr std::size_t kBlock = std::size_t{256} << 10;
  Loading loading{[&](archive* a) {
                    if (archive_read_open_filename(a, path.c_str(), kBlock) != ARCHIVE_OK) refuse(name_, a);
                  },
                  std::filesystem::file_size(path, error), limits};
  load(loading);
}

ImageArchive::ImageArchive(std::span<const std::uint8_t> bytes, std::string_view name, const ArchiveLimits& limits)
    : name_(printable(name)) {
  Loading loading{[&](archive* a) {
                    if (archive_read_open_memory(a, bytes.data(), bytes.size()) != ARCHIVE_OK) refuse(name_, a);
                  },
                  bytes.size(), limits};
  load(loading);
}

void ImageArchive::check_count(std::size_t files, const ArchiveLimits& limits) const {
  if (static_cast<std::int64_t>(files) < limits.max_files) return;
  fail<IoError>("ImageArchive: {}: expected at most {} pictures, got more", name_, limits.max_files);
}

// Before the contents are unpacked, or passed over, which takes as long.
void ImageArchive::check_unpacked(void* opened, void* header, const Loading& loading) const {
  constexpr std::uint64_t kRatio = 8;
  auto* entry = static_cast<archive_entry*>(header);
  const auto before = static_cast<std::uint64_t>(archive_filter_bytes(static_cast<archive*>(opened), 0));
  // What a sparse file calls its size is not in the archive.
  const la_int64_t size =
      archive_entry_size_is_set(entry) && archive_entry_sparse_count(entry) == 0 ? archive_entry_size(entry) : 0;
  std::uint64_t most = 0, after = 0;
  if (__builtin_mul_overflow(loading.packed, kRatio, &most) ||
      __builtin_add_overflow(most, loading.limits.max_unpacked, &most)) {
    return;
  }
  const auto contents = static_cast<std::uint64_t>(std::max<la_int64_t>(size, 0));
  if (!__builtin_add_overflow(before, contents, &after) && after <= most) return;
  fail<IoError>(
      "ImageArchive: {}: it unpacks to more than {} times its {} bytes and {} more; unpack it and name the folder",
      name_, kRatio, loading.packed, loading.limits.max_unpacked);
}

// Memory grows with what is really there, not with what a header says.
void ImageArchive::read_file(void* opened, void* header, const std::string& path, const ArchiveLimits& limits,
                             File& file) {
  auto* a = static_cast<archive*>(opened);
  auto* entry = static_cast<archive_entry*>(header);
  file.begin = bytes_.size();
  while (true) {
    const void* block = nullptr;
    std::size_t n = 0;
    la_int64_t offset = 0;
    const int got = archive_read_data_block(a, &block, &n, &offset);
    if (got == ARCHIVE_EOF) break;
    if (!usable(got)) refuse(name_, a);
    if (offset < 0 || static_cast<std::uint64_t>(offset) != bytes_.size() - file.begin) {
      fail<IoError>("ImageArchive: {}: expected {} to be stored without holes, got a sparse file", name_,
                    printable(path));
    }
    if (n > limits.max_bytes - bytes_.size()) {
      fail<IoError>("ImageArchive: {}: expected at most {} bytes of pictures, got more; unpack it and name the folder",
                    name_, limits.max_bytes);
    }
    try {
      const auto* bytes = static_cast<const std::uint8_t*>(block);
      bytes_.insert(bytes_.end(), bytes, bytes + n);
    } catch (const std::bad_alloc&) {
      fail<IoError>("ImageArchive: {}: no memory for its pictures; unpack it and name the folder", name_);
    }
  }
  file.bytes = bytes_.size() - file.begin;
  if (archive_entry_size_is_set(entry) && static_cast<std::uint64_t>(archive_entry_size(entry)) != file.bytes) {
    fail<IoError>("ImageArchive: {}: expected {} bytes of {}, got {}; the archive is cut short", name_,
                  archive_entry_size(entry), printable(path), file.bytes);
  }
}

void ImageArchive::load(Loading& loading) {
  const Archive opened = new_archive();
  archive* const a = opened.get();
  loading.open(a);
  const ArchiveLimits& limits = loading.limits;
  archive_entry* entry = nullptr;
  while (true) {
    const int status = archive_read_next_header(a, &entry);
    if (status == ARCHIVE_EOF) break;
    if (!usable(status)) refuse(name_, a);
    check_unpacked(a, entry, loading);
    const char* path = archive_entry_pathname(entry);
    if (path == nullptr) path = archive_entry_pathname_utf8(entry);
    if (path == nullptr) continue;
    const char* const hard = archive_entry_hardlink(entry);
    const char* const soft = archive_entry_filetype(entry) == AE_IFLNK ? archive_entry_symlink(entry) : nullptr;
    const auto parts = split(path);
    const bool picture = parts && is_image_name(parts->file);
    const bool link = hard != nullptr || soft != nullptr;
    if (!link && (!picture || archive_entry_filetype(entry) != AE_IFREG)) continue;
    if (link) {
      check_count(loading.links.size(), limits);
      loading.links.insert_or_assign(normal(path), Link{hard != nullptr ? hard : soft, hard != nullptr});
      if (picture) loading.wanted.emplace_back(path);
      continue;
    }
    check_count(files_.size(), limits);
    File file{.path = path};
    read_file(a, entry, file.path, limits, file);
    files_.push_back(std::move(file));
  }
  if (!loading.wanted.empty()) follow_links(loading);
  if (files_.empty()) {
    fail<IoError>("ImageArchive: {}: expected .jpg, .jpeg or .png files in folders named for their classes, found none",
                  name_);
  }
  bytes_.shrink_to_fit();
  sort_into_classes();
}

void ImageArchive::follow_links(Loading& loading) {
  // Where a path leads when every link on the way is followed; empty: out of the archive.
  const auto resolve = [&](const std::string& path) -> std::string {
    constexpr int kMostLinks = 40;  // as many as systems follow
    constexpr std::size_t kMostParts = 256, kLongest = 4096;
    auto parts = parts_of({}, path);
    int links = 0;
    std::string start;
    for (std::size_t i = 0; parts && i < parts->size();) {
      if (parts->size() > kMostParts) return {};
      start += (i == 0 ? "" : "/") + (*parts)[i];
      const auto link = loading.links.find(start);
      if (link == loading.links.end()) {
        ++i;
        continue;
      }
      if (++links > kMostLinks) {
        fail<IoError>("ImageArchive: {}: the links of {} lead round in a circle", name_, printable_start(path));
      }
      const auto& [target, hard] = link->second;
      if (target.empty() || target.size() > kLongest) return {};
      const auto here = parts->begin() + static_cast<std::ptrdiff_t>(i);
      const std::vector<std::string> rest(here + 1, parts->end());
      parts = parts_of(hard ? std::vector<std::string>() : std::vector<std::string>(parts->begin(), here),
                       hard ? without_slashes(target) : target);
      if (parts) parts->insert(parts->end(), rest.begin(), rest.end());
      start.clear();
      i = 0;
    }
    return parts ? joined(*parts) : std::string();
  };
  std::map<std::string, std::vector<std::string>> by_target;
  std::vector<std::string> lost;
  for (const std::string& path : loading.wanted) {
    const std::string target = resolve(normal(path));
    if (target.empty()) {
      lost.push_back(path);
    } else {
      by_target[target].push_back(path);
    }
  }
  const auto add = [&](const std::vector<std::string>& paths, const File& target) {
    for (const std::string& path : paths) {
      check_count(files_.size(), loading.limits);
      files_.push_back({.path = path, .begin = target.begin, .bytes = target.bytes});
    }
  };
  const std::size_t pictures = files_.size();
  for (std::size_t i = 0; i < pictures; ++i) {
    const auto found = by_target.find(normal(files_[i].path));
    if (found == by_target.end()) continue;
    add(found->second, File(files_[i]));
    by_target.erase(found);
  }
  // What links lead to may have any name, and was passed over when it came.
  if (!by_target.empty()) {
    const Archive opened = new_archive();
    loading.open(opened.get());
    archive_entry* entry = nullptr;
    for (int status = 0; (status = archive_read_next_header(opened.get(), &entry)) != ARCHIVE_EOF;) {
      if (!usable(status)) refuse(name_, opened.get());
      const char* path = archive_entry_pathname(entry);
      if (path == nullptr) path = archive_entry_pathname_utf8(entry);
      if (path == nullptr || archive_entry_filetype(entry) != AE_IFREG || archive_entry_hardlink(entry) != nullptr) {
        continue;
      }
      const auto found = by_target.find(normal(path));
      if (found == by_target.end()) continue;
      File file{.path = path};
      read_file(opened.get(), entry, file.path, loading.limits, file);
      add(found->second, file);
      by_target.erase(found);
    }
  }
  for (const auto& [target, paths] : by_target) lost.insert(lost.end(), paths.begin(), paths.end());
  if (lost.empty()) return;
  constexpr std::size_t kShown = 5;
  std::string names;
  for (std::size_t i = 0; i < std::min(lost.size(), kShown); ++i) names += (i ? ", " : "") + printable_start(lost[i]);
  log(LogLevel::warning, fmt::format("{}: {} links to nothing in the archive are left out: {}{}", name_, lost.size(),
                                     names, lost.size() > kShown ? ", ..." : ""));
}

void ImageArchive::sort_into_classes() {
  std::map<std::string, std::int64_t, std::less<>> labels;
  const std::string folder(split(files_.front().path)->folder);
  for (const File& file : files_) {
    const Parts parts = *split(file.path);
    if (parts.folder != folder) {
      fail<IoError>("ImageArchive: {}: expected all classes in one folder, got {} beside {}", name_,
                    printable_start(file.path), printable_start(files_.front().path));
    }
    labels.emplace(parts.class_name, 0);
  }
  for (auto& [name, label] : labels) {
    label = static_cast<std::int64_t>(classes_.size());
    classes_.push_back(kept_name(name));
  }
  for (File& file : files_) file.label = labels.find(split(file.path)->class_name)->second;
  std::stable_sort(files_.begin(), files_.end(),
                   [](const File& a, const File& b) { return std::tie(a.label, a.path) < std::tie(b.label, b.path); });
}

std::string ImageArchive::name(std::int64_t index) const {
  return name_ + ":" + printable(files_[static_cast<std::size_t>(index)].path);
}

std::span<const std::uint8_t> ImageArchive::read(std::int64_t index, std::vector<std::uint8_t>&) const {
  const File& file = files_[static_cast<std::size_t>(index)];
  return std::span(bytes_).subspan(file.begin, file.bytes);
}

}  // namespace halfstep::data
