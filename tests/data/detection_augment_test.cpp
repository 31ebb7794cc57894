// SPDX-License-Identifier: Apache-2.0
// DetectionDataset's random changes: boxes stay on their pixels, and the bits depend on nothing but the keys.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <numeric>
#include <set>

#include "halfstep/core/error.h"
#include "halfstep/data/detection_dataset.h"
#include "halfstep/data/detection_description.h"
#include "halfstep/data/loader.h"
#include "tests/data/detection_files.h"
#include "tests/support/test_data.h"

namespace halfstep::data {
namespace {

namespace fs = std::filesystem;
using test::TemporaryDir;
using test::write_png;
using Colour = std::array<std::uint8_t, 3>;

constexpr Colour kGround = {40, 80, 120};
constexpr Colour kMark = {250, 10, 30};

/// Nothing random but what a test turns on.
DetectionTransform plain(std::int64_t size) {
  DetectionTransform t;
  t.size = size;
  t.mosaic = t.translate = t.scale = t.flip_left_right = t.hue = t.saturation = t.value = 0;
  return t;
}

/// A picture with one rectangle, 96x64: columns 30 to 66, rows 20 to 44.
DetectionData one_picture(const fs::path& root) {
  write_png(root / "a.png", test::with_rectangle(96, 64, kGround, kMark, {30, 20, 36, 24}));
  DetectionData data;
  data.classes = {"mark"};
  data.pictures = {{.file = root / "a.png",
                    .width = 96,
                    .height = 64,
                    .objects = {{.label = 0, .x = 0.5, .y = 0.5, .width = 0.375, .height = 0.375}}}};
  return data;
}

Batch sample(const DetectionDataset& dataset, std::int64_t epoch, std::int64_t index = 0) {
  const std::vector<std::int64_t> indices = {index};
  return dataset.batch({.indices = indices, .seed = 5, .epoch = epoch});
}

/// The input's pixels, as bytes.
struct Pixels {
  explicit Pixels(const Batch& batch, std::int64_t n = 0) : size(batch.input.size(2)) {
    const std::vector<float> all = batch.input[n].to_vector<float>();
    const auto plane = static_cast<std::size_t>(size * size);
    for (std::size_t i = 0; i < plane; ++i) {
      Colour c;
      for (std::size_t k = 0; k < 3; ++k) c[k] = static_cast<std::uint8_t>(std::lround(all[k * plane + i] * 255));
      values.push_back(c);
    }
  }
  const Colour& at(std::int64_t x, std::int64_t y) const { return values[static_cast<std::size_t>(y * size + x)]; }
  /// Between the two colours, more than half of the way to the mark.
  bool marked(std::int64_t x, std::int64_t y) const {
    const Colour& c = at(x, y);
    return c[0] > (kMark[0] + 114) / 2 && c[1] < 62;
  }
  std::int64_t size;
  std::vector<Colour> values;
};

/// Boxes of a batch's sample in pixels, with their classes.
struct Found {
  std::int64_t label;
  double left, top, right, bottom;
};
std::vector<Found> boxes_of(const Batch& batch, std::int64_t n = 0) {
  const std::vector<float> rows = batch.target[n].to_vector<float>();
  const auto side = static_cast<double>(batch.input.size(2));
  std::vector<Found> found;
  for (std::size_t i = 0; i < rows.size(); i += 5) {
    if (rows[i] < 0) continue;
    const double x = rows[i + 1] * side, y = rows[i + 2] * side, w = rows[i + 3] * side, h = rows[i + 4] * side;
    found.push_back({static_cast<std::int64_t>(rows[i]), x - w / 2, y - h / 2, x + w / 2, y + h / 2});
  }
  return found;
}

/// The box around all marked pixels; without width for none.
Found marked_box(const Pixels& pixels) {
  Found box{0, 1e9, 1e9, 0, 0};
  for (std::int64_t y = 0; y < pixels.size; ++y) {
    for (std::int64_t x = 0; x < pixels.size; ++x) {
      if (!pixels.marked(x, y)) continue;
      box.left = std::min(box.left, static_cast<double>(x));
      box.top = std::min(box.top, static_cast<double>(y));
      box.right = std::max(box.right, static_cast<double>(x + 1));
      box.bottom = std::max(box.bottom, static_cast<double>(y + 1));
    }
  }
  return box;
}

void expect_near(const Found& box, const Found& pixels, double tolerance, const std::string& what) {
  EXPECT_NEAR(box.left, pixels.left, tolerance) << what;
  EXPECT_NEAR(box.top, pixels.top, tolerance) << what;
  EXPECT_NEAR(box.right, pixels.right, tolerance) << what;
  EXPECT_NEAR(box.bottom, pixels.bottom, tolerance) << what;
}

/// Expects, for many samples, the one box to be that of the marked pixels. A pixel counts when its middle is on the
/// rectangle, give or take the blur of enlarging: an edge is found within one pixel, a rotated rectangle's corner
/// within two, since its tip covers no pixel's middle.
void expect_boxes_follow(const std::function<void(DetectionTransform&)>& change, double tolerance) {
  const TemporaryDir dir;
  DetectionTransform t = plain(96);
  change(t);
  const DetectionDataset dataset{one_picture(dir.path()), t};
  int shown = 0;
  for (std::int64_t epoch = 0; epoch < 40; ++epoch) {
    const Batch batch = sample(dataset, epoch);
    const std::vector<Found> boxes = boxes_of(batch);
    if (boxes.empty()) continue;
    ASSERT_EQ(boxes.size(), 1U);
    ++shown;
    expect_near(boxes[0], marked_box(Pixels(batch)), tolerance, "epoch " + std::to_string(epoch));
  }
  EXPECT_GT(shown, 30);
}

TEST(DetectionAugment, BoxesFollowPixels) {
  expect_boxes_follow([](auto&) {}, 1e-3);
  expect_boxes_follow([](auto& t) { t.translate = 0.3; }, 1);
  expect_boxes_follow([](auto& t) { t.scale = 0.6; }, 1);
  expect_boxes_follow(
      [](auto& t) {
        t.flip_left_right = 0.5;
        t.translate = 0.1;
      },
      1);
  expect_boxes_follow(
      [](auto& t) {
        t.flip_up_down = 0.5;
        t.translate = 0.1;
      },
      1);
  expect_boxes_follow([](auto& t) { t.degrees = 45; }, 2);
  expect_boxes_follow([](auto& t) { t.shear = 20; }, 2);
  expect_boxes_follow([](auto& t) { t.perspective = 0.001; }, 2);
  expect_boxes_follow(
      [](auto& t) {
        t.degrees = 180;
        t.shear = 10;
        t.perspective = 0.001;
        t.scale = 0.4;
        t.translate = 0.2;
        t.flip_left_right = t.flip_up_down = 0.5;
      },
      2);
}

TEST(DetectionAugment, PolygonsGiveTighterBoxesWhenTurned) {
  // A thin diamond whose corners are the middles of the rectangle's sides: turned by 45 degrees its own box is much
  // smaller than that of the turned rectangle.
  const TemporaryDir dir;
  const auto inside = [](std::int64_t x, std::int64_t y) {
    return std::abs(static_cast<double>(x) - 47.5) / 18 + std::abs(static_cast<double>(y) - 31.5) / 12 <= 1;
  };
  write_png(dir.path() / "a.png",
            test::painted(96, 64, [&](std::int64_t x, std::int64_t y) { return inside(x, y) ? kMark : kGround; }));
  DetectionData data = one_picture(dir.path());
  write_png(dir.path() / "a.png",
            test::painted(96, 64, [&](std::int64_t x, std::int64_t y) { return inside(x, y) ? kMark : kGround; }));
  data.pictures[0].objects[0].segments = {
      {30.0 / 96, 32.0 / 64, 48.0 / 96, 20.0 / 64, 66.0 / 96, 32.0 / 64, 48.0 / 96, 44.0 / 64}};
  DetectionTransform t = plain(96);
  t.degrees = 60;
  t.translate = 0.4;  // far enough to be cut at the input's edge
  const DetectionDataset dataset{data, t};
  for (std::int64_t epoch = 0; epoch < 40; ++epoch) {
    const Batch batch = sample(dataset, epoch);
    const std::vector<Found> boxes = boxes_of(batch);
    const Found pixels = marked_box(Pixels(batch));
    if (boxes.empty()) {
      // What is smaller than two pixels is no object.
      EXPECT_LE(std::min(pixels.right - pixels.left, pixels.bottom - pixels.top), 3.0);
      continue;
    }
    expect_near(boxes[0], pixels, 2, "epoch " + std::to_string(epoch));  // the tips are sharper than a pixel
  }
}

TEST(DetectionAugment, NothingRandomIsTheLetterbox) {
  const TemporaryDir dir;
  const DetectionData data = one_picture(dir.path());
  DetectionTransform eval = plain(64);
  eval.train = false;
  const Batch want = sample(DetectionDataset{data, eval}, 0), got = sample(DetectionDataset{data, plain(64)}, 0);
  EXPECT_EQ(got.input.to_vector<float>(), want.input.to_vector<float>());
  EXPECT_EQ(got.target.to_vector<float>(), want.target.to_vector<float>());
  EXPECT_EQ(got.more.at(0).to_vector<double>(), (std::vector<double>{0, 0, 0, 0, 96, 64}));
}

TEST(DetectionAugment, FlipsMirrorEveryPixel) {
  const TemporaryDir dir;
  write_png(dir.path() / "a.png", test::painted(64, 64, [](std::int64_t x, std::int64_t y) {
              return Colour{static_cast<std::uint8_t>(4 * x), static_cast<std::uint8_t>(3 * y + 1), 7};
            }));
  DetectionData data;
  data.classes = {"a"};
  data.pictures = {{.file = dir.path() / "a.png"}};
  DetectionTransform t = plain(64);
  const Pixels own(sample(DetectionDataset{data, t}, 0));
  t.flip_left_right = 1;
  const Pixels mirrored(sample(DetectionDataset{data, t}, 0));
  t.flip_left_right = 0;
  t.flip_up_down = 1;
  const Pixels turned(sample(DetectionDataset{data, t}, 0));
  for (std::int64_t y = 0; y < 64; ++y) {
    for (std::int64_t x = 0; x < 64; ++x) {
      ASSERT_EQ(own.at(x, y), (Colour{static_cast<std::uint8_t>(4 * x), static_cast<std::uint8_t>(3 * y + 1), 7}));
      ASSERT_EQ(mirrored.at(63 - x, y), own.at(x, y));
      ASSERT_EQ(turned.at(x, 63 - y), own.at(x, y));
    }
  }
}

/// Square pictures of one colour each.
DetectionData plain_pictures(const fs::path& root, std::int64_t n, std::int64_t width, std::int64_t height) {
  DetectionData data;
  for (std::int64_t i = 0; i < n; ++i) {
    const Colour colour = {static_cast<std::uint8_t>(20 + 20 * i), static_cast<std::uint8_t>(200 - 10 * i), 50};
    const fs::path file = root / fmt::format("{}.png", i);
    write_png(file, test::painted(width, height, [&](auto, auto) { return colour; }));
    data.classes.push_back(std::to_string(i));
    data.pictures.push_back({.file = file,
                             .width = width,
                             .height = height,
                             .objects = {{.label = i, .x = 0.5, .y = 0.5, .width = 1, .height = 1}}});
  }
  return data;
}

// Without scale and shift the input is the middle of the canvas: four pictures meet at one point of it, anywhere.
TEST(DetectionAugment, MosaicPutsFourPicturesAroundAPoint) {
  const TemporaryDir dir;
  DetectionTransform t = plain(64);
  t.mosaic = 1;
  const DetectionDataset dataset{plain_pictures(dir.path(), 6, 64, 64), t};
  const DetectionData& data = dataset.data();
  double sum = 0, least = 64, most = 0;
  std::set<std::int64_t> partners, places;
  constexpr int kSamples = 60;
  for (std::int64_t epoch = 0; epoch < kSamples; ++epoch) {
    const Batch batch = sample(dataset, epoch, 2);
    const Pixels pixels(batch);
    const std::vector<Found> boxes = boxes_of(batch);
    bool own = false;
    for (const Found& box : boxes) {
      own = own || box.label == 2;
      partners.insert(box.label);
      // A whole picture's box is the part of it that is shown; every pixel there has its colour.
      const Colour colour = {static_cast<std::uint8_t>(20 + 20 * box.label),
                             static_cast<std::uint8_t>(200 - 10 * box.label), 50};
      for (auto y = static_cast<std::int64_t>(std::lround(box.top)); y < std::lround(box.bottom); ++y) {
        for (auto x = static_cast<std::int64_t>(std::lround(box.left)); x < std::lround(box.right); ++x) {
          ASSERT_EQ(pixels.at(x, y), colour) << x << ' ' << y << " epoch " << epoch;
        }
      }
      // Each begins or ends where they meet.
      if (box.left < 0.5 && box.right < 63.5) {
        sum += box.right;
        least = std::min(least, box.right);
        most = std::max(most, box.right);
      }
      if (box.label == 2) places.insert((box.left > 0.5 ? 1 : 0) + (box.top > 0.5 ? 2 : 0));
    }
    EXPECT_LE(boxes.size(), 4U);
    (void)own;
  }
  EXPECT_LT(least, 15);
  EXPECT_GT(most, 49);
  EXPECT_EQ(partners.size(), data.pictures.size());
  EXPECT_EQ(places.size(), 4U);
}

// Wide pictures leave rows of the canvas empty: they have the fill, and the two above end where the two below begin.
TEST(DetectionAugment, MosaicFillsWhatNoPictureCovers) {
  const TemporaryDir dir;
  DetectionTransform t = plain(64);
  t.mosaic = 1;
  t.fill = 77;
  const DetectionDataset dataset{plain_pictures(dir.path(), 3, 64, 16), t};
  for (std::int64_t epoch = 0; epoch < 20; ++epoch) {
    const Pixels pixels(sample(dataset, epoch));
    std::int64_t filled = 0;
    for (const Colour& c : pixels.values) filled += c == Colour{77, 77, 77} ? 1 : 0;
    // At most 32 of 64 rows have pictures; where the point is near the edge, fewer.
    EXPECT_GE(filled, 64 * 32) << epoch;
    EXPECT_LE(filled, 64 * 48) << epoch;
  }
}

TEST(DetectionAugment, MosaicBoxesFollowPixels) {
  const TemporaryDir dir;
  DetectionTransform t = plain(96);
  t.mosaic = 1;
  t.scale = 0.5;
  t.translate = 0.1;
  t.flip_left_right = 0.5;
  const DetectionDataset dataset{one_picture(dir.path()), t};
  std::int64_t boxes_seen = 0;
  for (std::int64_t epoch = 0; epoch < 40; ++epoch) {
    const Batch batch = sample(dataset, epoch);
    const Pixels pixels(batch);
    const std::vector<Found> boxes = boxes_of(batch);
    // Every marked pixel is in a box, but for what was cut down to less than a tenth.
    std::int64_t outside = 0, marked = 0;
    for (std::int64_t y = 0; y < 96; ++y) {
      for (std::int64_t x = 0; x < 96; ++x) {
        if (!pixels.marked(x, y)) continue;
        ++marked;
        const bool in = std::any_of(boxes.begin(), boxes.end(), [&](const Found& b) {
          return static_cast<double>(x) > b.left - 1.5 && static_cast<double>(x) < b.right + 0.5 &&
                 static_cast<double>(y) > b.top - 1.5 && static_cast<double>(y) < b.bottom + 0.5;
        });
        if (!in) ++outside;
      }
    }
    EXPECT_LE(outside, 4 * 36 * 24 * 2.25 * 0.1);
    // And a box has nothing but marked pixels inside.
    for (const Found& b : boxes) {
      ++boxes_seen;
      for (auto y = static_cast<std::int64_t>(std::ceil(b.top + 1)); y < std::floor(b.bottom - 1); ++y) {
        for (auto x = static_cast<std::int64_t>(std::ceil(b.left + 1)); x < std::floor(b.right - 1); ++x) {
          ASSERT_TRUE(pixels.marked(x, y)) << x << ' ' << y << " epoch " << epoch;
        }
      }
    }
  }
  EXPECT_GT(boxes_seen, 60);
}

TEST(DetectionAugment, DropsWhatIsCutDownTooFar) {
  const TemporaryDir dir;
  DetectionTransform t = plain(96);
  t.translate = 0.9;
  const DetectionDataset dataset{one_picture(dir.path()), t};
  std::int64_t dropped = 0, kept = 0;
  for (std::int64_t epoch = 0; epoch < 200; ++epoch) {
    const Batch batch = sample(dataset, epoch);
    const Found pixels = marked_box(Pixels(batch));
    const double width = std::max(pixels.right - pixels.left, 0.0), height = std::max(pixels.bottom - pixels.top, 0.0);
    const double share = width * height / (36.0 * 24);
    const bool there = !boxes_of(batch).empty();
    (there ? kept : dropped) += 1;
    // A pixel more or less decides near the limits.
    const bool too_small = share < 0.03 || std::min(width, height) < 1;
    const bool large = share > 0.2 && std::min(width, height) > 3;
    EXPECT_FALSE(too_small && there) << epoch;
    EXPECT_FALSE(large && !there) << epoch;
  }
  EXPECT_GT(dropped, 20);
  EXPECT_GT(kept, 20);
}

TEST(DetectionAugment, MixupKeepsTheObjectsOfBoth) {
  const TemporaryDir dir;
  DetectionTransform t = plain(64);
  t.mosaic = 1;
  t.mixup = 1;
  const DetectionDataset dataset{plain_pictures(dir.path(), 2, 64, 64), t};
  // The two colours are 20 and 40 in red: a share from Beta(32, 32) is 0.3 to 0.7 in all but one of 1000 cases.
  std::int64_t mixed = 0, boxes = 0;
  for (std::int64_t epoch = 0; epoch < 20; ++epoch) {
    const Batch batch = sample(dataset, epoch);
    boxes += std::ssize(boxes_of(batch));
    for (const Colour& c : Pixels(batch).values) {
      EXPECT_TRUE(c[0] >= 20 && c[0] <= 40);
      EXPECT_EQ(c[2], 50);
      mixed += c[0] >= 25 && c[0] <= 35 ? 1 : 0;
      EXPECT_FALSE(c[0] > 20 && c[0] < 25) << int{c[0]};
      EXPECT_FALSE(c[0] > 35 && c[0] < 40) << int{c[0]};
    }
  }
  EXPECT_GT(mixed, 20 * 4096 / 4);
  EXPECT_GT(boxes, 20 * 4);  // up to four of each mosaic
  EXPECT_LE(boxes, 20 * 8);
}

TEST(DetectionAugment, CopyPasteMirrorsPolygonsWithTheirPixels) {
  const TemporaryDir dir;
  DetectionData data = one_picture(dir.path());
  data.pictures[0].objects[0].segments = {
      {30.0 / 96, 20.0 / 64, 66.0 / 96, 20.0 / 64, 66.0 / 96, 44.0 / 64, 30.0 / 96, 44.0 / 64}};
  DetectionTransform t = plain(96);
  t.mosaic = 1;
  t.scale = 0.5;
  std::int64_t without = 0, with = 0;
  for (const double p : {0.0, 1.0}) {
    t.copy_paste = p;
    const DetectionDataset dataset{data, t};
    for (std::int64_t epoch = 0; epoch < 40; ++epoch) {
      const Batch batch = sample(dataset, epoch);
      const Pixels pixels(batch);
      for (const Found& b : boxes_of(batch)) {
        (p == 0 ? without : with) += 1;
        if (b.right - b.left < 6 || b.bottom - b.top < 6) continue;
        const auto x = static_cast<std::int64_t>((b.left + b.right) / 2),
                   y = static_cast<std::int64_t>((b.top + b.bottom) / 2);
        EXPECT_TRUE(pixels.marked(x, y)) << p << " epoch " << epoch;
        for (auto at = static_cast<std::int64_t>(std::ceil(b.left + 1)); at < std::floor(b.right - 1); ++at) {
          // Another copy may lie over a part: it has the same colour, but for the ground's share at its edges.
          ASSERT_GT(pixels.at(at, y)[0], 130) << p << " epoch " << epoch;
        }
      }
    }
  }
  EXPECT_GT(with, without + 20);
}

/// All bits of some epochs.
struct Bits {
  std::vector<float> input, target;
  std::vector<double> more;
  std::vector<Shape> shapes;
  friend bool operator==(const Bits&, const Bits&) = default;
};
Bits bits_of(const DetectionDataset& dataset, int workers, std::int64_t epochs = 2) {
  DataLoader loader{dataset, {.batch_size = 3, .shuffle = dataset.transform().train, .workers = workers, .seed = 11}};
  Bits bits;
  for (std::int64_t epoch = 0; epoch < epochs; ++epoch) {
    for (const Batch& batch : loader) {
      bits.shapes.push_back(batch.input.sizes());
      const auto input = batch.input.to_vector<float>();
      const auto target = batch.target.to_vector<float>();
      const auto more = batch.more.at(0).to_vector<double>();
      bits.input.insert(bits.input.end(), input.begin(), input.end());
      bits.target.insert(bits.target.end(), target.begin(), target.end());
      bits.more.insert(bits.more.end(), more.begin(), more.end());
    }
  }
  return bits;
}

DetectionTransform everything(std::int64_t size) {
  DetectionTransform t;
  t.size = size;
  t.mosaic = 0.7;
  t.mixup = t.copy_paste = t.flip_up_down = 0.5;
  t.degrees = 10;
  t.shear = 5;
  t.perspective = 0.0005;
  t.multi_scale = true;
  return t;
}

TEST(DetectionAugment, GivesTheSameBitsWithAnyWorkers) {
  const TemporaryDir dir;
  DetectionData data = plain_pictures(dir.path(), 7, 48, 30);
  data.pictures[3].objects[0].segments = {{0.2, 0.2, 0.8, 0.3, 0.5, 0.9}};
  const DetectionDataset dataset{data, everything(64)};
  const Bits none = bits_of(dataset, 0);
  EXPECT_EQ(none.shapes.size(), 6U);
  EXPECT_TRUE(bits_of(dataset, 1) == none);
  EXPECT_TRUE(bits_of(dataset, 3) == none);
  EXPECT_TRUE(bits_of(DetectionDataset{data, everything(64)}, 0) == none);
}

TEST(DetectionAugment, DrawsASizeForEachBatch) {
  DetectionTransform t;
  t.size = 320;
  std::map<std::int64_t, int> counts;
  for (std::int64_t number = 0; number < 1100; ++number) ++counts[multi_scale_size(t, 3, 1, number)];
  // 160 to 480 in steps of 32: eleven sizes, each 100 times but for three standard deviations.
  EXPECT_EQ(counts.size(), 11U);
  EXPECT_EQ(counts.begin()->first, 160);
  EXPECT_EQ(counts.rbegin()->first, 480);
  for (const auto& [size, count] : counts) {
    EXPECT_EQ(size % 32, 0);
    EXPECT_NEAR(count, 100, 30) << size;
  }
  EXPECT_NE(
      multi_scale_size(t, 3, 1, 0) * 1000000 + multi_scale_size(t, 3, 1, 1) * 1000 + multi_scale_size(t, 3, 1, 2),
      multi_scale_size(t, 3, 2, 0) * 1000000 + multi_scale_size(t, 3, 2, 1) * 1000 + multi_scale_size(t, 3, 2, 2));
  const TemporaryDir dir;
  t = plain(64);
  t.multi_scale = true;
  const DetectionDataset dataset{plain_pictures(dir.path(), 2, 64, 64), t};
  for (std::int64_t number = 0; number < 8; ++number) {
    const std::vector<std::int64_t> indices = {0};
    const Batch batch = dataset.batch({.indices = indices, .seed = 3, .epoch = 1, .number = number});
    const std::int64_t size = multi_scale_size(t, 3, 1, number);
    EXPECT_EQ(batch.input.sizes(), (Shape{1, 3, size, size}));
    expect_near(boxes_of(batch).at(0), {0, 0, 0, static_cast<double>(size), static_cast<double>(size)}, 1e-3, "whole");
  }
  // All parts of a batch have its number, whoever makes them.
  const DetectionDataset many{plain_pictures(dir.path(), 10, 64, 64), t};
  for (const int rank : {0, 1, 2}) {
    DataLoader loader{many,
                      {.batch_size = 2, .workers = rank, .seed = 3, .rank = rank % 2, .ranks = rank == 2 ? 1 : 2}};
    for (std::int64_t epoch = 0; epoch < 2; ++epoch) {
      std::int64_t number = 0;
      for (const Batch& batch : loader) EXPECT_EQ(batch.input.size(2), multi_scale_size(t, 3, epoch, number++));
      EXPECT_EQ(number, 5);
    }
  }
}

TEST(DetectionAugment, CachesGiveTheSameBits) {
  const auto folder = test::data_dir();
  if (!folder || !fs::exists(*folder / "detection")) GTEST_SKIP() << "no real data";
  // JPEGs of about 640x480: at 160 they are decoded at a quarter, at 224 at a half and resized.
  DetectionData data = load_detection(*folder / "detection/coco-mini", "train");
  data.pictures.resize(7);
  const TemporaryDir dir;
  for (const std::int64_t size : {160, 224}) {
    for (const bool train : {true, false}) {
      DetectionTransform t = everything(size);
      t.multi_scale = false;
      t.train = train;
      const Bits none = bits_of(DetectionDataset{data, t}, 1);
      const auto cached = [&](PictureCache cache, std::uint64_t bytes) {
        return bits_of(DetectionDataset{data, t, {.cache = cache, .cache_bytes = bytes, .cache_folder = dir.path()}},
                       2);
      };
      EXPECT_TRUE(cached(PictureCache::memory, 0) == none);
      EXPECT_TRUE(cached(PictureCache::memory, 200000) == none);  // room for two or three
      EXPECT_TRUE(cached(PictureCache::disk, 0) == none);
      EXPECT_TRUE(cached(PictureCache::disk, 0) == none);  // from what the last one wrote
    }
  }
}

TEST(DetectionAugment, ReadsNoHalfWrittenCache) {
  const TemporaryDir dir;
  const DetectionData data = plain_pictures(dir.path(), 1, 64, 64);
  const fs::path cache = dir.path() / "cache";
  const DetectionDataset dataset{data, plain(64), {.cache = PictureCache::disk, .cache_folder = cache}};
  const std::vector<float> want = sample(dataset, 0).input.to_vector<float>();
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(cache)) files.push_back(entry.path());
  ASSERT_EQ(files.size(), 1U);  // and nothing temporary is left
  const auto whole = fs::file_size(files[0]);
  EXPECT_EQ(whole, 64U + 3 * 64 * 64);
  // Cut short, longer, or of another picture: it is made again.
  for (const auto& size : {whole - 1, whole + 1, std::uintmax_t{0}}) {
    fs::resize_file(files[0], size);
    EXPECT_EQ(sample(dataset, 0).input.to_vector<float>(), want);
    EXPECT_EQ(fs::file_size(files[0]), whole);
  }
  write_png(data.pictures[0].file, test::painted(64, 64, [](auto, auto) { return Colour{1, 2, 3}; }));
  fs::last_write_time(data.pictures[0].file, fs::file_time_type::clock::now() + std::chrono::seconds(5));
  EXPECT_EQ(Pixels(sample(dataset, 0)).at(5, 5), (Colour{1, 2, 3}));
}

TEST(DetectionAugment, UsesNoCacheThatIsNoFile) {
  const TemporaryDir dir;
  const DetectionData data = plain_pictures(dir.path(), 1, 64, 64);
  const fs::path cache = dir.path() / "cache", other = dir.path() / "other";
  const DetectionDataset dataset{data, plain(64), {.cache = PictureCache::disk, .cache_folder = cache}};
  const std::vector<float> want = sample(dataset, 0).input.to_vector<float>();
  const fs::path file = fs::directory_iterator(cache)->path();
  // A link: neither read, though what it leads to is a whole cached picture of another colour, nor written.
  fs::rename(file, other);
  std::fstream(other, std::ios::in | std::ios::out | std::ios::binary).seekp(-1, std::ios::end).put('\1');
  fs::create_symlink(other, file);
  EXPECT_EQ(sample(dataset, 0).input.to_vector<float>(), want);
  fs::resize_file(other, 3);
  EXPECT_EQ(sample(dataset, 0).input.to_vector<float>(), want);
  EXPECT_TRUE(fs::is_symlink(file));
  EXPECT_EQ(fs::file_size(other), 3U);
  // One that leads nowhere stays so.
  fs::remove(other);
  EXPECT_EQ(sample(dataset, 0).input.to_vector<float>(), want);
  EXPECT_FALSE(fs::exists(other));
  // A pipe: nothing comes. It is open here, as whoever wrote into it would wait for ever otherwise.
  fs::remove(file);
  ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
  const int pipe = ::open(file.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  ASSERT_GE(pipe, 0);
  EXPECT_EQ(sample(dataset, 0).input.to_vector<float>(), want);
  char byte = 0;
  EXPECT_EQ(::read(pipe, &byte, 1), 0);
  ::close(pipe);
  EXPECT_TRUE(fs::is_fifo(file));
}

}  // namespace
}  // namespace halfstep::data
