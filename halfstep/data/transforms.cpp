// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/transforms.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/core/float16.h"
#include "halfstep/core/write_internal.h"
#include "halfstep/data/color.h"

namespace halfstep::data {
namespace {

constexpr std::int64_t kLargestSide = 1 << 14;  // of a picture before its crop

/// Each step has numbers of its own, so that turning one on doesn't change what the others draw.
enum class TransformStep : std::uint64_t { crop, flip, jitter };

RandomStream stream(const SampleKey& key, TransformStep step) {
  constexpr std::uint64_t kPurpose = 0x696D61676573;  // keeps these apart from other uses of seed and epoch
  const std::uint64_t epoch = derive_seed(key.seed, static_cast<std::uint64_t>(key.epoch), kPurpose);
  return RandomStream(derive_seed(epoch, static_cast<std::uint64_t>(key.sample), static_cast<std::uint64_t>(step)));
}

void check(bool ok, const char* what, double got) {
  if (!ok) fail<Error>("ImagePipeline: expected {}, got {}", what, got);
}

void check_size(std::int64_t size) {
  if (size >= 1 && size <= kLargestInputSide) return;
  fail<Error>("ImagePipeline: expected a size from 1 to {}, got {}", kLargestInputSide, size);
}

void check_options(const TrainTransform& t) {
  check_size(t.size);
  check(t.min_area > 0 && t.min_area <= 1, "a least area over 0 and at most 1", t.min_area);
  check(t.max_area >= t.min_area && t.max_area <= 1, "a largest area from the least one to 1", t.max_area);
  check(t.min_ratio > 0 && std::isfinite(t.min_ratio), "a least ratio over 0", t.min_ratio);
  check(t.max_ratio >= t.min_ratio && std::isfinite(t.max_ratio), "a largest ratio of at least the least one",
        t.max_ratio);
  check(t.padding >= 0 && t.padding <= kLargestSide, "a padding from 0 to 16384", static_cast<double>(t.padding));
  check(t.flip >= 0 && t.flip <= 1, "a probability of a flip from 0 to 1", t.flip);
  for (const double amount : {t.jitter.brightness, t.jitter.contrast, t.jitter.saturation}) {
    check(amount >= 0 && std::isfinite(amount), "colour jitter of at least 0", amount);
  }
  check(t.jitter.hue >= 0 && t.jitter.hue <= 0.5, "hue jitter from 0 to 0.5", t.jitter.hue);
}

void check_options(const EvalTransform& t) {
  check_size(t.size);
  check(t.resize == 0 || (t.resize >= t.size && t.resize <= kLargestSide), "a resize of 0, or from the size to 16384",
        static_cast<double>(t.resize));
}

void apply_jitter(const ColorJitter& jitter, RandomStream random, Image& image) {
  std::array<int, 4> order{0, 1, 2, 3};
  for (std::size_t i = 0; i + 1 < order.size(); ++i) std::swap(order[i], order[i + random.below(order.size() - i)]);
  const auto factor = [&](double x) { return random.uniform(std::max(0.0, 1 - x), 1 + x); };
  // All are drawn, used or not, so that each keeps its place.
  const double brightness = factor(jitter.brightness), contrast = factor(jitter.contrast),
               saturation = factor(jitter.saturation), hue = random.uniform(-jitter.hue, jitter.hue);
  for (const int step : order) {
    if (step == 0 && jitter.brightness > 0) adjust_brightness(image, brightness);
    if (step == 1 && jitter.contrast > 0) adjust_contrast(image, contrast);
    if (step == 2 && jitter.saturation > 0) adjust_saturation(image, saturation);
    if (step == 3 && jitter.hue > 0) adjust_hue(image, hue);
  }
}

/// The largest shrink with which `region` still has twice the pixels of the result along both sides.
int choose_shrink(const PixelRegion& region, std::int64_t size) {
  int shrink = 8;
  while (shrink > 1 && (region.width < 2 * size * shrink || region.height < 2 * size * shrink)) shrink /= 2;
  return shrink;
}

/// Decodes `region` and resizes it to size x size, into scratch.result. Nothing beside the region counts.
void resize_region(ImageDecoder& picture, const PixelRegion& region, std::int64_t size, ResizeFilter filter,
                   bool may_shrink, TransformScratch& scratch) {
  const int shrink = may_shrink && picture.info().format == ImageFormat::jpeg ? choose_shrink(region, size) : 1;
  const ImagePatch patch = picture.decode(region, shrink, scratch.decoded);
  ResizeOptions options{.width = size, .height = size, .filter = filter};
  PixelRegion part = {
      .left = region.left - patch.left, .top = region.top - patch.top, .width = region.width, .height = region.height};
  if (shrink > 1) {
    // The region seldom begins and ends with a pixel of the small picture.
    const auto covered = [&](std::int64_t begin, std::int64_t n, std::int64_t full, std::int64_t first) {
      const std::int64_t low = begin / shrink, high = std::min((begin + n + shrink - 1) / shrink, full);
      return std::pair(low - first, high - low);
    };
    std::tie(part.left, part.width) = covered(region.left, region.width, patch.full_width, patch.left);
    std::tie(part.top, part.height) = covered(region.top, region.height, patch.full_height, patch.top);
    const auto in_part = [&](std::int64_t position, std::int64_t begin, std::int64_t n) {
      const double at = static_cast<double>(position) / shrink - static_cast<double>(begin / shrink);
      return std::clamp(at, 0.0, static_cast<double>(n));
    };
    options.box = {.left = in_part(region.left, region.left, part.width),
                   .top = in_part(region.top, region.top, part.height),
                   .right = in_part(region.left + region.width, region.left, part.width),
                   .bottom = in_part(region.top + region.height, region.top, part.height)};
  }
  const ResizePlan plan(part.width, part.height, options);
  plan.run(scratch.decoded.view(part), 0, 0, scratch.rows, scratch.result);
}

/// The picture moved by (dx, dy), with black where there is none, in place of `image`.
void shift(Image& image, std::int64_t dx, std::int64_t dy, Image& scratch) {
  scratch.resize(image.width, image.height);
  std::fill(scratch.pixels.begin(), scratch.pixels.end(), std::uint8_t{0});
  const std::int64_t columns = image.width - std::abs(dx);
  for (std::int64_t y = std::max<std::int64_t>(dy, 0); y < std::min(image.height, image.height + dy) && columns > 0;
       ++y) {
    std::memcpy(scratch.row(y) + 3 * std::max<std::int64_t>(dx, 0),
                image.row(y - dy) + 3 * std::max<std::int64_t>(-dx, 0), static_cast<std::size_t>(3 * columns));
  }
  std::swap(image, scratch);
}

bool make_train(const TrainTransform& t, ImageDecoder& picture, const SampleKey& key, TransformScratch& scratch) {
  const ImageInfo& info = picture.info();
  RandomStream crop = stream(key, TransformStep::crop);
  if (t.crop == CropKind::random_resized) {
    const PixelRegion region = random_resized_region(info.width, info.height, t, crop);
    resize_region(picture, region, t.size, t.filter, t.scaled_decode, scratch);
  } else {
    resize_region(picture, {.left = 0, .top = 0, .width = info.width, .height = info.height}, t.size, t.filter,
                  t.scaled_decode, scratch);
    if (t.crop == CropKind::padded && t.padding > 0) {
      const auto places = static_cast<std::uint64_t>(2 * t.padding + 1);
      const std::int64_t dy = t.padding - static_cast<std::int64_t>(crop.below(places));
      const std::int64_t dx = t.padding - static_cast<std::int64_t>(crop.below(places));
      shift(scratch.result, dx, dy, scratch.rows);
    }
  }
  const ColorJitter& jitter = t.jitter;
  if (jitter.brightness > 0 || jitter.contrast > 0 || jitter.saturation > 0 || jitter.hue > 0) {
    apply_jitter(jitter, stream(key, TransformStep::jitter), scratch.result);
  }
  return stream(key, TransformStep::flip).bernoulli(t.flip);
}

void make_eval(const EvalTransform& t, ImageDecoder& picture, TransformScratch& scratch) {
  const ImageInfo& info = picture.info();
  ResizeOptions options{.width = t.size, .height = t.size, .filter = t.filter};
  if (t.resize > 0) {
    const std::int64_t shorter = std::min(info.width, info.height), longer = std::max(info.width, info.height);
    const auto longer_after =
        static_cast<std::int64_t>(static_cast<double>(t.resize * longer) / static_cast<double>(shorter));
    options.width = info.width <= info.height ? t.resize : longer_after;
    options.height = info.width <= info.height ? longer_after : t.resize;
    // Half a pixel is rounded to even, as Python does.
    options.window = {.left = std::lrint(static_cast<double>(options.width - t.size) / 2),
                      .top = std::lrint(static_cast<double>(options.height - t.size) / 2),
                      .width = t.size,
                      .height = t.size};
  }
  const ResizePlan plan(info.width, info.height, options);
  const ImagePatch patch = picture.decode(plan.source_region(), 1, scratch.decoded);
  plan.run(scratch.decoded.view(), patch.left, patch.top, scratch.rows, scratch.result);
}

template <class T>
void write_as(const Image& image, bool mirrored, const std::array<std::array<T, 256>, 3>& values, T* out) {
  const std::int64_t step = mirrored ? -3 : 3;
  for (std::int64_t y = 0; y < image.height; ++y) {
    const std::uint8_t* p = image.row(y) + (mirrored ? 3 * (image.width - 1) : 0);
    for (std::int64_t x = 0; x < image.width; ++x, p += step, out += 3) {
      out[0] = values[0][p[0]];
      out[1] = values[1][p[1]];
      out[2] = values[2][p[2]];
    }
  }
}

}  // namespace

TrainTransform cifar_train_transform() {
  return {.size = 32, .crop = CropKind::padded, .normalization = kCifarNormalization};
}

EvalTransform cifar_eval_transform() { return {.size = 32, .resize = 0, .normalization = kCifarNormalization}; }

PixelRegion random_resized_region(std::int64_t width, std::int64_t height, const TrainTransform& transform,
                                  RandomStream& random) {
  const double area = static_cast<double>(width) * static_cast<double>(height);
  const double low = std::log(transform.min_ratio), high = std::log(transform.max_ratio);
  for (int attempt = 0; attempt < 10; ++attempt) {
    const double target = area * random.uniform(transform.min_area, transform.max_area);
    const double ratio = std::exp(random.uniform(low, high));
    const std::int64_t w = std::lrint(std::sqrt(target * ratio)), h = std::lrint(std::sqrt(target / ratio));
    if (w > 0 && w <= width && h > 0 && h <= height) {
      const auto top = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(height - h + 1)));
      const auto left = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(width - w + 1)));
      return {.left = left, .top = top, .width = w, .height = h};
    }
  }
  const double ratio = static_cast<double>(width) / static_cast<double>(height);
  std::int64_t w = width, h = height;
  if (ratio < transform.min_ratio) {
    h = std::clamp<std::int64_t>(std::lrint(static_cast<double>(width) / transform.min_ratio), 1, height);
  } else if (ratio > transform.max_ratio) {
    w = std::clamp<std::int64_t>(std::lrint(static_cast<double>(height) * transform.max_ratio), 1, width);
  }
  return {.left = (width - w) / 2, .top = (height - h) / 2, .width = w, .height = h};
}

ImagePipeline::ImagePipeline(const ImageTransform& transform, DType dtype) : transform_(transform), dtype_(dtype) {
  if (dtype != f32 && dtype != f16 && dtype != bf16) {
    fail<DTypeError>("ImagePipeline: expected f32, f16 or bf16, got {}", halfstep::name(dtype));
  }
  Normalization normalization;
  std::visit(
      [&](const auto& t) {
        check_options(t);
        size_ = t.size;
        normalization = t.normalization;
      },
      transform);
  for (std::size_t c = 0; c < 3; ++c) {
    const float mean = normalization.mean[c], std = normalization.std[c];
    check(std::isfinite(mean), "a finite mean", static_cast<double>(mean));
    check(std > 0 && std::isfinite(std), "a standard deviation over 0", static_cast<double>(std));
    for (std::size_t p = 0; p < 256; ++p) {
      const float unit = static_cast<float>(p) / 255.0F;
      const float centred = unit - mean;
      values_[c][p] = centred / std;
      short_values_[c][p] = dtype == bf16 ? BFloat16(values_[c][p]).bits : Half(values_[c][p]).bits;
    }
  }
}

bool ImagePipeline::make(ImageDecoder& picture, const SampleKey& key, TransformScratch& scratch) const {
  if (const auto* train = std::get_if<TrainTransform>(&transform_)) return make_train(*train, picture, key, scratch);
  make_eval(std::get<EvalTransform>(transform_), picture, scratch);
  return false;
}

void ImagePipeline::run(ImageDecoder& picture, const SampleKey& key, TransformScratch& scratch, void* out) const {
  const bool mirrored = make(picture, key, scratch);
  write(scratch.result, mirrored, out);
}

void ImagePipeline::write(const Image& image, bool mirrored, void* out) const {
  if (dtype_ == f32) {
    write_as(image, mirrored, values_, static_cast<float*>(out));
  } else {
    write_as(image, mirrored, short_values_, static_cast<std::uint16_t*>(out));
  }
}

Tensor empty_image_batch(std::int64_t n, std::int64_t size, DType dtype) {
  const Shape sizes{n, 3, size, size};
  return empty_strided(sizes, channels_last_strides(sizes), {.dtype = dtype, .device = Device{}});
}

Tensor read_images(std::span<const std::filesystem::path> paths, const EvalTransform& transform, DType dtype,
                   const ImageLimits& limits) {
  const ImagePipeline pipeline(transform, dtype);
  Tensor batch = empty_image_batch(static_cast<std::int64_t>(paths.size()), transform.size, dtype);
  auto* out = static_cast<std::byte*>(write_raw_data(batch));
  TransformScratch scratch;
  std::vector<std::uint8_t> bytes;
  for (const std::filesystem::path& path : paths) {
    read_file(path, limits.max_bytes, bytes);
    ImageDecoder picture(bytes, path.string(), limits);
    pipeline.run(picture, {}, scratch, out);
    out += static_cast<std::size_t>(3 * transform.size * transform.size) * item_size(dtype);
  }
  return batch;
}

}  // namespace halfstep::data
