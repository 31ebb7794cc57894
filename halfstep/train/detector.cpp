// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/detector.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/data/detection_transforms.h"
#include "halfstep/data/resize.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/runtime/queue.h"

namespace halfstep::training {
namespace {

// A picture in a network's input.
struct FilledInput {
  Tensor input = {};  // [1, 3, H, W] on the CPU, channels-last, 0 to 1
  data::Letterbox box = {};
};

FilledInput filled_input(const data::ImageView& picture, std::int64_t size, std::int64_t stride) {
  constexpr float kFill = 114.0F / 255;  // as of data::DetectionTransform
  FilledInput result;
  data::Letterbox& box = result.box;
  box = data::letterbox(picture.width, picture.height, size, size, size);
  const auto whole_strides = [&](std::int64_t side) { return (side + stride - 1) / stride * stride; };
  const std::int64_t full_width = whole_strides(box.width), full_height = whole_strides(box.height);
  box = data::letterbox(picture.width, picture.height, size, full_width, full_height);
  const bool same = box.width == picture.width && box.height == picture.height;
  const data::Image resized = same ? data::Image{} : data::resize(picture, {.width = box.width, .height = box.height});
  const data::ImageView from = same ? picture : resized.view();
  std::vector<float> pixels(static_cast<std::size_t>(3 * full_width * full_height), kFill);
  for (std::int64_t y = 0; y < box.height; ++y) {
    float* to = pixels.data() + 3 * ((box.top + y) * full_width + box.left);
    const std::uint8_t* row = from.row(y);
    for (std::int64_t i = 0; i < 3 * box.width; ++i) to[i] = static_cast<float>(row[i]) / 255;
  }
  const Shape sizes{1, 3, full_height, full_width};
  result.input = from_blob(pixels.data(), sizes, channels_last_strides(sizes), f32, {}).clone();
  return result;
}

}  // namespace

Detector::Detector(std::shared_ptr<const models::Yolov5> network, const DetectorOptions& options)
    : network_(std::move(network)), options_(options) {
  const auto& strides = network_->strides();
  if (!strides.empty()) stride_ = *std::max_element(strides.begin(), strides.end());
  if (options.image_size < 1 || options.image_size > data::kLargestInputSide) {
    fail<Error>("Detector: expected an image size of 1 to {}, got {}", data::kLargestInputSide, options.image_size);
  }
  const std::int64_t classes = network_->head().options.classes;
  for (const std::int64_t c : options.classes) {
    if (c < 0 || c >= classes) fail<Error>("Detector: expected classes from 0 to {}, got {}", classes - 1, c);
  }
  network_->eval();
}

FoundObjects Detector::operator()(const data::ImageView& picture) const {
  using Clock = std::chrono::steady_clock;
  const NoGrad no_grad;
  const Device device = network_->parameters().front().tensor.device();
  FoundObjects found;
  auto before = Clock::now();
  const auto passed = [&] {
    if (!device.is_cpu()) synchronize(device);
    const auto now = Clock::now();
    return std::chrono::duration<double, std::milli>(now - std::exchange(before, now)).count();
  };
  const auto [filled, box] = filled_input(picture, options_.image_size, stride_);
  const Tensor input = filled.to(device);
  found.height = input.size(2), found.width = input.size(3);
  found.prepare_ms = passed();
  models::DetectorLevels levels;
  {
    const amp::Autocast autocast{{.dtype = options_.autocast.value_or(f16), .enabled = options_.autocast.has_value()}};
    levels = options_.levels ? options_.levels(input) : network_->forward(input);
  }
  found.forward_ms = passed();
  // The objects of other classes don't count, so that none of those that do is left out for them.
  models::DetectionsOptions limits = options_.detections;
  if (!options_.classes.empty()) limits.limit = limits.candidates;
  const Tensor decoded = network_->decode(levels);
  found.finite = std::isfinite(sum(decoded).item<double>());
  found.objects = models::detections(decoded, limits).at(0);
  if (!options_.classes.empty()) {
    std::erase_if(found.objects, [&](const models::Detection& d) {
      return std::find(options_.classes.begin(), options_.classes.end(), d.label) == options_.classes.end();
    });
    const auto most = static_cast<std::size_t>(std::max<std::int64_t>(options_.detections.limit, 0));
    if (found.objects.size() > most) found.objects.resize(most);
  }
  const auto width = static_cast<double>(picture.width), height = static_cast<double>(picture.height);
  const auto left = static_cast<double>(box.left), top = static_cast<double>(box.top);
  for (models::Detection& d : found.objects) {
    d.left = std::clamp((d.left - left) / box.scale, 0.0, width);
    d.right = std::clamp((d.right - left) / box.scale, 0.0, width);
    d.top = std::clamp((d.top - top) / box.scale, 0.0, height);
    d.bottom = std::clamp((d.bottom - top) / box.scale, 0.0, height);
  }
  found.suppress_ms = passed();
  return found;
}

}  // namespace halfstep::training
