// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/image_archive.h"

#include <archive.h>
#include <archive_entry.h>

#include <algorithm>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <tuple>

#include "halfstep/core/fail.h"
#include "halfstep/data/image_folder.h"

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
                text != nullptr ? text : "an unknown error");
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

}  // namespace

ImageArchive::ImageArchive(const std::filesystem::path& path, const ArchiveLimits& limits) : name_(path.string()) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    fail<IoError>("ImageArchive: expected a file, got {} ({})", name_,
                  std::filesystem::exists(path, error) ? "something else" : "no such file");
  }
  const Archive a = new_archive();
  constexpr std::size_t kBlock = std::size_t{256} << 10;
  if (archive_read_open_filename(a.get(), name_.c_str(), kBlock) != ARCHIVE_OK) refuse(name_, a.get());
  load(a.get(), limits);
}

ImageArchive::ImageArchive(std::span<const std::uint8_t> bytes, std::string_view name, const ArchiveLimits& limits)
    : name_(name) {
  const Archive a = new_archive();
  if (archive_read_open_memory(a.get(), bytes.data(), bytes.size()) != ARCHIVE_OK) refuse(name_, a.get());
  load(a.get(), limits);
}

void ImageArchive::load(void* opened, const ArchiveLimits& limits) {
  auto* a = static_cast<archive*>(opened);
  archive_entry* entry = nullptr;
  while (true) {
    const int status = archive_read_next_header(a, &entry);
    if (status == ARCHIVE_EOF) break;
    if (!usable(status)) refuse(name_, a);
    const char* path = archive_entry_pathname(entry);
    if (path == nullptr) path = archive_entry_pathname_utf8(entry);
    if (path == nullptr || archive_entry_filetype(entry) != AE_IFREG) continue;
    const auto parts = split(path);
    if (!parts || !is_image_name(parts->file)) continue;
    if (size() >= limits.max_files) {
      fail<IoError>("ImageArchive: {}: expected at most {} pictures, got more", name_, limits.max_files);
    }
    File file{.path = path, .begin = bytes_.size()};
    // Memory grows with what is really there, not with what a header says.
    while (true) {
      const void* block = nullptr;
      std::size_t n = 0;
      la_int64_t offset = 0;
      const int got = archive_read_data_block(a, &block, &n, &offset);
      if (got == ARCHIVE_EOF) break;
      if (!usable(got)) refuse(name_, a);
      if (offset < 0 || static_cast<std::uint64_t>(offset) != bytes_.size() - file.begin) {
        fail<IoError>("ImageArchive: {}: expected {} to be stored without holes, got a sparse file", name_, path);
      }
      if (n > limits.max_bytes - bytes_.size()) {
        fail<IoError>(
            "ImageArchive: {}: expected at most {} bytes of pictures, got more; unpack it and name the folder", name_,
            limits.max_bytes);
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
                    archive_entry_size(entry), path, file.bytes);
    }
    files_.push_back(std::move(file));
  }
  if (files_.empty()) {
    fail<IoError>("ImageArchive: {}: expected .jpg, .jpeg or .png files in folders named for their classes, found none",
                  name_);
  }
  bytes_.shrink_to_fit();
  sort_into_classes();
}

void ImageArchive::sort_into_classes() {
  std::map<std::string, std::int64_t, std::less<>> labels;
  const std::string folder(split(files_.front().path)->folder);
  for (const File& file : files_) {
    const Parts parts = *split(file.path);
    if (parts.folder != folder) {
      fail<IoError>("ImageArchive: {}: expected all classes in one folder, got {} beside {}", name_, file.path,
                    files_.front().path);
    }
    labels.emplace(parts.class_name, 0);
  }
  for (auto& [name, label] : labels) {
    label = static_cast<std::int64_t>(classes_.size());
    classes_.push_back(name);
  }
  for (File& file : files_) file.label = labels.find(split(file.path)->class_name)->second;
  std::stable_sort(files_.begin(), files_.end(),
                   [](const File& a, const File& b) { return std::tie(a.label, a.path) < std::tie(b.label, b.path); });
}

std::string ImageArchive::name(std::int64_t index) const {
  return name_ + ":" + files_[static_cast<std::size_t>(index)].path;
}

std::span<const std::uint8_t> ImageArchive::read(std::int64_t index, std::vector<std::uint8_t>&) const {
  const File& file = files_[static_cast<std::size_t>(index)];
  return std::span(bytes_).subspan(file.begin, file.bytes);
}

}  // namespace halfstep::data
