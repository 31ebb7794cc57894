// SPDX-License-Identifier: Apache-2.0
// A detector on pictures of any size, with a network whose boxes are known: its last layer has no weights, only biases.
#include "halfstep/train/detector.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "halfstep/core/error.h"
#include "halfstep/ops/create.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using training::Detector;
using training::FoundObjects;

constexpr std::int64_t kClasses = 3, kValues = 5 + kClasses, kAnchors = 3;

double logit(double p) { return std::log(p / (1 - p)); }

struct Answer {
  double width, height;  // in pixels of the input
  std::int64_t label;
  double score;  // objectness, with a class probability of 1
};

// Each anchor of the coarsest level answers with one of these; the other levels and anchors with nothing. Its cells
// are of 32 pixels, and a box has the centre of its cell.
std::shared_ptr<const models::Yolov5> network_of(const std::vector<Answer>& answers) {
  auto network = std::make_shared<models::Yolov5>(models::yolov5n({.classes = kClasses}));
  const auto& head = network->head();
  const Tensor anchors = head.anchors[2].to(f32);
  for (std::int64_t level = 0; level < 3; ++level) {
    std::vector<double> bias(static_cast<std::size_t>(kAnchors * kValues), -30);
    for (std::int64_t a = 0; level == 2 && a < std::ssize(answers); ++a) {
      const Answer& answer = answers[static_cast<std::size_t>(a)];
      double* values = bias.data() + a * kValues;
      values[0] = values[1] = 0;
      // A side is (2 sigmoid)^2 of its anchor's.
      for (int side = 0; side < 2; ++side) {
        const double anchor = 32 * anchors[a][side].item<double>();
        values[2 + side] = logit(std::sqrt((side == 0 ? answer.width : answer.height) / anchor) / 2);
      }
      values[4] = logit(answer.score);
      values[5 + answer.label] = 30;
    }
    const auto name = std::to_string(level);
    head.m[static_cast<std::size_t>(level)].load_state_dict(
        {{"weight", zeros_like(head.m[static_cast<std::size_t>(level)].weight)},
         {"bias", tensor(bias, {kAnchors * kValues})}});
  }
  return network;
}

data::Image picture(std::int64_t width, std::int64_t height) {
  data::Image image;
  image.resize(width, height);
  return image;
}

// A picture of 64 x 32 becomes one of 32 x 16 with 8 rows of grey above and below it: one cell, whose centre is that
// of the picture.
TEST(Detectors, BoxesAreMappedBack) {
  const Detector detect(network_of({{8, 4, 2, 0.75}}), {.image_size = 32});
  const FoundObjects found = detect(picture(64, 32).view());
  EXPECT_EQ(found.height, 32);
  EXPECT_EQ(found.width, 32);
  EXPECT_TRUE(found.finite);
  ASSERT_EQ(found.objects.size(), 1u);
  const models::Detection& d = found.objects[0];
  EXPECT_EQ(d.label, 2);
  // Some ten roundings of float32 of numbers of up to 100.
  constexpr double kNear = 1e-3;
  EXPECT_NEAR(d.score, 0.75, 1e-5);
  EXPECT_NEAR(d.left, 32 - 8, kNear);
  EXPECT_NEAR(d.right, 32 + 8, kNear);
  EXPECT_NEAR(d.top, 16 - 4, kNear);
  EXPECT_NEAR(d.bottom, 16 + 4, kNear);
  EXPECT_GT(found.forward_ms, 0);
  // The other way round; what reaches beyond the picture is cut off: its shorter side is half of the input's.
  const FoundObjects upright = Detector(network_of({{24, 8, 0, 0.5}}), {.image_size = 32})(picture(32, 64).view());
  ASSERT_EQ(upright.objects.size(), 1u);
  EXPECT_EQ(upright.objects[0].left, 0);
  EXPECT_EQ(upright.objects[0].right, 32);
  EXPECT_NEAR(upright.objects[0].top, 32 - 8, kNear);
  EXPECT_NEAR(upright.objects[0].bottom, 32 + 8, kNear);
}

TEST(Detectors, SidesBecomeMultiplesOfTheStride) {
  const auto network = network_of({{8, 8, 1, 0.5}});
  struct Case {
    std::int64_t width, height, size, input_width, input_height;
  };
  for (const Case& c : {Case{640, 480, 640, 640, 480}, Case{640, 428, 320, 320, 224}, Case{10, 10, 64, 64, 64},
                        Case{1, 300, 100, 32, 128}, Case{500, 1, 32, 32, 32}, Case{31, 33, 33, 32, 64}}) {
    const FoundObjects found = Detector(network, {.image_size = c.size})(picture(c.width, c.height).view());
    EXPECT_EQ(found.width, c.input_width) << c.width;
    EXPECT_EQ(found.height, c.input_height) << c.height;
    for (const models::Detection& d : found.objects) {
      EXPECT_GE(d.left, 0);
      EXPECT_LE(d.right, static_cast<double>(c.width));
      EXPECT_GE(d.top, 0);
      EXPECT_LE(d.bottom, static_cast<double>(c.height));
    }
  }
}

TEST(Detectors, KeepWhatTheOptionsSay) {
  // Boxes of two classes that overlap by 0.75, and a small one of a third.
  const auto network = network_of({{16, 16, 0, 0.9}, {16, 12, 1, 0.8}, {4, 4, 2, 0.3}});
  const auto labels = [&](const training::DetectorOptions& options) {
    std::vector<std::int64_t> result;
    for (const auto& d : Detector(network, options)(picture(32, 32).view()).objects) result.push_back(d.label);
    return result;
  };
  using Labels = std::vector<std::int64_t>;
  EXPECT_EQ(labels({.image_size = 32}), (Labels{0, 1, 2}));
  EXPECT_EQ(labels({.image_size = 32, .detections = {.score = 0.5}}), (Labels{0, 1}));
  EXPECT_EQ(labels({.image_size = 32, .detections = {.agnostic = true}}), (Labels{0, 2}));
  EXPECT_EQ(labels({.image_size = 32, .detections = {.overlap = 0.8, .agnostic = true}}), (Labels{0, 1, 2}));
  EXPECT_EQ(labels({.image_size = 32, .classes = {2, 1}}), (Labels{1, 2}));
  EXPECT_EQ(labels({.image_size = 32, .detections = {.limit = 1}, .classes = {2}}), (Labels{2}))
      << "those of other classes take no place";
  EXPECT_EQ(labels({.image_size = 32, .detections = {.limit = 1}}), (Labels{0}));
  // In 16 bits the boxes are the same within their rounding.
  EXPECT_EQ(labels({.image_size = 32, .autocast = bf16}), (Labels{0, 1, 2}));
}

TEST(Detectors, SayWhatTheyCannotDo) {
  const auto network = network_of({{8, 8, 0, 0.5}});
  const auto refused = [&](const training::DetectorOptions& options) {
    return test::error_of<Error>([&] { Detector(network, options)(picture(32, 32).view()); });
  };
  EXPECT_NE(refused({.image_size = 0}).find("image size of 1 to 8192, got 0"), std::string::npos);
  EXPECT_NE(refused({.image_size = 1 << 20}).find("got 1048576"), std::string::npos);
  EXPECT_NE(refused({.classes = {3}}).find("classes from 0 to 2, got 3"), std::string::npos);
  EXPECT_NE(refused({.detections = {.score = 2}}), "");
  const auto& last = network->head().m[0];
  last.load_state_dict(
      {{"weight", last.weight}, {"bias", full({kAnchors * kValues}, std::numeric_limits<double>::quiet_NaN())}});
  EXPECT_FALSE(Detector(network, {.image_size = 32})(picture(32, 32).view()).finite);
}

}  // namespace
}  // namespace halfstep
