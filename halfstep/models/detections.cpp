// SPDX-License-Identifier: Apache-2.0
#include "halfstep/models/detections.h"

#include <algorithm>
#include <cmath>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/detection.h"

namespace halfstep::models {
namespace {

void check(const Tensor& predictions, const DetectionsOptions& o) {
  check_defined(predictions, "detections", "predictions");
  if (predictions.dim() != 3 || predictions.size(2) < 6) {
    fail<ShapeError>("detections: expected predictions [N, boxes, 5 + classes], got {}", predictions.sizes().str());
  }
  if (!is_floating(predictions.dtype())) {
    fail<DTypeError>("detections: expected floating predictions, got {}", name(predictions.dtype()));
  }
  const auto share = [](const char* what, double value) {
    if (!(value >= 0 && value <= 1)) fail<Error>("detections: expected {} from 0 to 1, got {}", what, value);
  };
  share("a score", o.score);
  share("an overlap", o.overlap);
  if (o.limit < 1) fail<Error>("detections: expected a limit of at least 1, got {}", o.limit);
  if (o.candidates < 1) fail<Error>("detections: expected at least 1 candidate, got {}", o.candidates);
}

// What is above the score in one picture, `row` by `row` of `boxes`.
std::vector<Detection> candidates(const float* row, std::int64_t boxes, std::int64_t classes,
                                  const DetectionsOptions& o) {
  std::vector<Detection> found;
  const auto least = static_cast<float>(o.score);
  for (std::int64_t i = 0; i < boxes; ++i, row += 5 + classes) {
    const float object = row[4];
    if (!(object > least) || !std::all_of(row, row + 5 + classes, [](float x) { return std::isfinite(x); })) continue;
    const auto add = [&](std::int64_t label) {
      const float score = object * row[5 + label];
      if (!(score > least)) return;
      const double w = row[2] / 2.0, h = row[3] / 2.0;
      found.push_back({label, score, row[0] - w, row[1] - h, row[0] + w, row[1] + h});
    };
    if (o.multi_label) {
      for (std::int64_t label = 0; label < classes; ++label) add(label);
    } else {
      add(std::max_element(row + 5, row + 5 + classes) - (row + 5));
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.score > b.score; });
  if (static_cast<std::int64_t>(found.size()) > o.candidates) found.resize(static_cast<std::size_t>(o.candidates));
  return found;
}

std::vector<Detection> suppressed(const std::vector<Detection>& found, const DetectionsOptions& o) {
  if (found.empty()) return {};
  std::vector<double> boxes, scores;
  std::vector<std::int64_t> labels;
  for (const Detection& d : found) {
    for (const double side : {d.left, d.top, d.right, d.bottom}) boxes.push_back(side);
    scores.push_back(d.score);
    labels.push_back(d.label);
  }
  const auto n = static_cast<std::int64_t>(found.size());
  const Tensor places = tensor(boxes, {n, 4}, {.dtype = f32}), order = tensor(scores, {n}, {.dtype = f32});
  const NmsOptions options{.iou_threshold = o.overlap, .limit = o.limit};
  const Tensor kept =
      o.agnostic ? nms(places, order, options) : batched_nms(places, order, tensor(labels, {n}), options);
  std::vector<Detection> result;
  for (const std::int64_t i : kept.to_vector<std::int64_t>()) result.push_back(found[static_cast<std::size_t>(i)]);
  return result;
}

}  // namespace

std::vector<std::vector<Detection>> detections(const Tensor& predictions, const DetectionsOptions& options) {
  check(predictions, options);
  const NoGrad no_grad;
  const Tensor all = predictions.detach().to(Device{}).to(f32).contiguous();
  const std::int64_t boxes = all.size(1), classes = all.size(2) - 5;
  std::vector<std::vector<Detection>> result;
  for (std::int64_t n = 0; n < all.size(0); ++n) {
    const float* first = all.data<const float>() + n * boxes * (5 + classes);
    result.push_back(suppressed(candidates(first, boxes, classes, options), options));
  }
  return result;
}

}  // namespace halfstep::models
