// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/mnist.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "halfstep/core/error.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/data/idx.h"

namespace halfstep::data {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> places(const fs::path& folder, Split split) {
  return {folder, folder / split_name(split), folder / "raw", folder / "MNIST" / "raw"};
}

/// `part` is "images-idx3-ubyte" or "labels-idx1-ubyte".
std::vector<std::string> file_names(Split split, std::string_view what, int dimensions) {
  const std::vector<std::string> prefixes =
      split == Split::kTrain ? std::vector<std::string>{"train"} : std::vector<std::string>{"t10k", "test"};
  std::vector<std::string> names;
  for (const char* ending : {"", ".gz"}) {
    for (const std::string& prefix : prefixes) {
      for (const char dot : {'-', '.'}) {
        names.push_back(fmt::format("{}-{}{}idx{}-ubyte{}", prefix, what, dot, dimensions, ending));
      }
    }
  }
  return names;
}

std::optional<fs::path> find_file(const fs::path& folder, Split split, std::string_view what, int dimensions) {
  std::error_code ignored;
  for (const fs::path& place : places(folder, split)) {
    for (const std::string& name : file_names(split, what, dimensions)) {
      // Anything of that name counts, so that a link to nowhere or a folder is reported and not passed over.
      if (fs::symlink_status(place / name, ignored).type() > fs::file_type::not_found) return place / name;
    }
  }
  return std::nullopt;
}

std::string describe(const IdxArray& array) {
  const bool bytes = array.type == IdxType::kUint8;
  const std::string_view kind = bytes && array.shape.size() == 1   ? " (labels)"
                                : bytes && array.shape.size() == 3 ? " (images)"
                                                                   : "";
  return fmt::format("0x{:08x}{} with the shape [{}]",
                     static_cast<unsigned>(array.type) << 8 | static_cast<unsigned>(array.shape.size()), kind,
                     fmt::join(array.shape, ", "));
}

}  // namespace

const char* split_name(Split split) { return split == Split::kTrain ? "train" : "test"; }

bool has_mnist(const fs::path& folder, Split split) { return find_file(folder, split, "images", 3).has_value(); }

MnistData load_mnist(const fs::path& folder, Split split, const MnistOptions& options) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    fail<IoError>("load_mnist: expected a folder with IDX files, got {} ({})", shown_path(folder),
                  fs::exists(folder, error) ? "not a folder" : "no such folder");
  }
  const auto images = find_file(folder, split, "images", 3);
  const auto labels = find_file(folder, split, "labels", 1);
  if (!images || !labels) {
    const std::string_view what = images ? "labels" : "images";
    const std::string_view prefix = split == Split::kTrain ? "train" : "t10k";
    fail<IoError>("load_mnist: expected {}-{}-idx{}-ubyte or {}-{}-idx{}-ubyte.gz in {} or its {}/, found neither",
                  prefix, what, images ? 1 : 3, prefix, what, images ? 1 : 3, shown_path(folder), split_name(split));
  }
  return load_mnist_files(*images, *labels, options);
}

MnistData load_mnist_files(const fs::path& images, const fs::path& labels, const MnistOptions& options) {
  // The labels come first: they are small, so most mix-ups are found before the images are read.
  IdxArray label_array = read_idx(labels);
  if (label_array.type != IdxType::kUint8 || label_array.shape.size() != 1) {
    fail<IoError>("load_mnist: {}: expected labels (magic number 0x00000801), got {}", shown_path(labels),
                  describe(label_array));
  }
  IdxArray image_array = read_idx(images);
  if (image_array.type != IdxType::kUint8 || image_array.shape.size() != 3) {
    fail<IoError>("load_mnist: {}: expected images (magic number 0x00000803), got {}", shown_path(images),
                  describe(image_array));
  }
  const std::int64_t count = image_array.shape[0];
  const std::int64_t rows = image_array.shape[1];
  const std::int64_t columns = image_array.shape[2];
  if ((options.rows != 0 && rows != options.rows) || (options.columns != 0 && columns != options.columns)) {
    fail<IoError>("load_mnist: {}: expected images of {}x{}, got {}x{}", shown_path(images), options.rows,
                  options.columns, rows, columns);
  }
  if (count == 0 || rows == 0 || columns == 0) {
    fail<IoError>("load_mnist: {}: expected at least one image, got the shape [{}, {}, {}]", shown_path(images), count,
                  rows, columns);
  }
  if (label_array.shape[0] != count) {
    fail<IoError>("load_mnist: expected as many labels as images, got {} labels in {} and {} images in {}",
                  label_array.shape[0], shown_path(labels), count, shown_path(images));
  }
  const auto wrong = std::find_if(label_array.data.begin(), label_array.data.end(),
                                  [&](std::uint8_t label) { return label >= options.classes; });
  if (wrong != label_array.data.end()) {
    fail<IoError>("load_mnist: {}: expected labels from 0 to {}, got {} at position {}", shown_path(labels),
                  options.classes - 1, *wrong, wrong - label_array.data.begin());
  }
  return {.count = count,
          .rows = rows,
          .columns = columns,
          .images = std::move(image_array.data),
          .labels = std::move(label_array.data)};
}

}  // namespace halfstep::data
