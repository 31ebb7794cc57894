// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/data.h"

#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/data/image_dataset.h"
#include "halfstep/data/image_source.h"
#include "halfstep/models/registry.h"

namespace halfstep::training {
namespace {

// Some of the samples, evenly over all: those of a folder stand class by class.
class Part final : public data::Dataset {
 public:
  Part(std::shared_ptr<const data::Dataset> all, std::int64_t count) : all_(std::move(all)), count_(count) {}
  std::int64_t size() const override { return count_; }
  data::Batch batch(const data::BatchRequest& request) const override {
    std::vector<std::int64_t> places;
    places.reserve(request.indices.size());
    for (const std::int64_t i : request.indices) places.push_back(i * all_->size() / count_);
    return all_->batch({.indices = places, .seed = request.seed, .epoch = request.epoch});
  }

 private:
  std::shared_ptr<const data::Dataset> all_;
  std::int64_t count_;
};

bool is_cifar(const std::string& model) { return models::model_info(model).data == models::DataKind::cifar; }

data::CropKind crop_kind(const std::string& name) {
  if (name == "random-resized") return data::CropKind::random_resized;
  if (name == "padded") return data::CropKind::padded;
  if (name == "none") return data::CropKind::none;
  fail<Error>("--crop: expected random-resized, padded or none, got '{}'", name);
}

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

std::optional<PictureForm> picture_form(const std::string& model) {
  const auto names = models::model_names();
  if (std::find(names.begin(), names.end(), model) == names.end()) return std::nullopt;
  switch (models::model_info(model).data) {
    case models::DataKind::digits:
      return PictureForm{
          .channels = 1, .height = 28, .width = 28, .normalization = {.mean = {0.1307F, 0, 0}, .std = {0.3081F, 1, 1}}};
    case models::DataKind::cifar:
      return PictureForm{.normalization = data::cifar_eval_transform().normalization};
    case models::DataKind::imagenet:
      break;
  }
  return PictureForm{.normalization = data::EvalTransform{}.normalization};
}

std::string checksum(const data::MnistData& pictures) {
  uLong crc = crc32_z(0, nullptr, 0);
  crc = crc32_z(crc, reinterpret_cast<const Bytef*>(pictures.images.data()), pictures.images.size());
  crc = crc32_z(crc, reinterpret_cast<const Bytef*>(pictures.labels.data()), pictures.labels.size());
  return fmt::format("{:08x}", crc);
}

ImageDataOptions default_images(const std::string& model, std::int64_t image_size) {
  const models::ModelInfo& info = models::model_info(model);
  ImageDataOptions o;
  o.image_size = image_size > 0 ? image_size : info.image_size;
  if (info.data == models::DataKind::imagenet) {
    o.resize = (o.image_size * 256 + 112) / 224;  // as 256 is to 224
  } else {
    o.resize = o.image_size;
    o.crop = "padded";
  }
  return o;
}

void check(const ImageDataOptions& o) {
  if (o.image_size < 1) fail<Error>("--image-size: expected at least 1, got {}", o.image_size);
  if (o.resize != 0 && o.resize < o.image_size) {
    fail<Error>("--resize: expected at least the --image-size of {}, or 0, got {}", o.image_size, o.resize);
  }
  crop_kind(o.crop);
  if (!(o.min_area > 0) || o.min_area > 1) fail<Error>("--min-area: expected above 0 to 1, got {}", o.min_area);
  if (!(o.color_jitter >= 0) || o.color_jitter > 1) {
    fail<Error>("--color-jitter: expected 0 to 1, got {}", o.color_jitter);
  }
  if (o.max_damaged < 0) fail<Error>("--max-damaged: expected at least 0, got {}", o.max_damaged);
  if (o.folder.empty()) {
    fail<Error>(
        "--data: expected a folder with images: train and val (or test) with class folders, list files such as "
        "train.txt, or archives such as train.tar.gz");
  }
}

std::map<std::string, std::string> data_flags(const ImageDataOptions& o) {
  return {{"image-size", fmt::format("{}", o.image_size)},
          {"resize", fmt::format("{}", o.resize)},
          {"crop", o.crop},
          {"min-area", fmt::format("{}", o.min_area)},
          {"color-jitter", fmt::format("{}", o.color_jitter)}};
}

data::TrainTransform train_transform(const ImageDataOptions& o, const std::string& model) {
  data::TrainTransform t = is_cifar(model) ? data::cifar_train_transform() : data::TrainTransform{};
  t.size = o.image_size;
  t.crop = crop_kind(o.crop);
  t.min_area = o.min_area;
  t.jitter = {.brightness = o.color_jitter, .contrast = o.color_jitter, .saturation = o.color_jitter};
  return t;
}

data::EvalTransform eval_transform(const ImageDataOptions& o, const std::string& model) {
  data::EvalTransform t = is_cifar(model) ? data::cifar_eval_transform() : data::EvalTransform{};
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
      source, transform, data::ImageDatasetOptions{.max_bad_images = o.max_damaged});
  LoadedImages loaded{.dataset = images,
                      .classes = images->classes(),
                      .damaged = [images] { return static_cast<std::int64_t>(images->bad_images().size()); },
                      .checksum = checksum_of(*source)};
  if (split == data::Split::kTrain && o.limit > 0 && o.limit < images->size()) {
    loaded.dataset = std::make_shared<const Part>(images, o.limit);
  }
  return loaded;
}

}  // namespace halfstep::training
