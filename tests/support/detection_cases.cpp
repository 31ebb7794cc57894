// SPDX-License-Identifier: Apache-2.0
// Cases of the ops of object detection. Those of nms, which has no gradient, are in tests/ops/detection_test.cpp.
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/detection.h"
#include "halfstep/ops/join.h"
#include "tests/support/op_case_makers.h"

namespace halfstep::test {
namespace {

// Regions of the pictures 0 and 1 in turn, of a left upper corner and two sides each: the same ones for 16-bit numbers
// as for the same numbers in float64.
Tensor regions(const Tensor& numbers_of_each) {
  const Tensor from = numbers_of_each.to(numbers_of_each.dtype() == f64 ? f64 : f32);
  std::vector<double> numbers;
  for (std::int64_t i = 0; i < from.size(0); ++i) numbers.push_back(static_cast<double>(i % 2));
  const Tensor corner = from.narrow(1, 0, 2), sides = from.narrow(1, 2, 2);
  return cat({tensor(numbers, {from.size(0), 1}, {.dtype = from.dtype()}), corner, corner + sides}, 1);
}

}  // namespace

std::vector<OpCase> detection_cases() {
  using enum BoxIou;
  const auto aligned = [](const RoiAlignOptions& options) {
    return op("roi_align", {x({N, 5, 6, 7}), fixed({N, 4}, 0.5, 3)},
              [options](In in) { return roi_align(in[0], regions(in[1]), options); });
  };
  // Boxes of sides from 1 to 2 whose centres are within 1 of each other: they overlap, and no two edges are the same.
  const auto boxes = [](const char* name, BoxIou kind, bool differences) {
    return op(name, {x({N, 4}, 1, 2), x({N, 4}, 1, 2)},
              [name, kind](In in) {
                return std::string(name) == "box_iou"
                           ? box_iou(in[0], in[1], {.kind = kind, .format = BoxFormat::cxcywh})
                           : paired_box_iou(in[0], in[1], {.kind = kind, .format = BoxFormat::cxcywh});
              },
              // The result is float32. The weight of the aspect ratio in ciou has no gradient.
              {.sixteen_bits = false, .differences = differences});
  };
  return {
      aligned({.output_size = {2, 3}}),
      aligned({.output_size = {2}, .spatial_scale = 0.7, .sampling_ratio = 2, .aligned = true}),
      boxes("box_iou", iou, true),
      boxes("box_iou", giou, true),
      boxes("paired_box_iou", diou, true),
      boxes("paired_box_iou", ciou, false),
  };
}

}  // namespace halfstep::test
