// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/data.h"

#include <zlib.h>

#include <algorithm>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/data/digits.h"
#include "halfstep/data/image_dataset.h"
#include "halfstep/data/image_source.h"
#include "halfstep/train/flags.h"
#include "halfstep/train/networks.h"
#include "halfstep/train/registry.h"

namespace halfstep::training {
namespace {

// Some of the samples, evenly over all: those of a folder stand class by class.
class SomeSamples final : public data::Dataset {
 public:
  SomeSamples(std::shared_ptr<const data::Dataset> all, std::int64_t count) : all_(std::move(all)), count_(count) {}
  std::int64_t size() const override { return count_; }
  data::Batch batch(const data::BatchRequest& request) const override {
    std::vector<std::int64_t> places;
    places.reserve(request.indices.size());
    for (const std::int64_t i : request.indices) places.push_back(i * all_->size() / count_);
    data::BatchRequest own = request;
    own.indices = places;
    return all_->batch(own);
  }

 private:
  std::shared_ptr<const data::Dataset> all_;
  std::int64_t count_;
};

// The same for a folder and an archive of it. The files themselves are not read: that takes as long as an epoch.
std::string checksum_of(const data::ImageSource& source) {
  uLong crc = crc32_z(0, nullptr, 0);
  const auto add = [&](const std::string& text) {
    crc = crc32_z(crc, reinterpret_cast<const Bytef*>(text.data()), text.size());
  };
  for (const std::string& name : source.classes()) add(name + '\n');
  for (std::int64_t i = 0; i < source.size(); ++i) {
    const std::string name = source.name(i);
    add(fmt::format("{} {}\n", std::string_view(name).substr(name.find_last_of("/:") + 1), source.label(i)));
  }
  return fmt::format("{:08x}", crc);
}

}  // namespace

data::MnistData load_pictures(const std::filesystem::path& folder, data::Split split, std::uint64_t seed,
                              std::int64_t limit) {
  if (folder.empty()) {
    constexpr std::int64_t kTrainDigits = 60000;
    const bool fewer = split == data::Split::kTrain && limit < kTrainDigits;
    return data::make_digits(split, {.seed = seed, .count = fewer ? limit : 0});
  }
  data::MnistData pictures = data::load_mnist(folder, split);
  if (limit > 0 && limit < pictures.count) {
    pictures.count = limit;
    pictures.images.resize(static_cast<std::size_t>(limit * pictures.rows * pictures.columns));
    pictures.labels.resize(static_cast<std::size_t>(limit));
  }
  return pictures;
}

std::shared_ptr<const data::Dataset> pictures_dataset(data::MnistData pictures) {
  return std::make_shared<data::MnistDataset>(std::move(pictures),
                                              data::ImageOptions{.flatten = true, .mean = 0.1307, .std = 0.3081});
}

data::CropKind parse_crop(const std::string& name) {
  if (name == "random-resized") return data::CropKind::random_resized;
  if (name == "padded") return data::CropKind::padded;
  if (name == "none") return data::CropKind::none;
  fail<Error>("--crop: expected random-resized, padded or none, got '{}'", name);
}

std::optional<PictureForm> picture_form(const std::string& model) {
  const auto names = network_names();
  if (std::find(names.begin(), names.end(), model) == names.end()) return std::nullopt;
  return data_of(model).pictures;
}

std::string checksum(const data::MnistData& pictures) {
  uLong crc = crc32_z(0, nullptr, 0);
  crc = crc32_z(crc, reinterpret_cast<const Bytef*>(pictures.images.data()), pictures.images.size());
  crc = crc32_z(crc, reinterpret_cast<const Bytef*>(pictures.labels.data()), pictures.labels.size());
  return fmt::format("{:08x}", crc);
}

void check(const ImageDataOptions& options) {
  ImageDataOptions o = options;
  check(flags(o));
  if (o.folder.empty()) {
    fail<Error>(
        "--data: expected a folder with images: train and val (or test) with class folders, list files such as "
        "train.txt, or archives such as train.tar.gz");
  }
}

data::TrainTransform train_transform(const ImageDataOptions& o, const std::string& model) {
  data::TrainTransform t = data_of(model).train_transform;
  t.size = o.image_size;
  t.crop = parse_crop(o.crop);
  t.min_area = o.min_area;
  t.jitter = {.brightness = o.color_jitter, .contrast = o.color_jitter, .saturation = o.color_jitter};
  return t;
}

data::EvalTransform eval_transform(const ImageDataOptions& o, const std::string& model) {
  data::EvalTransform t = data_of(model).eval_transform;
  t.size = o.image_size;
  t.resize = o.resize;
  return t;
}

LoadedImages load_images(const ImageDataOptions& o, const std::string& model, data::Split split) {
  check(o);
  const auto source = data::open_images(o.folder, split);
  const data::ImageTransform transform = split == data::Split::kTrain ? data::ImageTransform(train_transform(o, model))
                                                                      : data::ImageTransform(eval_transform(o, model));
  const auto images = std::make_shared<const data::ImageDataset>(
      source, transform, data::ImageDatasetOptions{.max_damaged = o.max_damaged});
  LoadedImages loaded{.dataset = images,
                      .classes = images->classes(),
                      .damaged = [images] { return static_cast<std::int64_t>(images->bad_images().size()); },
                      .checksum = checksum_of(*source)};
  if (split == data::Split::kTrain && o.limit > 0 && o.limit < images->size()) {
    loaded.dataset = std::make_shared<const SomeSamples>(images, o.limit);
  }
  return loaded;
}

}  // namespace halfstep::training
