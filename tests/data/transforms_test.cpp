// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/transforms.h"

#include <bit>
#include <cmath>
#include <set>

#include "halfstep/core/error.h"
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

/// The picture of a file before normalisation, mirrored where the pipeline says so.
Image make(const ImageTransform& transform, const Bytes& file, const SampleKey& key, bool* mirrored = nullptr) {
  TransformScratch scratch;
  ImageDecoder picture(file, "x");
  const bool mirror = ImagePipeline(transform).make(picture, key, scratch);
  if (mirrored != nullptr) *mirrored = mirror;
  return scratch.result;
}

/// What the pipeline writes.
std::vector<float> run(const ImageTransform& transform, const Bytes& file, const SampleKey& key) {
  const ImagePipeline pipeline(transform);
  std::vector<float> out(static_cast<std::size_t>(3 * pipeline.size() * pipeline.size()), -100.0F);
  TransformScratch scratch;
  ImageDecoder picture(file, "x");
  pipeline.run(picture, key, scratch, out.data());
  return out;
}

/// Neither flips nor colours.
TrainTransform plain(std::int64_t size, CropKind crop = CropKind::none) {
  return {.size = size, .crop = crop, .flip = 0, .normalization = {}, .scaled_decode = false};
}

Bytes wide() { return golden_file(image_golden("decode", "jpeg_wide_420")); }  // 64x48

TEST(Transforms, EvaluationIsResizeAndMiddle) {
  for (const auto& entry : image_goldens().at("eval")) {
    SCOPED_TRACE(entry.at("name").get<std::string>());
    const EvalTransform transform{.size = entry.at("size"), .resize = entry.at("resize")};
    EXPECT_EQ(largest_difference(make(transform, golden_file(entry), {}).pixels, golden_pixels(entry)), 0);
  }
}

TEST(Transforms, NormalisesAsPyTorchDoes) {
  // Three pictures' worth of pixels with every value, through the whole pipeline: a PNG would hide nothing, but making
  // one here would; the values are read off where the decoded picture has them.
  const Bytes file = golden_file(image_golden("decode", "png_rgb_8"));  // 13x9
  const Image image = decode_image(file, "x");
  const TrainTransform transform{.size = 13, .crop = CropKind::none, .flip = 0};
  const Image resized = make(transform, file, {});
  const std::vector<float> out = run(transform, file, {});
  const auto& expected = image_goldens().at("normalized");
  std::set<int> seen;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::uint8_t p = resized.pixels[i];
    seen.insert(p);
    ASSERT_EQ(std::bit_cast<std::uint32_t>(out[i]), expected[i % 3][p].get<std::uint32_t>()) << int{p};
  }
  EXPECT_GT(seen.size(), 150U);
  EXPECT_EQ(image.width, 13);
}

TEST(Transforms, RoundsOnceToSixteenBits) {
  const TrainTransform transform{.size = 24, .crop = CropKind::none, .flip = 0};
  const std::vector<float> exact = run(transform, wide(), {});
  for (const DType dtype : {f16, bf16}) {
    const ImagePipeline pipeline(transform, dtype);
    std::vector<std::uint16_t> out(exact.size());
    TransformScratch scratch;
    const Bytes file = wide();
    ImageDecoder picture(file, "x");
    pipeline.run(picture, {}, scratch, out.data());
    for (std::size_t i = 0; i < out.size(); ++i) {
      ASSERT_EQ(out[i], dtype == f16 ? Half(exact[i]).bits : BFloat16(exact[i]).bits);
    }
  }
}

TEST(Transforms, FlipsHalfOfThePictures) {
  TrainTransform transform = plain(32);
  const Image image = make(transform, wide(), {});
  std::vector<float> straight, mirrored;
  for (std::int64_t y = 0; y < 32; ++y) {
    for (std::int64_t x = 0; x < 32; ++x) {
      for (int c = 0; c < 3; ++c) {
        straight.push_back(static_cast<float>(image.row(y)[3 * x + c]) / 255.0F);
        mirrored.push_back(static_cast<float>(image.row(y)[3 * (31 - x) + c]) / 255.0F);
      }
    }
  }
  transform.flip = 0.5;
  int flips = 0;
  for (std::int64_t sample = 0; sample < 400; ++sample) {
    const std::vector<float> out = run(transform, wide(), {.seed = 1, .epoch = 2, .sample = sample});
    ASSERT_TRUE(out == straight || out == mirrored);
    flips += out == mirrored ? 1 : 0;
  }
  // Of 400 with probability 1/2: 200, and 10 a standard deviation.
  EXPECT_NEAR(flips, 200, 50);
  transform.flip = 1;
  EXPECT_EQ(run(transform, wide(), {}), mirrored);
}

TEST(Transforms, RandomPartsAreWithinTheirBounds) {
  const TrainTransform transform;
  RandomStream random(3);
  double area_sum = 0, area_low = 1, area_high = 0, ratio_low = 9, ratio_high = 0;
  constexpr int kTries = 4000;
  std::set<std::int64_t> lefts;
  for (int i = 0; i < kTries; ++i) {
    const PixelRegion region = random_resized_region(500, 400, transform, random);
    ASSERT_GE(region.left, 0);
    ASSERT_GE(region.top, 0);
    ASSERT_LE(region.left + region.width, 500);
    ASSERT_LE(region.top + region.height, 400);
    const double area = static_cast<double>(region.width * region.height) / 200000.0;
    const double ratio = static_cast<double>(region.width) / static_cast<double>(region.height);
    area_sum += area;
    area_low = std::min(area_low, area);
    area_high = std::max(area_high, area);
    ratio_low = std::min(ratio_low, ratio);
    ratio_high = std::max(ratio_high, ratio);
    lefts.insert(region.left);
  }
  // Sides are rounded to pixels, which moves an area or a shape by a percent.
  EXPECT_NEAR(area_low, 0.08, 0.01);
  EXPECT_GT(area_high, 0.9);
  EXPECT_NEAR(ratio_low, 0.75, 0.01);
  EXPECT_NEAR(ratio_high, 4.0 / 3, 0.02);
  // Uniform from 0.08 to 1 has the mean 0.54, but the largest parts often don't fit: 0.4525 by four million draws of
  // area and shape with NumPy. The deviation is 0.23, so that of the mean of 4,000 is 0.004.
  EXPECT_NEAR(area_sum / kTries, 0.4525, 0.018);
  EXPECT_GT(lefts.size(), 200U);
}

TEST(Transforms, PicturesOfNoAllowedShapeGiveTheirMiddle) {
  TrainTransform transform;
  transform.min_area = transform.max_area = 1;
  RandomStream random(3);
  EXPECT_EQ(random_resized_region(1000, 30, transform, random), (PixelRegion{480, 0, 40, 30}));
  EXPECT_EQ(random_resized_region(30, 1000, transform, random), (PixelRegion{0, 480, 30, 40}));
  EXPECT_EQ(random_resized_region(1, 1, {}, random), (PixelRegion{0, 0, 1, 1}));
}

TEST(Transforms, ARandomPartIsThatPartResized) {
  const TrainTransform transform = plain(16, CropKind::random_resized);
  const Image whole = decode_image(wide(), "x");
  for (std::int64_t sample = 0; sample < 20; ++sample) {
    const Image result = make(transform, wide(), {.seed = 5, .sample = sample});
    // Which part it was is not told: all that there could be are tried until one fits.
    bool found = false;
    for (std::int64_t height = 8; height <= 48 && !found; ++height) {
      for (std::int64_t width = height * 3 / 4 - 1; width <= std::min<std::int64_t>(height * 4 / 3 + 2, 64) && !found;
           ++width) {
        for (std::int64_t top = 0; top + height <= 48 && !found; ++top) {
          for (std::int64_t left = 0; left + width <= 64 && !found; ++left) {
            // The first pixel settles most of them.
            const ImageView part = whole.view({left, top, width, height});
            const Image corner = resize(part, {.width = 16, .height = 16, .window = {0, 0, 1, 1}});
            if (!std::equal(corner.pixels.begin(), corner.pixels.end(), result.pixels.begin())) continue;
            found = resize(part, {.width = 16, .height = 16}).pixels == result.pixels;
          }
        }
      }
    }
    EXPECT_TRUE(found) << sample;
    if (sample == 1) break;  // each takes long
  }
}

TEST(Transforms, PaddedPicturesAreShiftedByUpToThePadding) {
  TrainTransform transform = plain(32, CropKind::padded);
  transform.padding = 2;
  const Image base = make(plain(32), wide(), {});
  std::map<std::pair<int, int>, int> counts;
  for (std::int64_t sample = 0; sample < 500; ++sample) {
    const Image moved = make(transform, wide(), {.sample = sample});
    int fits = 0;
    for (int dy = -2; dy <= 2; ++dy) {
      for (int dx = -2; dx <= 2; ++dx) {
        bool same = true;
        for (int y = 0; y < 32 && same; ++y) {
          for (int x = 0; x < 32 && same; ++x) {
            const int from_y = y - dy, from_x = x - dx;
            const bool inside = from_y >= 0 && from_y < 32 && from_x >= 0 && from_x < 32;
            for (int c = 0; c < 3; ++c)
              same = same && moved.row(y)[3 * x + c] == (inside ? base.row(from_y)[3 * from_x + c] : 0);
          }
        }
        if (same) {
          ++fits;
          ++counts[{dy, dx}];
        }
      }
    }
    ASSERT_EQ(fits, 1);
  }
  EXPECT_EQ(counts.size(), 25U);
  // 500 in 25 places: 20 each with a standard deviation of 4.4; five of them.
  for (const auto& [place, n] : counts) EXPECT_NEAR(n, 20, 22);
}

TEST(Transforms, DependOnSeedEpochAndSampleOnly) {
  TrainTransform transform;
  transform.size = 20;
  transform.jitter = {.brightness = 0.4, .contrast = 0.4, .saturation = 0.4, .hue = 0.1};
  const SampleKey key{.seed = 7, .epoch = 3, .sample = 11};
  const std::vector<float> first = run(transform, wide(), key);
  run(transform, wide(), {.seed = 8});
  EXPECT_EQ(run(transform, wide(), key), first);
  for (const SampleKey& other : {SampleKey{8, 3, 11}, SampleKey{7, 4, 11}, SampleKey{7, 3, 12}}) {
    EXPECT_NE(run(transform, wide(), other), first);
  }
}

TEST(Transforms, JitterChangesColorsWithinItsBounds) {
  TrainTransform transform = plain(32);
  const Image base = make(transform, wide(), {});
  transform.jitter.brightness = 0.5;
  double low = 9, high = 0;
  for (std::int64_t sample = 0; sample < 200; ++sample) {
    const Image changed = make(transform, wide(), {.sample = sample});
    double sum = 0, base_sum = 0;
    for (std::size_t i = 0; i < base.pixels.size(); ++i) {
      if (base.pixels[i] > 160) continue;  // over 170 a factor of 1.5 is clipped
      sum += changed.pixels[i];
      base_sum += base.pixels[i];
    }
    low = std::min(low, sum / base_sum);
    high = std::max(high, sum / base_sum);
  }
  EXPECT_NEAR(low, 0.5, 0.04);
  EXPECT_NEAR(high, 1.5, 0.04);
  // Turning one step on leaves the choices of the others as they were.
  TrainTransform crop = plain(32, CropKind::padded);
  const Image moved = make(crop, wide(), {.sample = 9});
  crop.jitter.brightness = 1e-9;
  EXPECT_LE(largest_difference(make(crop, wide(), {.sample = 9}).pixels, moved.pixels), 1);
}

TEST(Transforms, ScaledDecodingIsNearTheWholeOne) {
  TrainTransform transform = plain(8, CropKind::random_resized);
  transform.min_area = 0.9;
  double difference = 0;
  int n = 0;
  for (std::int64_t sample = 0; sample < 20; ++sample) {
    transform.scaled_decode = false;
    const Image exact = make(transform, wide(), {.sample = sample});
    transform.scaled_decode = true;
    const Image fast = make(transform, wide(), {.sample = sample});
    EXPECT_FALSE(exact.pixels == fast.pixels);  // 40 pixels and more are over four times 8: it was used
    for (std::size_t i = 0; i < exact.pixels.size(); ++i, ++n)
      difference += std::abs(int{exact.pixels[i]} - int{fast.pixels[i]});
  }
  EXPECT_LT(difference / n, 2.0);
}

TEST(Transforms, BatchesAreChannelsLast) {
  const Tensor batch = empty_image_batch(3, 8, bf16);
  EXPECT_EQ(batch.sizes(), (Shape{3, 3, 8, 8}));
  EXPECT_EQ(batch.dtype(), bf16);
  EXPECT_TRUE(batch.is_contiguous(MemoryFormat::channels_last));
  EXPECT_EQ(batch.stride(1), 1);
}

TEST(Transforms, ReadsPicturesForAPrediction) {
  const TemporaryDir dir;
  const std::vector<std::filesystem::path> paths{
      write_file(dir.path() / "a.jpg", wide()),
      write_file(dir.path() / "b", golden_file(image_golden("decode", "png_filtered")))};
  const EvalTransform transform{.size = 16, .resize = 20};
  const Tensor batch = read_images(paths, transform);
  ASSERT_EQ(batch.sizes(), (Shape{2, 3, 16, 16}));
  const std::vector<float> first = run(transform, wide(), {});
  for (std::int64_t y = 0; y < 16; ++y) {
    for (std::int64_t c = 0; c < 3; ++c) {
      ASSERT_EQ(batch[0][c][y][5].item<float>(), first[static_cast<std::size_t>((y * 16 + 5) * 3 + c)]);
    }
  }
  EXPECT_NE(batch[1][0][0][0].item<float>(), batch[0][0][0][0].item<float>());
  const std::vector<std::filesystem::path> missing{dir.path() / "none.jpg"};
  expect_error<IoError>([&] { read_images(missing); }, {"none.jpg"});
}

TEST(Transforms, RefuseWhatMakesNoSense) {
  const auto refuses = [](auto change, const std::string& text) {
    TrainTransform transform;
    change(transform);
    expect_error<Error>([&] { ImagePipeline{transform}; }, {text});
  };
  refuses([](TrainTransform& t) { t.size = 0; }, "size");
  refuses([](TrainTransform& t) { t.size = 8193; }, "a size from 1 to 8192, got 8193");
  refuses([](TrainTransform& t) { t.min_area = 0; }, "area");
  refuses([](TrainTransform& t) { t.max_area = 0.01; }, "area");
  refuses([](TrainTransform& t) { t.min_ratio = -1; }, "ratio");
  refuses([](TrainTransform& t) { t.max_ratio = INFINITY; }, "ratio");
  refuses([](TrainTransform& t) { t.padding = -1; }, "padding");
  refuses([](TrainTransform& t) { t.flip = 1.5; }, "flip");
  refuses([](TrainTransform& t) { t.jitter.contrast = -1; }, "jitter");
  refuses([](TrainTransform& t) { t.jitter.hue = 0.7; }, "hue");
  refuses([](TrainTransform& t) { t.normalization.std[1] = 0; }, "standard deviation");
  expect_error<Error>([] { ImagePipeline(EvalTransform{.size = 224, .resize = 200}); }, {"resize", "200"});
  expect_error<DTypeError>([] { ImagePipeline(EvalTransform{}, f64); }, {"f64"});
}

}  // namespace
}  // namespace halfstep::data
