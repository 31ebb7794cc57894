// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/resize.h"

#include "halfstep/core/error.h"
#include "tests/data/idx_files.h"
#include "tests/data/image_goldens.h"

namespace halfstep::data {
namespace {

using test::expect_error;
using test::golden_pixels;
using test::image_goldens;
using test::largest_difference;
using test::noise_image;

TEST(Resize, GivesPillowsPixels) {
  int cases = 0;
  for (const auto& entry : image_goldens().at("resize")) {
    SCOPED_TRACE(entry.at("name").get<std::string>());
    const Image source = noise_image(entry.at("from")[0], entry.at("from")[1], 7);
    ResizeOptions options{.width = entry.at("to")[0],
                          .height = entry.at("to")[1],
                          .filter = entry.at("filter") == "bicubic" ? ResizeFilter::bicubic : ResizeFilter::bilinear};
    const auto& box = entry.at("box");
    if (!box.empty()) options.box = {box[0], box[1], box[2], box[3]};
    // The same fixed point and the same order of the passes: not even one grey level apart.
    EXPECT_EQ(largest_difference(resize(source.view(), options).pixels, golden_pixels(entry)), 0);
    ++cases;
  }
  EXPECT_GE(cases, 30);
}

TEST(Resize, MakesAWindowFromTheRegionItAsksFor) {
  const Image source = noise_image(97, 61, 3);
  for (const ResizeFilter filter : {ResizeFilter::bilinear, ResizeFilter::bicubic}) {
    for (const auto& [width, height] : {std::pair<std::int64_t, std::int64_t>{40, 33}, {97, 61}, {120, 61}, {97, 20}}) {
      const ResizeOptions whole{.width = width, .height = height, .filter = filter};
      const Image expected = resize(source.view(), whole);
      ResizeOptions options = whole;
      options.window = {.left = 7, .top = 3, .width = 21, .height = 13};
      const ResizePlan plan(source.width, source.height, options);
      const PixelRegion region = plan.source_region();
      ASSERT_GE(region.left, 0);
      ASSERT_LE(region.left + region.width, 97);
      EXPECT_LT(region.width, 70);
      // Only the region, in memory of its own, so that reading anything else would show under the address sanitizer.
      Image part, scratch, result;
      part.resize(region.width, region.height);
      for (std::int64_t y = 0; y < region.height; ++y) {
        std::copy_n(source.row(region.top + y) + 3 * region.left, 3 * region.width, part.row(y));
      }
      part.pixels.shrink_to_fit();
      plan.run(part.view(), region.left, region.top, scratch, result);
      ASSERT_EQ(result.width, 21);
      ASSERT_EQ(result.height, 13);
      for (std::int64_t y = 0; y < 13; ++y) {
        ASSERT_TRUE(std::equal(result.row(y), result.row(y) + 63, expected.row(3 + y) + 21)) << width << "x" << height;
      }
    }
  }
}

TEST(Resize, ReadsPartsOfLargerPictures) {
  const Image source = noise_image(50, 40, 9);
  const PixelRegion region{.left = 11, .top = 6, .width = 23, .height = 19};
  Image alone;
  alone.resize(region.width, region.height);
  for (std::int64_t y = 0; y < region.height; ++y) {
    std::copy_n(source.row(region.top + y) + 3 * region.left, 3 * region.width, alone.row(y));
  }
  for (const std::int64_t size : {5, 19, 23, 48}) {
    const ResizeOptions options{.width = size, .height = size};
    EXPECT_EQ(resize(source.view(region), options).pixels, resize(alone.view(), options).pixels);
  }
}

TEST(Resize, KeepsEvenColors) {
  Image source;
  source.resize(31, 17);
  std::fill(source.pixels.begin(), source.pixels.end(), std::uint8_t{255});
  for (const std::int64_t size : {1, 2, 16, 100, 300}) {
    const Image result = resize(source.view(), {.width = size, .height = size, .filter = ResizeFilter::bicubic});
    for (const std::uint8_t pixel : result.pixels) ASSERT_EQ(pixel, 255);
  }
}

TEST(Resize, RefusesWhatMakesNoSense) {
  expect_error<ShapeError>([] { ResizePlan(10, 10, {.width = 0, .height = 5}); }, {"10x10 to become 0x5"});
  expect_error<ShapeError>([] { ResizePlan(0, 10, {.width = 5, .height = 5}); }, {"0x10"});
  expect_error<ShapeError>([] { ResizePlan(10, 10, {.width = 5, .height = 5, .box = {1, 1, 11, 5}}); }, {"box"});
  expect_error<ShapeError>([] { ResizePlan(10, 10, {.width = 5, .height = 5, .box = {3, 1, 3, 5}}); }, {"box"});
  expect_error<ShapeError>([] { ResizePlan(10, 10, {.width = 5, .height = 5, .window = {3, 0, 3, 5}}); }, {"window"});
  const ResizePlan plan(10, 10, {.width = 5, .height = 5});
  const Image small = noise_image(9, 10, 1);
  Image scratch, result;
  expect_error<ShapeError>([&] { plan.run(small.view(), 0, 0, scratch, result); }, {"columns 0 to 10", "9x10"});
}

}  // namespace
}  // namespace halfstep::data
