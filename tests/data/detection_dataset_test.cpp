// SPDX-License-Identifier: Apache-2.0
// DetectionDataset without augmentation: letterbox, rectangular batches, what a batch holds, caches.
#include "halfstep/data/detection_dataset.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <set>

#include "halfstep/core/error.h"
#include "halfstep/data/detection_description.h"
#include "halfstep/data/loader.h"
#include "halfstep/runtime/log.h"
#include "tests/data/detection_files.h"
#include "tests/support/test_data.h"

namespace halfstep::data {
namespace {

namespace fs = std::filesystem;
using test::expect_error;
using test::TemporaryDir;
using test::write_grey;
using test::write_png;
using Colour = std::array<std::uint8_t, 3>;

constexpr Colour kGround = {40, 80, 120};
constexpr Colour kMark = {250, 10, 30};

DetectionTransform eval_transform(std::int64_t size) {
  DetectionTransform t;
  t.train = false;
  t.size = size;
  return t;
}

Batch batch_of(const DetectionDataset& dataset, std::vector<std::int64_t> indices) {
  return dataset.batch({.indices = indices});
}

/// The value of a channel at a pixel of an input, in units of 1/255.
float pixel(const Batch& batch, std::int64_t n, std::int64_t c, std::int64_t y, std::int64_t x) {
  return batch.input[n][c][y][x].item<float>() * 255;
}

TEST(Letterbox, HasTheNumbersOfTheFormula) {
  // 640x480 at 320 in 320x320: half the size, 240 rows, 40 above and below.
  const Letterbox half = letterbox(640, 480, 320, 320, 320);
  EXPECT_EQ(half.scale, 0.5);
  EXPECT_EQ(half.width, 320);
  EXPECT_EQ(half.height, 240);
  EXPECT_EQ(half.left, 0);
  EXPECT_EQ(half.top, 40);
  // 427x640: r = 1, width 427, pad 213 = 106 + 107.
  const Letterbox tall = letterbox(427, 640, 640, 640, 640);
  EXPECT_EQ(tall.width, 427);
  EXPECT_EQ(tall.left, 106);
  EXPECT_EQ(tall.top, 0);
  // Small pictures are enlarged, or not.
  EXPECT_EQ(letterbox(100, 50, 320, 320, 320).width, 320);
  const Letterbox small = letterbox(100, 50, 320, 320, 320, false);
  EXPECT_EQ(small.scale, 1);
  EXPECT_EQ(small.left, 110);
  EXPECT_EQ(small.top, 135);
  // A shape that the picture would not fit into makes it smaller still.
  EXPECT_EQ(letterbox(640, 480, 640, 640, 320).scale, 320.0 / 480);
  // A line keeps a pixel.
  EXPECT_EQ(letterbox(1000, 1, 320, 320, 320).height, 1);
  EXPECT_THROW((void)letterbox(0, 1, 320, 320, 320), Error);
}

TEST(RectangularBatches, HaveTheLeastShapes) {
  DetectionTransform t = eval_transform(640);
  t.rectangular = true;
  // Heights and widths, of ratios 1.5, 0.5, 0.75, 0.6, 1, 2.
  const std::vector<std::array<std::int64_t, 2>> sizes = {{600, 400}, {320, 640}, {480, 640},
                                                          {384, 640}, {500, 500}, {640, 320}};
  const RectangularBatches batches = rectangular_batches(sizes, 2, t);
  EXPECT_EQ(batches.order, (std::vector<std::int64_t>{1, 3, 2, 4, 0, 5}));
  // ceil(640 * 0.6 / 32 + 0.5) = 13 strides by ceil(20.5) = 21; the middle ones need both sides;
  // the last 1 / 1.5: ceil(13.33 + 0.5) = 14.
  EXPECT_EQ(batches.shapes,
            (std::vector<std::array<std::int64_t, 2>>{{13 * 32, 21 * 32}, {21 * 32, 21 * 32}, {21 * 32, 14 * 32}}));
  t.pad = 0;
  EXPECT_EQ(rectangular_batches(sizes, 4, t).shapes,
            (std::vector<std::array<std::int64_t, 2>>{{640, 640}, {640, 448}}));
}

/// Two pictures with a rectangle each, and labels.
DetectionData two_pictures(const fs::path& root) {
  // The rectangle's box in the first: x 16 to 48 of 64, y 8 to 24 of 32.
  write_png(root / "a.png", test::with_rectangle(64, 32, kGround, kMark, {16, 8, 32, 16}));
  write_png(root / "b.png", test::with_rectangle(40, 80, kGround, kMark, {0, 60, 20, 20}));
  DetectionData data;
  data.classes = {"mark", "other"};
  data.pictures = {
      {.file = root / "a.png",
       .width = 64,
       .height = 32,
       .objects = {{.label = 1, .x = 0.5, .y = 0.5, .width = 0.5, .height = 0.5},
                   {.label = 0, .x = 0.2, .y = 0.2, .width = 0.1, .height = 0.1, .crowd = true}}},
      {.file = root / "b.png", .objects = {{.label = 0, .x = 0.25, .y = 0.875, .width = 0.5, .height = 0.25}}}};
  return data;
}

TEST(DetectionDataset, LetterboxesPicturesAndBoxes) {
  const TemporaryDir dir;
  const DetectionDataset dataset{two_pictures(dir.path()), eval_transform(64)};
  const Batch batch = batch_of(dataset, {0, 1});
  EXPECT_EQ(batch.input.sizes(), (Shape{2, 3, 64, 64}));
  EXPECT_TRUE(batch.input.is_contiguous(MemoryFormat::channels_last));
  EXPECT_EQ(batch.target.sizes(), (Shape{2, 8, 5}));
  EXPECT_EQ(batch.target.dtype(), f32);
  // The first keeps its size, 16 rows below the top; the second becomes 32x64, 16 columns from the left.
  EXPECT_EQ(batch.more.at(0).to_vector<double>(), (std::vector<double>{0, 1, 0, 16, 64, 32, 1, 0.8, 16, 0, 40, 80}));
  for (std::int64_t c = 0; c < 3; ++c) {
    const auto i = static_cast<std::size_t>(c);
    EXPECT_EQ(pixel(batch, 0, c, 15, 30), 114);
    EXPECT_EQ(pixel(batch, 0, c, 48, 63), 114);
    EXPECT_EQ(pixel(batch, 0, c, 16, 0), static_cast<float>(kGround[i]));
    EXPECT_EQ(pixel(batch, 0, c, 24, 16), static_cast<float>(kMark[i]));
    EXPECT_EQ(pixel(batch, 0, c, 39, 47), static_cast<float>(kMark[i]));
    EXPECT_EQ(pixel(batch, 0, c, 40, 47), static_cast<float>(kGround[i]));
    EXPECT_EQ(pixel(batch, 1, c, 30, 15), 114);
    EXPECT_EQ(pixel(batch, 1, c, 30, 48), 114);
    EXPECT_EQ(pixel(batch, 1, c, 60, 20), static_cast<float>(kMark[i]));
    EXPECT_EQ(pixel(batch, 1, c, 30, 40), static_cast<float>(kGround[i]));
  }
  // Boxes as fractions of the input: the first is centred, 32 of 64 columns and 16 of 64 rows.
  const std::vector<float> rows = batch.target.to_vector<float>();
  EXPECT_EQ(std::vector<float>(rows.begin(), rows.begin() + 5), (std::vector<float>{1, 0.5, 0.5, 0.5, 0.25}));
  // The second: columns 16 to 32, rows 48 to 64.
  EXPECT_EQ(std::vector<float>(rows.begin() + 40, rows.begin() + 45),
            (std::vector<float>{0, 0.375, 0.875, 0.25, 0.25}));
  for (const std::size_t empty : {1, 7, 9, 15}) {
    EXPECT_EQ(std::vector<float>(rows.begin() + 5 * empty, rows.begin() + 5 * empty + 5),
              (std::vector<float>{-1, 0, 0, 0, 0}));
  }
}

TEST(DetectionDataset, RoundsToEachDtype) {
  const TemporaryDir dir;
  write_png(dir.path() / "all.png", test::painted(64, 64, [](std::int64_t x, std::int64_t y) {
              const auto v = static_cast<std::uint8_t>((y * 64 + x) % 256);
              return Colour{v, static_cast<std::uint8_t>(255 - v), static_cast<std::uint8_t>(v ^ 0x55)};
            }));
  DetectionData data;
  data.classes = {"a"};
  data.pictures = {{.file = dir.path() / "all.png"}};
  for (const DType dtype : {f32, f16, bf16}) {
    const DetectionDataset dataset{data, eval_transform(64), {.dtype = dtype}};
    const Batch batch = batch_of(dataset, {0});
    EXPECT_EQ(batch.input.dtype(), dtype);
    const std::vector<float> values = batch.input.to(f32).contiguous().to_vector<float>();
    for (std::size_t i = 0; i < 4096; ++i) {
      const float exact = static_cast<float>(i % 256) / 255.0F;
      const float want = dtype == f32   ? exact
                         : dtype == f16 ? static_cast<float>(Half(exact))
                                        : static_cast<float>(BFloat16(exact));
      ASSERT_EQ(values[i], want) << i;
    }
  }
}

TEST(DetectionDataset, MakesRowsForTheMostObjects) {
  const TemporaryDir dir;
  DetectionData data = two_pictures(dir.path());
  for (int i = 0; i < 8; ++i) data.pictures[1].objects.push_back(data.pictures[1].objects[0]);
  const DetectionDataset dataset{data, eval_transform(64)};
  EXPECT_EQ(batch_of(dataset, {0}).target.sizes(), (Shape{1, 8, 5}));
  EXPECT_EQ(batch_of(dataset, {0, 1}).target.sizes(), (Shape{2, 16, 5}));
  EXPECT_EQ(batch_of(dataset, {}).target.sizes(), (Shape{0, 8, 5}));
}

TEST(DetectionDataset, OrdersRectangularBatches) {
  const TemporaryDir dir;
  DetectionData data = two_pictures(dir.path());
  data.pictures.push_back(data.pictures[0]);
  std::swap(data.pictures[0], data.pictures[1]);  // tall, wide, wide
  DetectionTransform t = eval_transform(64);
  t.rectangular = true;
  t.pad = 0;
  const DetectionDataset dataset{data, t, {.batch_size = 2}};
  EXPECT_EQ(dataset.picture(0), 1);
  EXPECT_EQ(dataset.picture(2), 0);
  DataLoader loader{dataset, {.batch_size = 2, .workers = 1}};
  std::vector<Shape> shapes;
  std::vector<double> numbers;
  for (const Batch& batch : loader) {
    shapes.push_back(batch.input.sizes());
    const std::vector<double> more = batch.more.at(0).to_vector<double>();
    for (std::size_t i = 0; i < more.size(); i += 6) numbers.push_back(more[i]);
  }
  EXPECT_EQ(shapes, (std::vector<Shape>{Shape{2, 3, 32, 64}, Shape{1, 3, 64, 32}}));
  EXPECT_EQ(numbers, (std::vector<double>{1, 2, 0}));
  // A part of a batch, as a rank has it, is of the whole batch's shape.
  EXPECT_EQ(batch_of(dataset, {1}).input.sizes(), (Shape{1, 3, 32, 64}));
  EXPECT_THROW((void)dataset.picture(3), ShapeError);
  EXPECT_THROW((void)batch_of(dataset, {-1}), ShapeError);
}

class Lines {
 public:
  Lines() {
    set_log_sink([this](LogLevel, std::string_view line) { lines.emplace_back(line); });
  }
  ~Lines() { set_log_sink({}); }
  std::vector<std::string> lines;
};

TEST(DetectionDataset, PutsAPlainPictureInPlaceOfADamagedOne) {
  const TemporaryDir dir;
  DetectionData data = two_pictures(dir.path());
  test::write_text(dir.path() / "a.png", "spoilt");
  const Lines log;
  const DetectionDataset dataset{data, eval_transform(64), {.max_damaged = 1}};
  for (int twice = 0; twice < 2; ++twice) {
    const Batch batch = batch_of(dataset, {0, 1});
    EXPECT_EQ(batch.target[0][0][0].item<float>(), -1);
    EXPECT_EQ(batch.target[1][0][0].item<float>(), 0);
    for (const std::int64_t y : {0, 20, 40}) EXPECT_EQ(pixel(batch, 0, 0, y, y), 114);
  }
  ASSERT_EQ(log.lines.size(), 1U);
  EXPECT_NE(log.lines[0].find("a.png"), std::string::npos);
  EXPECT_EQ(dataset.bad_pictures(), (std::vector<std::string>{(dir.path() / "a.png").string()}));
  // Another picture than the labels were made for is one more than allowed.
  write_grey(dir.path() / "b.png", 50, 80);
  expect_error<IoError>([&] { (void)batch_of(dataset, {1}); },
                        {"at most 1 damaged pictures, got 2", "b.png", "expected a picture of 40x80, got 50x80"});
}

TEST(DetectionDataset, ChecksItsOptions) {
  const TemporaryDir dir;
  const DetectionData data = two_pictures(dir.path());
  const auto refuses = [&](const std::function<void(DetectionTransform&)>& change, const std::string& text) {
    DetectionTransform t;
    change(t);
    expect_error<Error>([&] { (void)DetectionDataset(data, t); }, {text});
  };
  refuses([](auto& t) { t.size = 100; }, "size: expected a multiple of 32");
  refuses([](auto& t) { t.size = 8224; }, "size: expected a multiple of 32 up to 8192, got 8224");
  refuses([](auto& t) { t.stride = 0; }, "stride: expected");
  refuses([](auto& t) { t.fill = 256; }, "fill: expected 0 to 255, got 256");
  refuses([](auto& t) { t.mosaic = 1.5; }, "mosaic: expected a probability from 0 to 1, got 1.5");
  refuses([](auto& t) { t.mixup = NAN; }, "mixup: expected a probability");
  refuses([](auto& t) { t.scale = 1; }, "scale: expected at least 0 and under 1");
  refuses([](auto& t) { t.perspective = 0.1; }, "perspective: expected");
  EXPECT_EQ(largest_perspective(640), 1.0 / 2560);
  DetectionTransform bent;
  bent.perspective = 1.0 / 2560;
  EXPECT_NO_THROW((void)DetectionDataset(data, bent));
  refuses([](auto& t) { t.degrees = -1; }, "degrees: expected");
  refuses([](auto& t) { t.hue = 2; }, "hue: expected");
  EXPECT_THROW(DetectionDataset(data, {}, {.dtype = i64}), DTypeError);
  expect_error<Error>([&] { (void)DetectionDataset(data, {}, {.batch_size = 0}); }, {"batch_size"});
  expect_error<Error>([&] { (void)DetectionDataset(DetectionData{}); }, {"expected pictures, got none"});
  expect_error<Error>([&] { (void)DetectionDataset(data, {}, {.cache = PictureCache::disk}); }, {"cache_folder"});
  DetectionData wrong = data;
  wrong.pictures[0].objects[0].label = 2;
  expect_error<Error>([&] { (void)DetectionDataset(wrong); }, {"a.png: expected classes from 0 to 1, got 2"});
}

}  // namespace
}  // namespace halfstep::data
