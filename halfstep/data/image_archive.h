// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/core/export.h"
#include "halfstep/data/image_source.h"

namespace halfstep::data {

/// Limits of an archive.
struct ArchiveLimits {
  /// Bytes of all images together, which are held in memory. Larger sets belong in folders.
  std::uint64_t max_bytes = std::uint64_t{8} << 30;
  /// Pictures.
  std::int64_t max_files = std::int64_t{1} << 26;
  /// The number of bytes by which the unpacked contents, images and everything else, may exceed eight times the
  /// archive's size.
  std::uint64_t max_unpacked = std::uint64_t{1} << 30;
};

/// Images in a tar archive, plain or compressed by gzip, bzip2, xz or zstd (detected from the contents), read into
/// memory once in their encoded form (JPEG or PNG).
///
/// An image's class is its folder, as in `train/CLASS/0001.jpg`; classes are sorted bytewise, images by class and path.
/// Entries that are not regular files, or not images by name, are skipped. Hard and symbolic links with an image's name
/// are followed inside the archive and take no memory of their own; links that lead out of it or to nothing in it are
/// skipped and named in a warning, as are links to folders.
class HS_API ImageArchive final : public ImageSource {
 public:
  /// Throws IoError for a file that is missing, not an archive, damaged or truncated, for one over the limits or
  /// without images, for classes in more than one folder (`train/cat` and `test/cat`), and for cyclic links.
  explicit ImageArchive(const std::filesystem::path& path, const ArchiveLimits& limits = {});
  /// The same for bytes in memory; `name` identifies them in errors.
  ImageArchive(std::span<const std::uint8_t> bytes, std::string_view name, const ArchiveLimits& limits = {});

  std::int64_t size() const override { return static_cast<std::int64_t>(files_.size()); }
  std::int64_t label(std::int64_t index) const override { return files_[static_cast<std::size_t>(index)].label; }
  std::string name(std::int64_t index) const override;
  std::span<const std::uint8_t> read(std::int64_t index, std::vector<std::uint8_t>& buffer) const override;

 private:
  struct File {
    std::string path;
    std::uint64_t begin = 0;
    std::uint64_t bytes = 0;
    std::int64_t label = 0;
  };
  struct Link;
  struct Loading;
  void load(Loading& loading);
  void read_file(void* archive, void* entry, const std::string& path, const ArchiveLimits& limits, File& file);
  void check_unpacked(void* archive, void* entry, const Loading& loading) const;
  void check_count(std::size_t files, const ArchiveLimits& limits) const;
  void follow_links(Loading& loading);
  void sort_into_classes();

  std::string name_;
  std::vector<std::uint8_t> bytes_;
  std::vector<File> files_;
};

}  // namespace halfstep::data
