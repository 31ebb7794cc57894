// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "halfstep/core/export.h"

namespace halfstep::data {

/// The two parts of a data set.
enum class Split { kTrain, kTest };

/// "train" or "test".
HS_API const char* split_name(Split split);

/// Grey images with labels in memory, in MNIST's format: one byte per pixel, 0 is background.
struct MnistData {
  std::int64_t count = 0;
  std::int64_t rows = 28;
  std::int64_t columns = 28;
  /// count * rows * columns bytes, image by image, row by row.
  std::vector<std::uint8_t> images = {};
  /// count labels.
  std::vector<std::uint8_t> labels = {};

  /// The pixels of one image; `index` in [0, count).
  std::span<const std::uint8_t> image(std::int64_t index) const {
    const auto pixels = static_cast<std::size_t>(rows * columns);
    return std::span(images).subspan(static_cast<std::size_t>(index) * pixels, pixels);
  }
};

/// The image size that load_mnist expects; 0 accepts any size.
struct MnistOptions {
  std::int64_t rows = 28;
  std::int64_t columns = 28;
  /// Labels must be in [0, classes).
  int classes = 10;
};

/// Reads one part of MNIST or of a set in its format (Fashion-MNIST, KMNIST, ...) from a folder.
///
/// The files are searched for in the folder itself, in its train/ or test/, and where torchvision puts them (raw/,
/// MNIST/raw/), under the usual names: train-images-idx3-ubyte, t10k-images-idx3-ubyte or test-images-idx3-ubyte, with
/// a dot before idx3 too, each plain or with .gz; a plain file takes precedence over a compressed one.
///
/// Throws IoError, in one line that names the file: anything that read_idx rejects, a folder without the files, labels
/// where images are expected or vice versa, images of a different size, no images at all, different numbers of images
/// and labels, and labels out of range.
HS_API MnistData load_mnist(const std::filesystem::path& folder, Split split, const MnistOptions& options = {});

/// True when the folder has the images of the part where load_mnist looks for them.
HS_API bool has_mnist(const std::filesystem::path& folder, Split split);

/// Reads a pair of files by name, with the checks of load_mnist.
HS_API MnistData load_mnist_files(const std::filesystem::path& images, const std::filesystem::path& labels,
                                  const MnistOptions& options = {});

}  // namespace halfstep::data
