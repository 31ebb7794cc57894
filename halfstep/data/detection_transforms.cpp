// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/detection_transforms.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "halfstep/core/fail.h"

namespace halfstep::data {
namespace {

void expect_option(bool ok, const char* name, const char* what, double got) {
  if (!ok) fail<Error>("DetectionTransform: {}: expected {}, got {}", name, what, got);
}

}  // namespace

// Over twice the size no denominator becomes zero.
double largest_perspective(std::int64_t size) { return 0.25 / static_cast<double>(std::max<std::int64_t>(size, 1)); }

void check_options(const DetectionTransform& t) {
  expect_option(t.stride >= 1 && t.stride <= 1024, "stride", "1 to 1024", static_cast<double>(t.stride));
  if (t.size < t.stride || t.size > kLargestInputSide || t.size % t.stride != 0) {
    fail<Error>("DetectionTransform: size: expected a multiple of {} up to {}, got {}", t.stride, kLargestInputSide,
                t.size);
  }
  expect_option(t.fill >= 0 && t.fill <= 255, "fill", "0 to 255", t.fill);
  const std::pair<const char*, double> probabilities[] = {{"mosaic", t.mosaic},
                                                          {"mixup", t.mixup},
                                                          {"copy_paste", t.copy_paste},
                                                          {"flip_up_down", t.flip_up_down},
                                                          {"flip_left_right", t.flip_left_right}};
  for (const auto& [name, p] : probabilities) expect_option(p >= 0 && p <= 1, name, "a probability from 0 to 1", p);
  expect_option(t.degrees >= 0 && t.degrees <= 180, "degrees", "0 to 180", t.degrees);
  expect_option(t.translate >= 0 && t.translate <= 1, "translate", "0 to 1", t.translate);
  expect_option(t.scale >= 0 && t.scale < 1, "scale", "at least 0 and under 1", t.scale);
  expect_option(t.shear >= 0 && t.shear <= 45, "shear", "0 to 45", t.shear);
  const double most = largest_perspective(t.size);
  if (!(t.perspective >= 0 && t.perspective <= most)) {
    fail<Error>("DetectionTransform: perspective: expected 0 to {:.3g} with inputs of {}, got {}", most, t.size,
                t.perspective);
  }
  expect_option(t.hue >= 0 && t.hue <= 1, "hue", "0 to 1", t.hue);
  expect_option(t.saturation >= 0 && t.saturation <= 1, "saturation", "0 to 1", t.saturation);
  expect_option(t.value >= 0 && t.value <= 1, "value", "0 to 1", t.value);
  expect_option(t.pad >= 0 && t.pad <= 16, "pad", "0 to 16", t.pad);
}

Letterbox letterbox(std::int64_t width, std::int64_t height, std::int64_t size, std::int64_t input_width,
                    std::int64_t input_height, bool upscale) {
  if (width < 1 || height < 1 || size < 1 || input_width < 1 || input_height < 1) {
    fail<Error>("letterbox: expected sizes over 0, got a picture of {}x{} for {} in an input of {}x{}", width, height,
                size, input_width, input_height);
  }
  const auto w = static_cast<double>(width), h = static_cast<double>(height);
  Letterbox box;
  box.scale = static_cast<double>(size) / std::max(w, h);
  box.scale = std::min({box.scale, static_cast<double>(input_width) / w, static_cast<double>(input_height) / h});
  if (!upscale) box.scale = std::min(box.scale, 1.0);
  box.width = std::clamp<std::int64_t>(std::lrint(w * box.scale), 1, input_width);
  box.height = std::clamp<std::int64_t>(std::lrint(h * box.scale), 1, input_height);
  box.left = (input_width - box.width) / 2;
  box.top = (input_height - box.height) / 2;
  return box;
}

std::int64_t multi_scale_size(const DetectionTransform& t, std::uint64_t seed, std::int64_t epoch,
                              std::int64_t number) {
  constexpr std::uint64_t kPurpose = 0x6D756C7469;  // keeps these numbers apart from other uses of seed and epoch
  const std::int64_t least = std::max<std::int64_t>((t.size / 2 + t.stride - 1) / t.stride, 1);
  const std::int64_t most = std::max((t.size + t.size / 2) / t.stride, least);
  RandomStream random(
      derive_seed(derive_seed(seed, static_cast<std::uint64_t>(epoch), kPurpose), static_cast<std::uint64_t>(number)));
  return (least + static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(most - least + 1)))) * t.stride;
}

RectangularBatches rectangular_batches(std::span<const std::array<std::int64_t, 2>> sizes, std::int64_t batch_size,
                                       const DetectionTransform& t) {
  if (batch_size < 1) fail<Error>("rectangular_batches: expected a batch size of at least 1, got {}", batch_size);
  const auto ratio = [&](std::int64_t i) {
    const auto& [height, width] = sizes[static_cast<std::size_t>(i)];
    return height > 0 && width > 0 ? static_cast<double>(height) / static_cast<double>(width) : 1.0;
  };
  RectangularBatches batches;
  batches.order.resize(sizes.size());
  std::iota(batches.order.begin(), batches.order.end(), std::int64_t{0});
  std::stable_sort(batches.order.begin(), batches.order.end(),
                   [&](std::int64_t a, std::int64_t b) { return ratio(a) < ratio(b); });
  const std::int64_t n = std::ssize(sizes);
  for (std::int64_t first = 0; first < n; first += batch_size) {
    const double low = ratio(batches.order[static_cast<std::size_t>(first)]);
    const double high = ratio(batches.order[static_cast<std::size_t>(std::min(first + batch_size, n) - 1)]);
    const double height = high < 1 ? high : 1, width = low > 1 ? 1 / low : 1;
    const auto side = [&](double share) {
      const double strides = std::ceil(share * static_cast<double>(t.size) / static_cast<double>(t.stride) + t.pad);
      return std::max<std::int64_t>(static_cast<std::int64_t>(strides), 1) * t.stride;
    };
    batches.shapes.push_back({side(height), side(width)});
  }
  return batches;
}

}  // namespace halfstep::data
