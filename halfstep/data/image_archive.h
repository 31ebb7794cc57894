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

/// What an archive may hold.
struct ArchiveLimits {
  /// Bytes of all pictures together; they are held in memory. Larger sets belong in folders.
  std::uint64_t max_bytes = std::uint64_t{8} << 30;
  /// Pictures.
  std::int64_t max_files = std::int64_t{1} << 26;
  /// By how many bytes what is unpacked, pictures and all else, may exceed eight times the archive's own size.
  std::uint64_t max_unpacked = std::uint64_t{1} << 30;
};

/// Pictures in a tar archive, plain or compressed by gzip, bzip2, xz or zstd (told from the contents), read into memory
/// once as they are, still as JPEG or PNG.
///
/// A picture's class is the folder it lies in, as in `train/CLASS/0001.jpg`; classes are sorted byte by byte, pictures
/// by class and path. What is no regular file or no picture by its name is passed over. Hard links and symbolic links
/// that are called as pictures are followed inside the archive and take no memory of their own; those that lead out of
/// it or to nothing in it are left out and named by a warning, as are links to folders.
class HS_API ImageArchive final : public ImageSource {
 public:
  /// Throws IoError for a file that is missing, no archive, damaged or cut short, for one over the limits, one without
  /// pictures, for classes that lie in more than one folder (`train/cat` and `test/cat`), and for links that lead round
  /// in a circle.
  explicit ImageArchive(const std::filesystem::path& path, const ArchiveLimits& limits = {});
  /// The same for bytes in memory; `name` stands for the file in the errors.
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
