// SPDX-License-Identifier: Apache-2.0
// The library's kinds of data: digits, and images in two sizes.
#include <algorithm>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/models/registry.h"
#include "halfstep/ops/random.h"
#include "halfstep/train/built_in_internal.h"
#include "halfstep/train/networks.h"

namespace halfstep::training {
namespace {

constexpr std::int64_t kDigitClasses = 10, kDigitSide = 28;

RunData load_digits(const TrainConfig& c, bool training) {
  RunData result;
  result.num_classes = kDigitClasses;
  const auto load = [&](data::Split split, const char* part, std::int64_t limit) {
    data::MnistData pictures = load_pictures(c.data, split, c.seed, limit);
    result.checksums[part] = checksum(pictures);
    return pictures_dataset(std::move(pictures));
  };
  if (training) result.training = load(data::Split::kTrain, "train", c.limit);
  result.test = load(data::Split::kTest, "test", 0);
  return result;
}

ImageDataOptions images_of(const TrainConfig& c) {
  ImageDataOptions options = c.images;
  options.folder = c.data;
  options.limit = c.limit;
  return options;
}

void check_images(const TrainConfig& c) { check(images_of(c)); }

RunData load_both(const TrainConfig& c, bool training) {
  const ImageDataOptions options = images_of(c);
  RunData result;
  if (training) {
    LoadedImages part = load_images(options, c.model, data::Split::kTrain);
    result.training = std::move(part.dataset);
    result.classes = std::move(part.classes);
    result.damaged.push_back(std::move(part.damaged));
    result.checksums["train"] = std::move(part.checksum);
  }
  LoadedImages part = load_images(options, c.model, data::Split::kTest);
  result.test = std::move(part.dataset);
  result.damaged.push_back(std::move(part.damaged));
  result.checksums["test"] = std::move(part.checksum);
  if (!training) result.classes = part.classes;
  result.num_classes = static_cast<std::int64_t>(result.classes.size());
  // Labels are places among the names: other names would be other labels.
  if (result.classes != part.classes) {
    const auto& a = result.classes;
    const auto& b = part.classes;
    const auto [x, y] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
    fail<IoError>(
        "{}: expected the same classes in the training and the test part, got {} and {}; the first that differs: {} "
        "and {}",
        shown_path(c.data), a.size(), b.size(), x == a.end() ? "none" : *x, y == b.end() ? "none" : *y);
  }
  return result;
}

// What a kind of images is customarily trained with; the rate is for a batch of so many samples.
struct Recipe {
  std::int64_t batch_size;
  int epochs;
  double weight_decay;
  const char* schedule;
  double lr, samples;
};

void fill_in(TrainConfig& c, const Recipe& recipe) {
  c.momentum = 0.9;
  c.prefetch = 2;
  c.epochs = recipe.epochs;
  c.weight_decay = recipe.weight_decay;
  c.lr_schedule = recipe.schedule;
  if (c.batch_size == 0) c.batch_size = recipe.batch_size;
  c.lr = recipe.lr * static_cast<double>(c.batch_size) / recipe.samples;
  c.eval_batch_size = c.batch_size;
}

void usual_cifar(TrainConfig& c) {
  fill_in(c, {.batch_size = 128, .epochs = 8, .weight_decay = 5e-4, .schedule = "onecycle", .lr = 0.2, .samples = 128});
  c.images.resize = c.images.image_size;
  c.images.crop = "padded";
}

void usual_imagenet(TrainConfig& c) {
  // 256 images of 224 x 224 take 40 GB in float32.
  fill_in(c, {.batch_size = c.device.is_cpu() ? 32 : 256,
              .epochs = 90,
              .weight_decay = 1e-4,
              .schedule = "step:30,0.1",
              .lr = 0.1,
              .samples = 256});
  c.images.resize = (c.images.image_size * 256 + 112) / 224;  // as 256 is to 224
}

// The MLP has the tutorials' settings, which are the library's.
void usual_digits(TrainConfig& c) {
  if (c.model == "mlp") {
    if (c.batch_size == 0) c.batch_size = TrainConfig().batch_size;
    return;
  }
  const int prefetch = c.prefetch;
  fill_in(c, {.batch_size = 128, .epochs = 3, .weight_decay = 5e-4, .schedule = "onecycle", .lr = 0.1, .samples = 128});
  c.prefetch = prefetch;
}

// Of a network that doesn't say how many classes it has, all are of the first.
Tensor random_labels(const NetworkKind& network, std::int64_t n) {
  return randint(0, std::max<std::int64_t>(network.classes, 1), {n}, {.dtype = i64});
}

data::Batch random_digits(const NetworkKind& network, std::int64_t n, std::int64_t /*image_size*/) {
  const Tensor input = randn({n, kDigitSide * kDigitSide});
  return {.input = input, .target = random_labels(network, n)};
}

data::Batch random_images(const NetworkKind& network, std::int64_t n, std::int64_t image_size) {
  const std::int64_t side = image_size > 0 ? image_size : network_input(network.name).image_size;
  const Tensor input = randn({n, 3, side, side});
  return {.input = input, .target = random_labels(network, n)};
}

}  // namespace

std::vector<DataKind> built_in_data() {
  using models::DataKind::cifar, models::DataKind::digits, models::DataKind::imagenet;
  return {{.name = digits,
           .load = load_digits,
           .usual = usual_digits,
           .built_in = "the built-in digits",
           .lines = false,
           .pictures = PictureForm{.channels = 1,
                                   .height = kDigitSide,
                                   .width = kDigitSide,
                                   .normalization = {.mean = {0.1307F, 0, 0}, .std = {0.3081F, 1, 1}}},
           .random = random_digits},
          {.name = cifar,
           .load = load_both,
           .check = check_images,
           .usual = usual_cifar,
           .flags = "images",
           .images = true,
           .train_transform = data::cifar_train_transform(),
           .eval_transform = data::cifar_eval_transform(),
           .pictures = PictureForm{.normalization = data::cifar_eval_transform().normalization},
           .random = random_images},
          {.name = imagenet,
           .load = load_both,
           .check = check_images,
           .usual = usual_imagenet,
           .flags = "images",
           .images = true,
           .pictures = PictureForm{.normalization = data::EvalTransform{}.normalization},
           .random = random_images}};
}

}  // namespace halfstep::training
