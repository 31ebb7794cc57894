// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "halfstep/core/export.h"
#include "halfstep/data/image_source.h"

namespace halfstep::data {

/// Pictures in files: ROOT/CLASS/NAME.jpg and the like, as torchvision's ImageFolder reads them.
///
/// The classes are the folders in ROOT, sorted byte by byte; a class's label is its place among them. Pictures are the
/// files anywhere below a class's folder that end in .jpg, .jpeg or .png in any case and don't begin with a dot, sorted
/// by path.
class HS_API ImageFolder final : public ImageSource {
 public:
  /// Throws IoError when there is no such folder, or no picture in folders in it. A class without pictures keeps its
  /// label and is warned of.
  explicit ImageFolder(const std::filesystem::path& root);

  /// The pictures of a list (parse_image_list), whose paths are looked for under the first of `roots` that has the
  /// first of them. The labels are the list's. Where a class is the name of a picture's folder, these are the names of
  /// the classes; when they stand under `sorted_root` as folders and their order there is another than the list's, that
  /// is warned of: weights that were trained with one order score nothing with the other. Throws IoError for a list
  /// that can't be read, or none of whose roots has its first picture.
  static ImageFolder from_list(const std::filesystem::path& list, const std::vector<std::filesystem::path>& roots,
                               const std::filesystem::path& sorted_root = {});

  std::int64_t size() const override { return static_cast<std::int64_t>(labels_.size()); }
  std::int64_t label(std::int64_t index) const override { return labels_[static_cast<std::size_t>(index)]; }
  std::string name(std::int64_t index) const override;
  std::span<const std::uint8_t> read(std::int64_t index, std::vector<std::uint8_t>& buffer) const override;

  /// Labels by the names of classes, as classes() has them.
  const std::map<std::string, std::int64_t>& class_to_index() const { return class_to_index_; }

 private:
  ImageFolder() = default;
  void add(std::string_view path, std::int64_t label);
  std::filesystem::path path(std::int64_t index) const;

  std::filesystem::path root_;
  std::string paths_;                // one behind the other: a million strings of their own would take twice the memory
  std::vector<std::uint64_t> ends_;  // of each in paths_
  std::vector<std::int32_t> labels_;
  std::map<std::string, std::int64_t> class_to_index_;
};

/// Names of the folders in a folder as they are, sorted byte by byte; those that begin with a dot are left out. None
/// when there is no such folder. Throws IoError for one that can't be read.
HS_API std::vector<std::string> class_folders(const std::filesystem::path& root);

/// Whether a file's name is a picture's: .jpg, .jpeg or .png in any case, and no dot at the beginning.
HS_API bool is_image_name(std::string_view name);

}  // namespace halfstep::data
