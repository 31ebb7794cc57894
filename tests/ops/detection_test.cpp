// SPDX-License-Identifier: Apache-2.0
// Ops of object detection against torchvision in float64; in float32 and 16 bits, in both layouts, on any number of
// threads; what they refuse.
#include "halfstep/ops/detection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/parallel.h"
#include "tests/support/errors.h"
#include "tests/support/golden_calls.h"

namespace halfstep {
namespace {

template <class E, class F>
void expect_error(F&& f, const char* text) {
  const std::string got = test::error_of<E>(f);
  EXPECT_NE(got.find(text), std::string::npos) << got;
}

Tensor floats(const std::vector<double>& values, const Shape& sizes) { return tensor(values, sizes); }

Tensor random_boxes(std::int64_t n, double size, DType dtype = f32) {
  const Tensor place = rand({n, 2}) * size;
  return cat({place, place + rand({n, 2}) * (size / 2) + 1}, 1).to(dtype);
}

TEST(Detection, MatchesTorchvision) {
  for (const char* op : {"box_iou", "paired_box_iou", "box_convert", "box_area", "clip_boxes_to_image", "nms",
                         "batched_nms", "roi_align", "scatter_amax"}) {
    SCOPED_TRACE(op);
    test::check_op_goldens(op, test::golden_calls().at(op), "detection.json");
  }
}

// (10, 10, 4, 6) covers [8, 12] x [7, 13], (11, 9, 5, 4) [8.5, 13.5] x [7, 11]: 14 of 24 + 20 - 14.
TEST(BoxIou, HasTheValuesOfTheFormula) {
  const Tensor a = floats({10, 10, 4, 6}, {1, 4}), b = floats({11, 9, 5, 4}, {1, 4});
  const auto overlap = [&](BoxIou kind) {
    return paired_box_iou(a, b, {.kind = kind, .format = BoxFormat::cxcywh}).item<double>();
  };
  // A few roundings of float32.
  EXPECT_NEAR(overlap(BoxIou::iou), 14.0 / 30, 4e-7);
  // The enclosing box is 5.5 x 6.
  EXPECT_NEAR(overlap(BoxIou::giou), 14.0 / 30 - 3.0 / 33, 4e-7);
  EXPECT_NEAR(overlap(BoxIou::diou), 14.0 / 30 - 2 / (5.5 * 5.5 + 36), 4e-7);
  const double pi = std::acos(-1.0), iou = 14.0 / 30;
  const double v = 4 / (pi * pi) * std::pow(std::atan(5.0 / 4) - std::atan(4.0 / 6), 2);
  EXPECT_NEAR(overlap(BoxIou::ciou), iou - 2 / (5.5 * 5.5 + 36) - v * v / (1 - iou + v), 4e-7);
}

TEST(BoxIou, OfBoxesWithoutAnAreaHasAGradient) {
  for (const BoxIou kind : {BoxIou::iou, BoxIou::giou, BoxIou::diou, BoxIou::ciou}) {
    const Tensor a = floats({1, 1, 1, 1, 2, 2, 2, 5}, {2, 4}).requires_grad_();
    const Tensor b = floats({1, 1, 1, 1, 2, 3, 4, 5}, {2, 4});
    sum(paired_box_iou(a, b, {.kind = kind})).backward();
    for (const double v : a.grad().to_vector<double>()) EXPECT_TRUE(std::isfinite(v)) << static_cast<int>(kind);
  }
}

TEST(BoxIou, IsFloat32For16BitBoxes) {
  manual_seed(3);
  for (const DType dtype : {f16, bf16}) {
    // Areas of up to 300 x 300 are beyond f16's 65504.
    const Tensor a = random_boxes(4, 600, dtype), b = random_boxes(3, 600, dtype);
    const Tensor got = box_iou(a, b);
    EXPECT_EQ(got.dtype(), f32);
    EXPECT_EQ(got.to_vector<float>(), box_iou(a.to(f32), b.to(f32)).to_vector<float>());
    EXPECT_EQ(box_area(a).to_vector<float>(), box_area(a.to(f32)).to_vector<float>());
    const amp::Autocast region{{.dtype = dtype}};
    EXPECT_EQ(paired_box_iou(a.to(f32), a.to(f32)).dtype(), f32);
  }
}

// By definition, from the best box on: the overlaps of box_iou, which torchvision holds.
std::vector<std::int64_t> by_definition(const Tensor& boxes, const std::vector<float>& scores,
                                        const std::vector<std::int64_t>& classes, double threshold) {
  const auto n = scores.size();
  const std::vector<float> overlaps = box_iou(boxes, boxes).to_vector<float>();
  std::vector<std::size_t> order(n);
  for (std::size_t i = 0; i < n; ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t p, std::size_t q) { return scores[p] > scores[q]; });
  std::vector<std::int64_t> kept;
  for (const std::size_t i : order) {
    bool good = true;
    for (const std::int64_t k : kept) {
      const auto other = static_cast<std::size_t>(k);
      good = good && (classes[i] != classes[other] || !(overlaps[other * n + i] > threshold));
    }
    if (good) kept.push_back(static_cast<std::int64_t>(i));
  }
  return kept;
}

TEST(Nms, KeepsWhatTheDefinitionKeeps) {
  manual_seed(4);
  for (const std::int64_t n : {1, 2, 17, 400}) {
    for (const std::int64_t classes : {1, 7}) {
      const Tensor boxes = random_boxes(n, 50), scores = rand({n}), group = randint(0, classes, {n});
      const auto all = by_definition(boxes, scores.to_vector<float>(), group.to_vector<std::int64_t>(), 0.3);
      EXPECT_EQ(batched_nms(boxes, scores, group, {.iou_threshold = 0.3}).to_vector<std::int64_t>(), all);
      // The best three; and views of a larger tensor.
      const auto first =
          std::vector<std::int64_t>(all.begin(), all.begin() + std::min<std::ptrdiff_t>(3, std::ssize(all)));
      const Tensor wide = cat({boxes, scores.unsqueeze(1)}, 1);
      const Tensor kept =
          batched_nms(wide.narrow(1, 0, 4), wide.select(1, 4), group, {.iou_threshold = 0.3, .limit = 3});
      EXPECT_EQ(kept.to_vector<std::int64_t>(), first);
    }
  }
}

TEST(Nms, KeepsTheOrderOfEqualScores) {
  const Tensor boxes = floats({0, 0, 2, 2, 9, 9, 11, 11, 0, 0, 2, 2, 5, 5, 6, 6}, {4, 4});
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(nms(boxes, floats({1, 1, 1, 1}, {4})).to_vector<std::int64_t>(), (std::vector<std::int64_t>{0, 1, 3}));
  EXPECT_EQ(nms(boxes, floats({1, 1, nan, 2}, {4})).to_vector<std::int64_t>(), (std::vector<std::int64_t>{2, 3, 1}));
  EXPECT_EQ(nms(boxes, floats({1, 1, 1, 1}, {4}), {.limit = 0}).numel(), 0);
  EXPECT_EQ(nms(boxes.to(f16), floats({1, 2, 3, 4}, {4}).to(f16)).to_vector<std::int64_t>(),
            (std::vector<std::int64_t>{3, 2, 1}));
}

TEST(RoiAlign, AgreesWithFloat64InEveryLayoutAndDtype) {
  manual_seed(5);
  const Tensor boxes = cat({floats({0, 1, 1, 0}, {4, 1}), random_boxes(4, 5)}, 1);
  for (const std::int64_t channels : {1, 3, 40}) {
    const Tensor x = rand({2, channels, 9, 8}) - 0.5;
    for (const RoiAlignOptions& options : {RoiAlignOptions{.output_size = {3, 2}},
                                           RoiAlignOptions{.output_size = {4}, .sampling_ratio = 2, .aligned = true}}) {
      for (const DType dtype : {f32, f16, bf16}) {
        for (const MemoryFormat format : {MemoryFormat::contiguous, MemoryFormat::channels_last}) {
          const Tensor image = x.to(dtype).contiguous(format).requires_grad_();
          const Tensor wide = image.detach().to(f64).requires_grad_();
          const Tensor got = roi_align(image, boxes.to(dtype), options);
          const Tensor exact = roi_align(wide, boxes.to(dtype).to(f64), options);
          EXPECT_EQ(got.dtype(), dtype);
          EXPECT_EQ(got.is_contiguous(format), true);
          // One rounding of the result; inside, float32 of places below 10 (four digits of a sample's share) and sums
          // of at most 16 x 4 terms of up to 0.5.
          const double u = dtype == f16 ? 0x1p-11 : dtype == bf16 ? 0x1p-8 : 0x1p-24;
          const auto close = [&](const Tensor& a, const Tensor& b, double roundings) {
            const auto p = a.to_vector<double>(), q = b.to_vector<double>();
            double largest = 0;
            for (const double v : q) largest = std::max(largest, std::abs(v));
            for (std::size_t i = 0; i < p.size(); ++i) {
              ASSERT_NEAR(p[i], q[i], roundings * u * std::abs(q[i]) + 128 * 0x1p-24 * std::max(largest, 0.5));
            }
          };
          close(got.detach(), exact.detach(), 1);
          const Tensor g = (rand(got.sizes()) + 0.5).to(dtype);
          close(grad({got}, {image}, {.grad_outputs = {g}})[0], grad({exact}, {wide}, {.grad_outputs = {g.to(f64)}})[0],
                1);
        }
      }
    }
  }
}

TEST(RoiAlign, HasTheSameBitsOnAnyNumberOfThreads) {
  manual_seed(6);
  const Tensor boxes = cat({zeros({30, 1}), random_boxes(30, 20)}, 1);
  const Tensor x = rand({1, 64, 24, 24}).requires_grad_(), g = rand({30, 64, 7, 7});
  const int before = num_threads();
  std::vector<float> first;
  for (const int threads : {1, 2, 5}) {
    set_num_threads(threads);
    const Tensor dx = grad({roi_align(x, boxes, {.output_size = {7}})}, {x}, {.grad_outputs = {g}})[0];
    if (first.empty()) first = dx.to_vector<float>();
    EXPECT_EQ(dx.to_vector<float>(), first);
  }
  set_num_threads(before);
}

TEST(RoiAlign, OfBoxesWithoutBoundsEnds) {
  const float inf = std::numeric_limits<float>::infinity();
  const Tensor x = ones({1, 1, 4, 4});
  const auto at = [&](float left, float right) {
    return roi_align(x, floats({0, left, 0, right, 4}, {1, 5}), {.output_size = {1}}).item<double>();
  };
  EXPECT_TRUE(std::isnan(at(0, inf)));
  EXPECT_TRUE(std::isnan(at(std::numeric_limits<float>::quiet_NaN(), 2)));
  // 2^20 samples in a row, of which those at 0.5 to 3.5 see the picture.
  EXPECT_NEAR(at(0, 1048576), 4.0 / 1048576, 1e-9);
  EXPECT_EQ(at(2000000, 3000000), 0);
  EXPECT_EQ(at(3, 2), 1);  // at least one place wide
}

TEST(Detection, NamesWhatItRefuses) {
  const Tensor boxes = random_boxes(3, 9), scores = rand({3});
  expect_error<ShapeError>([&] { box_iou(scores, boxes); }, "box_iou: expected boxes a [N, 4], got [3]");
  expect_error<ShapeError>(
      [&] {
        box_convert(rand({2, 5}), BoxFormat::xyxy, BoxFormat::xywh);
      },
      "box_convert: expected boxes [..., 4], got [2, 5]");
  expect_error<ShapeError>([&] { nms(boxes, rand({2})); }, "nms: expected a score for each of 3 boxes, got 2");
  expect_error<Error>([&] { nms(boxes, scores, {.iou_threshold = 1.5}); },
                      "nms: expected an iou_threshold from 0 to 1, got 1.5");
  expect_error<DTypeError>([&] { batched_nms(boxes, scores, scores); },
                           "batched_nms: expected classes of int64, got f32");
  expect_error<ShapeError>(
      [&] {
        roi_align(rand({2, 3, 4}), boxes, {});
      },
      "roi_align: expected an input [N, C, H, W], got [2, 3, 4]");
  expect_error<Error>(
      [&] {
        roi_align(rand({1, 1, 4, 4}), floats({1, 0, 0, 2, 2}, {1, 5}), {});
      },
      "a box has the number of a picture that isn't in the input");
}

}  // namespace
}  // namespace halfstep
