// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "halfstep/core/export.h"
#include "halfstep/data/mnist.h"

namespace halfstep::data {

/// Labelled image files from any source. Any number of threads may read.
class HS_API ImageSource {
 public:
  virtual ~ImageSource() = default;

  /// Number of images.
  virtual std::int64_t size() const = 0;
  /// The class of one, in [0, classes().size()).
  virtual std::int64_t label(std::int64_t index) const = 0;
  /// The name of one for messages: its path, printable (shown_path()).
  virtual std::string name(std::int64_t index) const = 0;
  /// The bytes of one file, in `buffer` or in the source's own memory. Throws IoError.
  virtual std::span<const std::uint8_t> read(std::int64_t index, std::vector<std::uint8_t>& buffer) const = 0;

  /// Names of the classes in the order of the labels: the names of their folders or, if these aren't known, the label
  /// itself. They are always printable UTF-8, and different folders have different names (kept_name(); raw_name() gives
  /// a folder's bytes).
  const std::vector<std::string>& classes() const { return classes_; }

 protected:
  std::vector<std::string> classes_;
};

/// Finds the images of one part of a data set in a folder, in this order:
///
/// 1. a list, `train.txt` (for Split::kTest `val.txt` or `test.txt`), see ImageFolder::from_list;
/// 2. class folders in `train/` (`val/` or `test/`), see ImageFolder;
/// 3. an archive, `train.tar.gz`, `.tgz` or `.tar` (`val.`, `test.`), see ImageArchive.
///
/// Throws IoError if there is none of them, naming what was looked for, and whatever reading them throws.
HS_API std::shared_ptr<const ImageSource> open_images(const std::filesystem::path& folder, Split split);

}  // namespace halfstep::data
