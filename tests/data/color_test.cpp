// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/color.h"

#include "halfstep/core/error.h"
#include "tests/data/idx_files.h"
#include "tests/data/image_goldens.h"

namespace halfstep::data {
namespace {

using test::expect_error;
using test::golden_pixels;
using test::image_goldens;
using test::largest_difference;

TEST(Color, GivesPillowsPixels) {
  const auto& color = image_goldens().at("color");
  int cases = 0;
  for (const auto& entry : color.at("cases")) {
    SCOPED_TRACE(entry.at("name").get<std::string>());
    Image image{.width = color.at("width"), .height = color.at("height"), .pixels = golden_pixels(color)};
    const std::string op = entry.at("op");
    const double factor = entry.at("factor");
    if (op == "brightness") adjust_brightness(image, factor);
    if (op == "contrast") adjust_contrast(image, factor);
    if (op == "saturation") adjust_saturation(image, factor);
    if (op == "hue") adjust_hue(image, factor);
    EXPECT_EQ(largest_difference(image.pixels, golden_pixels(entry)), 0);
    ++cases;
  }
  EXPECT_EQ(cases, 25);
}

TEST(Color, RefusesWhatMakesNoSense) {
  Image image = test::noise_image(2, 2, 1);
  expect_error<Error>([&] { adjust_brightness(image, -0.1); }, {"adjust_brightness", "-0.1"});
  expect_error<Error>([&] { adjust_contrast(image, std::nan("")); }, {"adjust_contrast"});
  expect_error<Error>([&] { adjust_saturation(image, INFINITY); }, {"adjust_saturation"});
  expect_error<Error>([&] { adjust_hue(image, 0.6); }, {"adjust_hue", "0.6"});
}

}  // namespace
}  // namespace halfstep::data
