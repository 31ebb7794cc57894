// SPDX-License-Identifier: Apache-2.0
// Pictures with boxes: the pixels of frames and labels, at the edges too.
#include "halfstep/train/detection_pictures.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <set>

#include "halfstep/core/error.h"
#include "halfstep/data/image.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/view.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using training::ShownBox;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

io::Bitmap black(std::int64_t width, std::int64_t height) {
  return {.width = width,
          .height = height,
          .pixels = std::vector<std::uint8_t>(static_cast<std::size_t>(3 * width * height))};
}

data::Image pixels_of(const io::Drawing& drawing) {
  const std::string png = drawing.png(1);
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(png.data());
  return data::decode_image({bytes, png.size()}, "drawing.png");
}

bool is(const data::Image& image, std::int64_t x, std::int64_t y, io::Color color) {
  const std::uint8_t* at = image.row(y) + 3 * x;
  return at[0] == color.red && at[1] == color.green && at[2] == color.blue;
}

struct Rect {
  double x = 0, y = 0, width = 0, height = 0;
};
// The filled boxes of an SVG but its white sheet: the labels' backgrounds.
std::vector<Rect> labels_of(const std::string& svg) {
  std::vector<Rect> found;
  for (std::size_t at = svg.find("<rect "); at != std::string::npos; at = svg.find("<rect ", at + 1)) {
    Rect r;
    std::array<char, 8> color{};
    EXPECT_EQ(std::sscanf(svg.c_str() + at, "<rect x=\"%lf\" y=\"%lf\" width=\"%lf\" height=\"%lf\" fill=\"%7s", &r.x,
                          &r.y, &r.width, &r.height, color.data()),
              5);
    if (std::string_view(color.data()) != "#ffffff") found.push_back(r);
  }
  return found;
}

TEST(ClassColors, TheFirstEightyDifferAndNeighboursAreFarApart) {
  const auto distance = [](io::Color a, io::Color b) {
    return std::max({std::abs(a.red - b.red), std::abs(a.green - b.green), std::abs(a.blue - b.blue)});
  };
  for (int i = 0; i < 80; ++i) {
    for (int j = 0; j < i; ++j) EXPECT_GE(distance(training::class_color(i), training::class_color(j)), 20) << i << j;
    EXPECT_GE(distance(training::class_color(i), training::class_color(i + 1)), 100) << i;
  }
  training::class_color(-1);
  training::class_color(std::numeric_limits<std::int64_t>::max());
}

TEST(PicturesWithBoxes, FramesAreInTheColoursOfTheirClasses) {
  const std::vector<ShownBox> boxes = {{.label = 0, .left = 20, .top = 30, .right = 80, .bottom = 90},
                                       {.label = 1, .left = 100, .top = 50, .right = 180, .bottom = 120, .score = 0.5}};
  const io::Drawing drawing = draw_detections(black(200, 150), boxes, {"cat", "dog"}, {.line_width = 2});
  const data::Image image = pixels_of(drawing);
  ASSERT_EQ(image.width, 200);
  ASSERT_EQ(image.height, 150);
  // A line of 2 pixels covers those on both sides of the box's edge.
  for (const std::int64_t x : {19, 20, 79, 80}) EXPECT_TRUE(is(image, x, 60, training::class_color(0))) << x;
  for (const std::int64_t y : {29, 30, 89, 90}) EXPECT_TRUE(is(image, 50, y, training::class_color(0))) << y;
  for (const std::int64_t x : {99, 100, 179, 180}) EXPECT_TRUE(is(image, x, 85, training::class_color(1))) << x;
  for (const std::int64_t x : {18, 21, 78, 81, 98, 101}) EXPECT_TRUE(is(image, x, 85, {0, 0, 0})) << x;
  EXPECT_TRUE(is(image, 50, 60, {0, 0, 0})) << "inside nothing is drawn";
  // One of 1 pixel covers a whole one, too.
  const data::Image thin = pixels_of(draw_detections(black(200, 150), boxes, {}, {.line_width = 1}));
  for (const std::int64_t x : {20, 80}) EXPECT_TRUE(is(thin, x, 60, training::class_color(0))) << x;
  for (const std::int64_t x : {19, 21, 79, 81}) EXPECT_TRUE(is(thin, x, 60, {0, 0, 0})) << x;
  const std::string svg = drawing.svg();
  EXPECT_NE(svg.find(">cat</text>"), std::string::npos) << "no score where there is none";
  EXPECT_NE(svg.find(">dog 0.50</text>"), std::string::npos);
  EXPECT_EQ(draw_detections(black(200, 150), boxes, {"cat", "dog"}, {.labels = false}).svg().find("<text"),
            std::string::npos);
  EXPECT_NE(draw_detections(black(200, 150), boxes, {}, {.scores = false}).svg().find(">1</text>"), std::string::npos);
  // Larger pictures have wider lines.
  EXPECT_NE(draw_detections(black(2000, 2000), boxes, {}).svg().find("stroke-width=\"7\""), std::string::npos);
  EXPECT_NE(draw_detections(black(64, 48), boxes, {}).svg().find("stroke-width=\"1\""), std::string::npos);
}

// What isn't black has to be in a label or on a frame: text beyond its label would be cut or hide something.
void expect_in_labels(const io::Drawing& drawing, double line) {
  const data::Image image = pixels_of(drawing);
  const std::string svg = drawing.svg();
  const std::vector<Rect> labels = labels_of(svg);
  std::vector<Rect> frames;
  for (std::size_t at = svg.find("<polygon "); at != std::string::npos; at = svg.find("<polygon ", at + 1)) {
    double left = 0, top = 0, right = 0, bottom = 0, skipped = 0;
    ASSERT_EQ(std::sscanf(svg.c_str() + at, "<polygon points=\"%lf,%lf %lf,%lf %lf,%lf", &left, &top, &right, &skipped,
                          &skipped, &bottom),
              6);
    frames.push_back({left, top, right - left, bottom - top});
  }
  for (const Rect& r : labels) {
    EXPECT_GE(r.x, 0);
    EXPECT_GE(r.y, 0);
    EXPECT_LE(r.x + r.width, static_cast<double>(image.width) + 0.01);
    EXPECT_LE(r.y + r.height, static_cast<double>(image.height) + 0.01);
  }
  const auto inside = [](const Rect& r, double x, double y, double by) {
    return x > r.x - by && x < r.x + r.width + by && y > r.y - by && y < r.y + r.height + by;
  };
  int outside = 0;
  for (std::int64_t y = 0; y < image.height; ++y) {
    for (std::int64_t x = 0; x < image.width; ++x) {
      if (is(image, x, y, {0, 0, 0})) continue;
      const double middle_x = static_cast<double>(x) + 0.5, middle_y = static_cast<double>(y) + 0.5;
      const auto explains = [&](const Rect& r) { return inside(r, middle_x, middle_y, 1); };
      const auto on_frame = [&](const Rect& r) {
        return inside(r, middle_x, middle_y, line / 2 + 1) && !inside(r, middle_x, middle_y, -line / 2 - 1);
      };
      if (std::none_of(labels.begin(), labels.end(), explains) &&
          std::none_of(frames.begin(), frames.end(), on_frame)) {
        ++outside;
      }
    }
  }
  EXPECT_EQ(outside, 0);
}

TEST(PicturesWithBoxes, LabelsStayInsideAtTheEdges) {
  const std::vector<std::string> names = {"a", "wine glass", "WWWWWW MMMM", "iIl.,;:|", "\xd0\x9a\xd0\xbe\xd1\x88"};
  for (const auto& [width, height] : {std::pair{240, 160}, {90, 60}, {60, 300}}) {
    for (std::int64_t label = 0; label < 6; ++label) {
      const auto w = static_cast<double>(width), h = static_cast<double>(height);
      const std::vector<std::vector<ShownBox>> corners = {
          {{label, 0, 0, 20, 20, 0.99}},         {{label, w - 20, 0, w, 20, 0.99}},
          {{label, 0, h - 20, 20, h, 0.99}},     {{label, w - 20, h - 20, w, h, 0.99}},
          {{label, 0, 0, w, h, 0.99}},           {{label, -50, -50, w + 50, h + 50, 0.99}},
          {{label, w / 2, 3, w / 2 + 5, 8, 1.0}}};
      for (const auto& boxes : corners) {
        const io::Drawing drawing = draw_detections(black(width, height), boxes, names, {.line_width = 2});
        EXPECT_EQ(labels_of(drawing.svg()).size(), 1u);
        expect_in_labels(drawing, 2);
      }
    }
  }
  // Too narrow for any text, and of one pixel.
  const std::vector<ShownBox> box = {{.label = 1, .left = 0, .top = 0, .right = 12, .bottom = 100, .score = 0.5}};
  EXPECT_TRUE(labels_of(draw_detections(black(12, 100), box, names).svg()).empty());
  EXPECT_EQ(pixels_of(draw_detections(black(1, 1), box, names)).width, 1);
}

TEST(PicturesWithBoxes, LabelsOfNeighboursDoNotCoverEachOther) {
  std::vector<ShownBox> boxes;
  for (int i = 0; i < 4; ++i) boxes.push_back({.label = i, .left = 100.0 + i, .top = 100, .right = 200, .bottom = 180});
  const std::vector<Rect> labels =
      labels_of(draw_detections(black(400, 300), boxes, {"cat", "dog", "cow", "ox"}).svg());
  ASSERT_EQ(labels.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const bool apart = labels[i].x >= labels[j].x + labels[j].width || labels[j].x >= labels[i].x + labels[i].width ||
                         labels[i].y >= labels[j].y + labels[j].height || labels[j].y >= labels[i].y + labels[i].height;
      EXPECT_TRUE(apart) << i << " " << j;
    }
  }
}

TEST(PicturesWithBoxes, BoxesOutsideOrWithoutNumbersAreNotDrawn) {
  const double far = std::numeric_limits<double>::infinity();
  const std::vector<ShownBox> boxes = {{0, 300, 10, 320, 20}, {0, -30, 10, -5, 20},       {0, 10, kNan, 20, 30},
                                       {0, 50, 50, 20, 60},   {0, -far, -far, -far, far}, {0, far, 0, far, 5}};
  const std::string svg = draw_detections(black(100, 100), boxes, {"cat"}).svg();
  EXPECT_EQ(svg.find("<polygon"), std::string::npos) << svg.substr(svg.find("<polygon"));
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  // One without a width is a line, one larger than the picture its rim.
  const std::string drawn = training::draw_detections(black(100, 100), {{0, 50, 20, 50, 80}, {0, -far, -far, far, far}},
                                                      {"cat"}, {.line_width = 2})
                                .svg();
  EXPECT_NE(drawn.find("points=\"50,20 50,20 50,80 50,80\""), std::string::npos);
  EXPECT_NE(drawn.find("points=\"1,1 99,1 99,99 1,99\""), std::string::npos);
  EXPECT_THROW(training::draw_detections({.width = 2, .height = 2, .pixels = {1}}, {}, {}), Error);
}

TEST(PicturesWithBoxes, TheSurestIsOnTop) {
  const std::vector<ShownBox> boxes = {{0, 10, 40, 60, 90, 0.9}, {1, 10, 40, 60, 90, 0.3}};
  const data::Image image = pixels_of(draw_detections(black(100, 100), boxes, {"cat", "dog"}, {.line_width = 2}));
  EXPECT_TRUE(is(image, 60, 70, training::class_color(0)));
}

TEST(TrainBatches, BoxesAreFractionsOfTheInput) {
  Tensor input = zeros({2, 3, 40, 80});
  input[0][1].fill_(1);
  Tensor target = full({2, 8, 5}, -1);
  const Tensor row = tensor({2.0, 0.5, 0.5, 0.25, 0.25}, {5});
  target[1][3].copy_(row);
  for (const DType dtype : {f32, f16, bf16}) {
    const Tensor made = to_channels_last(input).to(dtype);
    const auto boxes = training::batch_boxes(made, target, 1);
    ASSERT_EQ(boxes.size(), 1u);
    EXPECT_EQ(boxes[0].label, 2);
    // Centre (40, 20), sides 20 and 10.
    EXPECT_DOUBLE_EQ(boxes[0].left, 30);
    EXPECT_DOUBLE_EQ(boxes[0].top, 15);
    EXPECT_DOUBLE_EQ(boxes[0].right, 50);
    EXPECT_DOUBLE_EQ(boxes[0].bottom, 25);
    EXPECT_TRUE(training::batch_boxes(made, target, 0).empty());
    const io::Bitmap green = training::batch_picture(made, 0);
    EXPECT_EQ((std::vector<int>{green.pixels[0], green.pixels[1], green.pixels[2]}), (std::vector<int>{0, 255, 0}));
    const io::Drawing drawing = training::draw_train_batch(made, target, {"a", "b", "<c>"}, "epoch 1");
    const std::string svg = drawing.svg();
    EXPECT_NE(svg.find(">&lt;c&gt;</text>"), std::string::npos);
    EXPECT_NE(svg.find(">1 object</text>"), std::string::npos);
    EXPECT_NE(svg.find(">0 objects</text>"), std::string::npos);
    EXPECT_NE(svg.find(">a batch in training</text>"), std::string::npos);
  }
  EXPECT_NE(training::draw_train_batch(zeros({20, 3, 32, 32}), full({20, 8, 5}, -1), {}, "t")
                .svg()
                .find(">the first 16 of 20 pictures of a batch in training</text>"),
            std::string::npos);
  const auto refused = [](const Tensor& images, const Tensor& boxes) {
    return test::error_of<ShapeError>([&] { training::draw_train_batch(images, boxes, {}, "t"); });
  };
  EXPECT_NE(refused(input, zeros({2, 8, 6})).find("targets [N, M, 5]"), std::string::npos);
  EXPECT_NE(refused(input, zeros({3, 8, 5})).find("targets [N, M, 5]"), std::string::npos);
  EXPECT_NE(refused(zeros({2, 784}), target).find("targets [N, M, 5]"), std::string::npos);
  EXPECT_NE(refused(zeros({2, 4, 8, 8}), target).find("samples of 3 x 8 x 8"), std::string::npos);
  EXPECT_THROW(training::batch_boxes(input, target, 2), ShapeError);
}

TEST(ComparedPictures, HaveTheTruthOnTheLeft) {
  std::vector<training::ComparedPicture> pictures;
  for (int i = 0; i < 20; ++i) {
    pictures.push_back({.picture = black(64, 32 + i),
                        .truth = {{0, 10, 10, 30, 30}},
                        .found = {{1, 30, 10, 50, 30, 0.75}, {1, 0, 0, 5, 5, 0.25}},
                        .name = "picture-" + std::to_string(i) + ".jpg"});
  }
  const std::string svg = training::draw_compared(pictures, {"cat", "dog"}, "a run").svg();
  const auto count = [&](const std::string& part) {
    int n = 0;
    for (std::size_t at = svg.find(part); at != std::string::npos; at = svg.find(part, at + 1)) ++n;
    return n;
  };
  EXPECT_EQ(count("<image "), 2 * 12);
  EXPECT_EQ(count(">cat</text>"), 12);
  EXPECT_EQ(count(">dog 0.75</text>"), 12);
  EXPECT_EQ(count(">1 object, 2 found</text>"), 12);
  EXPECT_EQ(count(">picture-11.jpg</text>"), 1);
  EXPECT_EQ(count(">picture-12.jpg</text>"), 0);
  EXPECT_LT(svg.find(">cat</text>"), svg.find(">dog 0.75</text>"));
  EXPECT_FALSE(training::draw_compared({}, {}, "none").png(1).empty());
}

}  // namespace
}  // namespace halfstep
