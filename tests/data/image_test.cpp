// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/image.h"

#include <sys/stat.h>

#include <cstring>

#include "halfstep/core/error.h"
#include "halfstep/runtime/log.h"
#include "tests/data/idx_files.h"
#include "tests/data/image_goldens.h"

namespace halfstep::data {
namespace {

using test::Bytes;
using test::expect_error;
using test::golden_file;
using test::golden_pixels;
using test::image_golden;
using test::image_goldens;
using test::largest_difference;
using test::TemporaryDir;
using test::write_file;

Bytes golden(const std::string& name) { return golden_file(image_golden("decode", name)); }

TEST(ImageDecode, GivesPillowsPixels) {
  int files = 0;
  for (const auto& entry : image_goldens().at("decode")) {
    SCOPED_TRACE(entry.at("name").get<std::string>());
    const Bytes bytes = golden_file(entry);
    const Image image = decode_image(bytes, "x");
    EXPECT_EQ(image.height, entry.at("shape")[0].get<std::int64_t>());
    EXPECT_EQ(image.width, entry.at("shape")[1].get<std::int64_t>());
    // Both decode with libjpeg-turbo's exact integer transform, so there is no rounding to allow for.
    EXPECT_EQ(largest_difference(image.pixels, golden_pixels(entry)), 0);
    ++files;
  }
  EXPECT_GE(files, 50);
}

TEST(ImageDecode, TellsWhatTheHeaderSays) {
  const auto info = [](const std::string& name) { return ImageDecoder(golden(name), name).info(); };
  EXPECT_EQ(info("jpeg_grey").channels, 1);
  EXPECT_EQ(info("jpeg_rgb_420").channels, 3);
  EXPECT_EQ(info("jpeg_cmyk").channels, 4);
  EXPECT_EQ(info("jpeg_cmyk").format, ImageFormat::jpeg);
  EXPECT_EQ(info("png_grey_alpha_16").channels, 2);
  EXPECT_EQ(info("png_palette_4").channels, 3);
  EXPECT_EQ(info("png_rgb_alpha_8").channels, 4);
  EXPECT_EQ(info("png_rgb_8").format, ImageFormat::png);
  EXPECT_EQ(info("jpeg_wide_420").width, 64);
  EXPECT_EQ(info("jpeg_wide_420").height, 48);
}

TEST(ImageDecode, TakesOfDamagedFilesWhatPillowTakes) {
  int taken = 0, refused = 0;
  for (const auto& entry : image_goldens().at("damage")) {
    SCOPED_TRACE(entry.at("name").get<std::string>());
    const Bytes bytes = golden_file(entry);
    if (entry.contains("error")) {
      expect_error<IoError>([&] { decode_image(bytes, "some.jpg"); }, {"some.jpg"});
      ++refused;
    } else {
      // What libjpeg-turbo smooths over missing coefficients differs between its versions.
      const bool smoothed = entry.at("name") == "progressive_ended_early";
      EXPECT_LE(largest_difference(decode_image(bytes, "x").pixels, golden_pixels(entry)), smoothed ? 16 : 0);
      ++taken;
    }
  }
  EXPECT_GE(taken, 15);
  EXPECT_GE(refused, 15);
}

TEST(ImageDecode, TakesAJpegThatLacksOnlyItsEnd) {
  Bytes bytes = golden("jpeg_wide_420");
  const Image whole = decode_image(bytes, "x");
  bytes.resize(bytes.size() - 2);
  EXPECT_EQ(decode_image(bytes, "x").pixels, whole.pixels);
}

TEST(ImageDecode, RefusesCutPngs) {
  for (const std::string name : {"png_rgb_8", "png_rgb_16_interlaced", "png_palette_8", "png_filtered"}) {
    const Bytes whole = golden(name);
    // Behind the pixels stand 4 bytes of checksum and 12 of the end, which are not asked for.
    for (std::size_t n = 8; n + 40 < whole.size(); n += 7) {
      const Bytes cut(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(n));
      expect_error<IoError>([&] { decode_image(cut, "cut.png"); }, {"cut.png", "PNG"});
    }
  }
  Bytes damaged = golden("png_rgb_8");
  damaged[damaged.size() - 40] ^= 0xFF;
  expect_error<IoError>([&] { decode_image(damaged, "x"); }, {"PNG"});
}

TEST(ImageDecode, RegionsHaveThePixelsOfTheWhole) {
  std::uint32_t random = 1;
  const auto below = [&](std::int64_t n) {
    random = random * 1664525U + 1013904223U;
    return static_cast<std::int64_t>((std::uint64_t{random} * static_cast<std::uint64_t>(n)) >> 32);
  };
  for (const auto& entry : image_goldens().at("decode")) {
    SCOPED_TRACE(entry.at("name").get<std::string>());
    const Bytes bytes = golden_file(entry);
    ImageDecoder decoder(bytes, "x");
    Image whole, part;
    decoder.decode(whole);
    for (int i = 0; i < 40; ++i) {
      PixelRegion region{.left = below(whole.width), .top = below(whole.height)};
      region.width = 1 + below(whole.width - region.left);
      region.height = 1 + below(whole.height - region.top);
      const ImagePatch patch = decoder.decode(region, 1, part);
      ASSERT_EQ(patch.full_width, whole.width);
      ASSERT_LE(patch.left, region.left);
      ASSERT_LE(patch.top, region.top);
      ASSERT_GE(patch.left + part.width, region.left + region.width);
      ASSERT_GE(patch.top + part.height, region.top + region.height);
      for (std::int64_t y = 0; y < region.height; ++y) {
        ASSERT_EQ(std::memcmp(whole.row(region.top + y) + 3 * region.left,
                              part.row(region.top + y - patch.top) + 3 * (region.left - patch.left),
                              static_cast<std::size_t>(3 * region.width)),
                  0)
            << region.width << "x" << region.height << " at " << region.left << ", " << region.top << ", row " << y;
      }
    }
  }
}

TEST(ImageDecode, DecodesOnlyThePartOfAJpeg) {
  const Bytes bytes = golden("jpeg_wide_420");
  ImageDecoder decoder(bytes, "x");
  Image part;
  const ImagePatch patch = decoder.decode({.left = 40, .top = 20, .width = 6, .height = 5}, 1, part);
  EXPECT_LE(part.width, 32);  // whole blocks of 16 around it
  EXPECT_EQ(part.height, 5);
  EXPECT_EQ(patch.top, 20);
}

TEST(ImageDecode, ShrinksLikeAMeanOfPixels) {
  for (const std::string name : {"jpeg_wide_420", "jpeg_progressive", "jpeg_grey", "jpeg_cmyk"}) {
    const Bytes bytes = golden(name);
    ImageDecoder decoder(bytes, name);
    Image whole, small;
    decoder.decode(whole);
    for (const int shrink : {2, 4, 8}) {
      const ImagePatch patch =
          decoder.decode({.left = 0, .top = 0, .width = whole.width, .height = whole.height}, shrink, small);
      EXPECT_EQ(patch.shrink, shrink);
      ASSERT_EQ(small.width, (whole.width + shrink - 1) / shrink);
      ASSERT_EQ(small.height, (whole.height + shrink - 1) / shrink);
      double difference = 0;
      std::int64_t count = 0;
      for (std::int64_t y = 0; (y + 1) * shrink <= whole.height; ++y) {
        for (std::int64_t x = 0; (x + 1) * shrink <= whole.width; ++x, ++count) {
          double mean = 0;
          for (int i = 0; i < shrink * shrink; ++i) {
            mean += whole.row(y * shrink + i / shrink)[3 * (x * shrink + i % shrink)];
          }
          difference += std::abs(mean / (shrink * shrink) - small.row(y)[3 * x]);
        }
      }
      // Leaving out frequencies is not a mean, but near it; a shift by one pixel would be 3 and more.
      EXPECT_LT(difference / static_cast<double>(count), 2.5) << name << " by " << shrink;
    }
    const ImagePatch patch = decoder.decode({.left = 9, .top = 9, .width = 10, .height = 7}, 2, small);
    EXPECT_LE(patch.left, 4);
    EXPECT_GE(patch.left + small.width, 10);
    EXPECT_EQ(patch.top, 4);
    EXPECT_EQ(small.height, 4);
  }
}

TEST(ImageDecode, RefusesWhatIsNoPicture) {
  expect_error<IoError>([] { decode_image({}, "empty.jpg"); }, {"empty.jpg", "JPEG or PNG", "no bytes"});
  expect_error<IoError>([] { decode_image(Bytes{'G', 'I', 'F', '8', '9', 'a'}, "a"); }, {"GIF"});
  expect_error<IoError>([] { decode_image(Bytes{1, 2, 3, 4, 5}, "a"); }, {"5 bytes that start with 01 02 03 04"});
  expect_error<IoError>([] { decode_image(Bytes{0xFF, 0xD8, 0xFF, 0xD9}, "a"); }, {"JPEG"});
}

TEST(ImageDecode, RefusesHostileSizes) {
  Bytes jpeg = golden("jpeg_rgb_420");
  const Bytes sof{0xFF, 0xC0};
  const auto at = std::search(jpeg.begin(), jpeg.end(), sof.begin(), sof.end()) - jpeg.begin();
  for (int i = 5; i < 9; ++i) jpeg[static_cast<std::size_t>(at + i)] = 0xFE;
  expect_error<IoError>([&] { decode_image(jpeg, "huge.jpg"); }, {"huge.jpg", "65278x65278"});
  const Bytes png = golden("png_rgb_8");  // 13x9
  EXPECT_NO_THROW(decode_image(png, "x", {.max_pixels = 117}));
  expect_error<IoError>([&] { decode_image(png, "x", {.max_pixels = 116}); }, {"1 to 116 pixels", "13x9"});
  expect_error<IoError>([&] { decode_image(png, "x", {.max_bytes = 100}); }, {"at most 100 bytes"});
}

TEST(ImageDecode, RefusesRegionsOutside) {
  const Bytes bytes = golden("jpeg_grey");  // 37x29
  ImageDecoder decoder(bytes, "x");
  Image image;
  for (const PixelRegion& region : {PixelRegion{-1, 0, 5, 5}, PixelRegion{0, 0, 38, 5}, PixelRegion{30, 0, 8, 5},
                                    PixelRegion{0, 25, 5, 5}, PixelRegion{0, 0, 0, 5}}) {
    expect_error<ShapeError>([&] { decoder.decode(region, 1, image); }, {"37x29"});
  }
  expect_error<Error>([&] { decoder.decode({0, 0, 5, 5}, 3, image); }, {"1, 2, 4 or 8"});
}

TEST(ImageDecode, StopsAtTooManyScans) {
  // A progressive file whose last scan is there three hundred times.
  const Bytes bytes = golden("jpeg_progressive");
  const Bytes start{0xFF, 0xDA};
  const auto last = std::find_end(bytes.begin(), bytes.end(), start.begin(), start.end());
  Bytes many(bytes.begin(), bytes.end() - 2);
  for (int i = 0; i < 300; ++i) many.insert(many.end(), last, bytes.end() - 2);
  many.insert(many.end(), {0xFF, 0xD9});
  expect_error<IoError>([&] { decode_image(many, "slow.jpg"); }, {"slow.jpg"});
}

TEST(ImageFile, ReadsAndRefuses) {
  const TemporaryDir dir;
  const Bytes bytes = golden("png_rgb_8");
  const Image expected = decode_image(bytes, "x");
  EXPECT_EQ(read_image(write_file(dir.path() / "png-in-disguise.JPEG", bytes)).pixels, expected.pixels);
  expect_error<IoError>([&] { read_image(dir.path() / "missing.jpg"); }, {"missing.jpg", "No such file"});
  expect_error<IoError>([&] { read_image(dir.path()); }, {"expected a file"});
  ASSERT_EQ(::mkfifo((dir.path() / "pipe").c_str(), 0600), 0);
  expect_error<IoError>([&] { read_image(dir.path() / "pipe"); }, {"expected a file"});
  expect_error<IoError>([&] { read_image(write_file(dir.path() / "big", bytes), {.max_bytes = 10}); },
                        {"at most 10 bytes"});
}

}  // namespace
}  // namespace halfstep::data
