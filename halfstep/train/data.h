// SPDX-License-Identifier: Apache-2.0
// Images for a network of a given name: the transforms, and data sets that use them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "halfstep/core/export.h"
#include "halfstep/data/dataset.h"
#include "halfstep/data/mnist.h"
#include "halfstep/data/transforms.h"
#include "halfstep/train/verdicts.h"

namespace halfstep::training {

/// The source and the preprocessing of images; the flags of `halfstep train`.
struct ImageDataOptions {
  std::filesystem::path folder = {};    ///< with the parts train and val (or test)
  std::int64_t image_size = 224;        ///< pixels of a side that the network sees
  std::int64_t resize = 256;            ///< of the shorter side in evaluation; 0: the whole image, whatever its shape
  std::string crop = "random-resized";  ///< random-resized, padded or none
  double min_area = 0.08;               ///< of random-resized
  double color_jitter = 0;              ///< of brightness, contrast and saturation
  std::int64_t max_damaged = 100;       ///< number of unreadable images before it is an error
  std::int64_t limit = 0;               ///< maximum number of training images; 0: all
};

/// The usual settings for the network of that name: random crops of 224 pixels, or shifted images of 32. With an
/// `image_size` other than 0 the rest follows from that. Throws Error for an unknown name.
HS_API ImageDataOptions default_images(const std::string& model, std::int64_t image_size = 0);
/// Throws Error, naming the flag, when an option is out of its range.
HS_API void check(const ImageDataOptions& options);
/// The kind of a crop by its name. Throws Error naming the choices.
HS_API data::CropKind parse_crop(const std::string& name);
/// The transforms; colours are normalised as the network's kind has it (CIFAR's or ImageNet's mean).
HS_API data::TrainTransform train_transform(const ImageDataOptions& options, const std::string& model);
HS_API data::EvalTransform eval_transform(const ImageDataOptions& options, const std::string& model);

/// The pictures of a folder in MNIST's format, or the built-in digits when there is no folder; at most `limit` of them
/// (0: all). Throws IoError.
HS_API data::MnistData load_pictures(const std::filesystem::path& folder, data::Split split, std::uint64_t seed,
                                     std::int64_t limit = 0);
/// As a data set, flattened and normalised as MNIST customarily is.
HS_API std::shared_ptr<const data::Dataset> pictures_dataset(data::MnistData pictures);
/// How the inputs of the network of that name are drawn; none for networks that the registry doesn't know.
HS_API std::optional<PictureForm> picture_form(const std::string& model);

/// The CRC-32 of images and labels, as hexadecimal digits.
HS_API std::string checksum(const data::MnistData& pictures);

/// A part of a data set.
struct LoadedImages {
  std::shared_ptr<const data::Dataset> dataset;
  std::vector<std::string> classes;       ///< their names
  std::function<std::int64_t()> damaged;  ///< images that could not be read so far
  std::string checksum;                   ///< of the part's names and labels, wherever its folder lies
};
/// The training or the test part of a folder, with its transform. Throws IoError.
HS_API LoadedImages load_images(const ImageDataOptions& options, const std::string& model, data::Split split);

}  // namespace halfstep::training
