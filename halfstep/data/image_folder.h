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

/// Images in files ROOT/CLASS/NAME.jpg etc., as torchvision's ImageFolder reads them.
///
/// The classes are the folders in ROOT, sorted bytewise; a class's label is its index. Images are the files anywhere
/// below a class's folder that end in .jpg, .jpeg or .png in any case and don't begin with a dot, sorted by path.
class HS_API ImageFolder final : public ImageSource {
 public:
  /// Throws IoError if there is no such folder, or no image in its subfolders. A class without images keeps its label
  /// and causes a warning.
  explicit ImageFolder(const std::filesystem::path& root);

  /// The images of a list (parse_image_list), whose paths are relative to the first of `roots` that has the first of
  /// them. The labels are the list's. If each class corresponds to the name of its images' folder, these are the class
  /// names; if they exist as folders under `sorted_root` in an order different from the list's, a warning is logged:
  /// weights trained with one order score nothing with the other. Throws IoError for a list that can't be read, or if
  /// none of the roots has its first image.
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
  std::string paths_;                // concatenated: a million separate strings would take twice the memory
  std::vector<std::uint64_t> ends_;  // of each in paths_
  std::vector<std::int32_t> labels_;
  std::map<std::string, std::int64_t> class_to_index_;
};

/// Raw names of the folders in a folder, sorted bytewise, except those that begin with a dot. Empty if there is no such
/// folder. Throws IoError for one that can't be read.
HS_API std::vector<std::string> class_folders(const std::filesystem::path& root);

/// Whether a file's name is an image's: .jpg, .jpeg or .png in any case, and no dot at the beginning.
HS_API bool is_image_name(std::string_view name);

}  // namespace halfstep::data
