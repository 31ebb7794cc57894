// SPDX-License-Identifier: Apache-2.0
// The rows of pixels of a detector's input.
#include "halfstep/data/detection_kernels_internal.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "halfstep/core/random.h"
#include "tests/support/test_data.h"

namespace halfstep::data {
namespace {

/// The textbook's way back from hue (0 to 180), saturation and value (0 to 255), in float64.
std::array<double, 3> rgb_of(double hue, double saturation, double value) {
  const double chroma = value * saturation / 255, sector = hue / 30, least = value - chroma;
  const double second = chroma * (1 - std::abs(std::fmod(sector, 2.0) - 1));
  const std::array<std::array<double, 3>, 6> sectors = {{{chroma, second, 0},
                                                         {second, chroma, 0},
                                                         {0, chroma, second},
                                                         {0, second, chroma},
                                                         {second, 0, chroma},
                                                         {chroma, 0, second}}};
  std::array<double, 3> rgb = sectors[static_cast<std::size_t>(sector) % 6];
  for (double& c : rgb) c += least;
  return rgb;
}

// Hue, saturation and value are bit-identical to OpenCV's. On the way back OpenCV cuts to whole numbers, where here
// they are rounded: as the formula says in float64, but for float32's error of some 1e-5 near a half, and at most one
// above.
TEST(DetectionKernels, ColoursAreOpenCvs) {
  std::ifstream file(test::goldens_dir() / "hsv.json");
  const nlohmann::json golden = nlohmann::json::parse(file);
  const auto bytes = [](const nlohmann::json& json) {
    const std::string hex = json.get<std::string>();
    std::vector<std::uint8_t> result;
    for (std::size_t i = 0; i < hex.size(); i += 2) {
      result.push_back(static_cast<std::uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
    }
    return result;
  };
  const std::vector<std::uint8_t> colours = bytes(golden.at("colours")), hsv = bytes(golden.at("hsv"));
  for (const nlohmann::json& entry : golden.at("entries")) {
    const auto factors = entry.at("factors").get<std::vector<double>>();
    const std::vector<std::uint8_t> want = bytes(entry.at("rgb"));
    ASSERT_EQ(want.size(), colours.size());
    std::vector<std::uint32_t> words;
    for (std::size_t i = 0; i < colours.size(); i += 3) {
      words.push_back(colours[i] | colours[i + 1] << 8 | colours[i + 2] << 16 | 0xAB000000U);
    }
    change_hsv(words.data(), std::ssize(words), hsv_tables(factors[0], factors[1], factors[2]));
    std::vector<std::uint8_t> got(colours.size() + 16);
    pack_pixels(words.data(), std::ssize(words), got.data());
    for (std::size_t i = 0; i < want.size(); i += 3) {
      const auto exact =
          rgb_of(std::floor(std::fmod(hsv[i] * factors[0], 180)), std::floor(std::min(hsv[i + 1] * factors[1], 255.0)),
                 std::floor(std::min(hsv[i + 2] * factors[2], 255.0)));
      for (std::size_t c = 0; c < 3; ++c) {
        EXPECT_NEAR(got[i + c], exact[c], 0.5 + 1e-4) << i << " factor " << factors[0];
        const int above = got[i + c] - want[i + c];
        EXPECT_TRUE(above == 0 || above == 1) << above << " at " << i << " factor " << factors[0];
      }
    }
  }
}

// Against bilinear interpolation in float64: the weights have 8 bits, and two roundings are half a level each: the
// places are off by 2^-9 of a pixel, which between levels 0 and 255 is half a level, along both axes.
TEST(DetectionKernels, SamplesBetweenPixels) {
  constexpr std::int64_t kWidth = 13, kHeight = 9;
  std::vector<std::uint8_t> picture(3 * kWidth * kHeight + 16);
  RandomStream random(4);
  for (std::uint8_t& p : picture) p = static_cast<std::uint8_t>(random());
  std::vector<std::int32_t> xs, ys;
  for (int i = 0; i < 1003; ++i) {
    xs.push_back(static_cast<std::int32_t>(random.uniform(-2, kWidth + 1) * 65536));
    ys.push_back(static_cast<std::int32_t>(random.uniform(-2, kHeight + 1) * 65536));
  }
  std::vector<std::uint32_t> out(xs.size());
  sample_pixels(picture.data(), 3 * kWidth, kWidth, kHeight, xs.data(), ys.data(), std::ssize(xs), out.data());
  for (std::size_t i = 0; i < xs.size(); ++i) {
    const double x = std::clamp(xs[i] / 65536.0, 0.0, kWidth - 1.0),
                 y = std::clamp(ys[i] / 65536.0, 0.0, kHeight - 1.0);
    const auto x0 = static_cast<std::int64_t>(x), y0 = static_cast<std::int64_t>(y);
    const std::int64_t x1 = std::min(x0 + 1, kWidth - 1), y1 = std::min(y0 + 1, kHeight - 1);
    const double wx = x - static_cast<double>(x0), wy = y - static_cast<double>(y0);
    for (std::int64_t c = 0; c < 3; ++c) {
      const auto at = [&](std::int64_t px, std::int64_t py) {
        return static_cast<double>(picture[static_cast<std::size_t>(3 * (py * kWidth + px) + c)]);
      };
      const double want =
          (1 - wy) * ((1 - wx) * at(x0, y0) + wx * at(x1, y0)) + wy * ((1 - wx) * at(x0, y1) + wx * at(x1, y1));
      EXPECT_NEAR(out[i] >> (8 * c) & 255, want, 2.01) << i;
    }
  }
}

TEST(DetectionKernels, MixesWithRounding) {
  for (const std::uint32_t share : {0U, 1U, 20000U, 32768U, 65535U, 65536U}) {
    std::vector<std::uint32_t> a(37), b(37);
    for (std::size_t i = 0; i < a.size(); ++i) {
      a[i] = static_cast<std::uint32_t>(i * 0x01030507U);
      b[i] = static_cast<std::uint32_t>(0xFFFFFFFFU - i * 0x07010503U);
    }
    std::vector<std::uint32_t> out = a;
    mix_pixels(out.data(), b.data(), std::ssize(out), share);
    for (std::size_t i = 0; i < a.size(); ++i) {
      for (int shift = 0; shift < 32; shift += 8) {
        const double p = share / 65536.0;
        const double want = p * (a[i] >> shift & 255) + (1 - p) * (b[i] >> shift & 255);
        EXPECT_NEAR(out[i] >> shift & 255, want, 0.5 + 1e-9);
      }
    }
  }
}

}  // namespace
}  // namespace halfstep::data
