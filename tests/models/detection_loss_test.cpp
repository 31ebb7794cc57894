// SPDX-License-Identifier: Apache-2.0
// The loss of a detector against the same one written object by object in PyTorch; its order, precision and replays.
#include "halfstep/models/detection_loss.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "halfstep/amp/autocast.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/random.h"
#include "tests/models/peer_numbers.h"
#include "tests/support/errors.h"
#include "tests/support/golden.h"

namespace halfstep {
namespace {

using models::detection_loss;
using models::DetectionHead;
using models::DetectorLevels;

DetectionHead head_of(std::int64_t classes) { return models::yolov5n({.classes = classes}).head(); }

// As make_detection.py's, of pictures of 64 x 96 pixels.
DetectorLevels levels_of(DType dtype) {
  DetectorLevels result;
  for (const std::uint32_t stride : {8U, 16U, 32U}) {
    const Tensor y = test::peer_images(2000 + stride, {2, 3, 64 / stride, 96 / stride, 8}, f64) * 2;
    result.push_back(y.to(dtype).requires_grad_());
  }
  return result;
}

Tensor objects_of(const test::GoldenEntry& e) {
  return tensor(e.inputs[0].data, Shape(e.inputs[0].shape), {.dtype = f64});
}

// Both sides round in float64 in other orders, in sums of up to some thousand terms.
TEST(DetectionLoss, IsTheOneWrittenObjectByObject) {
  const DetectionHead head = head_of(3);
  int run = 0;
  for (const test::GoldenEntry& e : test::read_goldens("detection.json")) {
    if (e.op != "detection_loss") continue;
    SCOPED_TRACE(e.name);
    ++run;
    const DetectorLevels levels = levels_of(f64);
    const auto got = detection_loss(levels, objects_of(e), head,
                                    {.anchor_ratio = e.real("ratio", 4),
                                     .label_smoothing = e.real("smoothing", 0),
                                     .focal_gamma = e.real("gamma", 0)});
    const Tensor parts[] = {got.loss, got.box, got.objectness, got.classes, got.matches};
    // The anchors of the head are float32's, of numbers that it holds exactly or within 2^-24.
    for (std::size_t i = 0; i < 5; ++i) {
      EXPECT_NEAR(parts[i].item<double>(), e.outputs[i].data[0], 1e-7 * std::abs(e.outputs[i].data[0])) << i;
    }
    got.loss.backward();
    for (std::size_t l = 0; l < 3; ++l) {
      const auto g = levels[l].grad().to_vector<double>();
      const std::vector<double>& expected = e.tensor("gradient" + std::to_string(l)).data;
      double sum = 0, size = 0, largest = 0;
      for (const double v : g) sum += v, size += std::abs(v), largest = std::max(largest, std::abs(v));
      std::size_t k = 0;
      for (std::size_t i = 0; i < g.size(); i += 97) EXPECT_NEAR(g[i], expected[k++], 1e-6 * largest) << l << ' ' << i;
      EXPECT_NEAR(sum, expected[k], 1e-6 * size);
      EXPECT_NEAR(size, expected[k + 1], 1e-6 * size);
    }
  }
  EXPECT_EQ(run, 4);
}

TEST(DetectionLoss, DoesNotDependOnTheOrderOfObjects) {
  const DetectionHead head = head_of(3);
  for (const test::GoldenEntry& e : test::read_goldens("detection.json")) {
    if (e.name != "loss/plain") continue;
    const Tensor objects = objects_of(e);
    const Tensor turned = index_select(objects, 1, tensor(std::vector<std::int64_t>{3, 4, 1, 0, 2}, {5}));
    const DetectorLevels levels = levels_of(f64);
    const auto a = detection_loss(levels, objects, head), b = detection_loss(levels, turned, head);
    // Objectness is of maxima; the means of matches are added up in another order.
    EXPECT_EQ(a.objectness.item<double>(), b.objectness.item<double>());
    EXPECT_NEAR(a.loss.item<double>(), b.loss.item<double>(), 1e-14);
    EXPECT_EQ(a.matches.item<double>(), b.matches.item<double>());
  }
}

TEST(DetectionLoss, OfNoObjectsIsObjectnessAlone) {
  const DetectionHead head = head_of(3);
  for (const Shape& sizes : {Shape{2, 0, 5}, Shape{2, 4, 5}}) {
    const DetectorLevels levels = levels_of(f32);
    const auto got = detection_loss(levels, full(sizes, -1.0), head);
    EXPECT_EQ(got.matches.item<float>(), 0);
    EXPECT_EQ(got.box.item<float>(), 0);
    EXPECT_EQ(got.classes.item<float>(), 0);
    EXPECT_EQ(got.loss.item<float>(), got.objectness.item<float>());
    got.loss.backward();
    for (const Tensor& y : levels) {
      for (const double v : y.grad().to_vector<double>()) ASSERT_TRUE(std::isfinite(v));
    }
  }
}

TEST(DetectionLoss, IsFloat32UnderAutocast) {
  const DetectionHead head = head_of(3);
  manual_seed(8);
  const Tensor objects = rand({2, 6, 5}) * 0.8 + 0.1;
  for (const DType dtype : {f16, bf16}) {
    const DetectorLevels low = levels_of(dtype);
    DetectorLevels wide;
    for (const Tensor& y : low) wide.push_back(y.detach().to(f32));
    const amp::Autocast region{{.dtype = dtype}};
    const auto got = detection_loss(low, objects, head);
    EXPECT_EQ(got.loss.dtype(), f32);
    EXPECT_EQ(got.loss.item<float>(), detection_loss(wide, objects, head).loss.item<float>());
  }
}

TEST(DetectionLoss, NamesWhatItRefuses) {
  const DetectionHead head = head_of(3);
  const DetectorLevels levels = levels_of(f32);
  EXPECT_EQ(test::error_of<ShapeError>([&] {
              detection_loss(levels, zeros({3, 4, 5}), head);
            }),
            "detection_loss: expected objects [2, M, 5], got [3, 4, 5]");
  EXPECT_EQ(test::error_of<Error>([&] {
              detection_loss({levels[0]}, zeros({2, 4, 5}), head);
            }),
            "detection_loss: expected 3 levels, got 1");
  EXPECT_EQ(test::error_of<Error>([&] {
              detection_loss(levels, zeros({2, 4, 5}), head, {.anchor_ratio = 1});
            }),
            "detection_loss: expected an anchor_ratio above 1, a label_smoothing of at least 0 and below 1 and a "
            "focal_gamma of at least 0, got 1, 0 and 0");
}

}  // namespace
}  // namespace halfstep
