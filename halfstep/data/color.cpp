// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/color.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "halfstep/core/fail.h"

namespace halfstep::data {
namespace {

void check_factor(const char* op, double factor) {
  if (!(factor >= 0) || !std::isfinite(factor)) fail<Error>("{}: expected a factor of at least 0, got {}", op, factor);
}

/// Luma with 16 bits behind the point, rounded: ITU-R 601-2.
unsigned luma(const std::uint8_t* p) { return (p[0] * 19595U + p[1] * 38470U + p[2] * 7471U + 0x8000U) >> 16; }

/// from + factor (to - from) in float32, cut off after the point as Pillow's blend does, and clipped.
std::uint8_t blend(unsigned from, unsigned to, float factor) {
  const float value = static_cast<float>(from) + factor * (static_cast<float>(to) - static_cast<float>(from));
  return static_cast<std::uint8_t>(std::clamp(value, 0.0F, 255.0F));
}

/// blend(from, p, factor) for every p.
std::array<std::uint8_t, 256> blend_table(unsigned from, double factor) {
  std::array<std::uint8_t, 256> table;
  for (unsigned p = 0; p < 256; ++p) table[p] = blend(from, p, static_cast<float>(factor));
  return table;
}

void map(Image& image, const std::array<std::uint8_t, 256>& table) {
  for (std::uint8_t& p : image.pixels) p = table[p];
}

struct Hsv {
  unsigned hue, saturation, value;  // 0 to 255 each
};

Hsv to_hsv(const std::uint8_t* p) {
  const int red = p[0], green = p[1], blue = p[2];
  const int most = std::max({red, green, blue}), least = std::min({red, green, blue});
  if (most == least) return {0, 0, static_cast<unsigned>(most)};
  const auto range = static_cast<float>(most - least);
  const auto below = [&](int channel) { return static_cast<float>(most - channel) / range; };
  double sixths = 0;
  if (red == most) {
    sixths = static_cast<double>(below(blue) - below(green));
  } else if (green == most) {
    sixths = 2.0 + static_cast<double>(below(red)) - static_cast<double>(below(blue));
  } else {
    sixths = 4.0 + static_cast<double>(below(green)) - static_cast<double>(below(red));
  }
  const double turn = std::fmod(static_cast<double>(static_cast<float>(sixths)) / 6.0 + 1.0, 1.0);
  const double hue = static_cast<double>(static_cast<float>(turn)) * 255.0;
  const double saturation = static_cast<double>(range / static_cast<float>(most)) * 255.0;
  return {static_cast<unsigned>(std::clamp(hue, 0.0, 255.0)), static_cast<unsigned>(std::clamp(saturation, 0.0, 255.0)),
          static_cast<unsigned>(most)};
}

void from_hsv(const Hsv& hsv, std::uint8_t* p) {
  const auto value = static_cast<std::uint8_t>(hsv.value);
  if (hsv.saturation == 0) {
    p[0] = p[1] = p[2] = value;
    return;
  }
  const double saturation = static_cast<double>(static_cast<float>(hsv.saturation) / 255.0F);
  const double sixths = static_cast<double>(hsv.hue) * 6.0 / 255.0;
  const double sector = std::floor(sixths);
  const double part = static_cast<double>(static_cast<float>(sixths - sector));
  const auto scaled = [&](double by) {
    return static_cast<std::uint8_t>(std::clamp(std::round(static_cast<double>(hsv.value) * by), 0.0, 255.0));
  };
  const std::uint8_t low = scaled(1.0 - saturation);
  const std::uint8_t falling = scaled(1.0 - saturation * part);
  const std::uint8_t rising = scaled(1.0 - saturation * (1.0 - part));
  const std::array<std::array<std::uint8_t, 3>, 6> colors{{{value, rising, low},
                                                           {falling, value, low},
                                                           {low, value, rising},
                                                           {low, falling, value},
                                                           {rising, low, value},
                                                           {value, low, falling}}};
  std::copy_n(colors[static_cast<std::size_t>(sector) % 6].begin(), 3, p);
}

}  // namespace

void adjust_brightness(Image& image, double factor) {
  check_factor("adjust_brightness", factor);
  map(image, blend_table(0, factor));
}

void adjust_contrast(Image& image, double factor) {
  check_factor("adjust_contrast", factor);
  const std::size_t n = image.pixels.size() / 3;
  if (n == 0) return;
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < n; ++i) sum += luma(image.pixels.data() + 3 * i);
  const auto mean = static_cast<unsigned>(static_cast<double>(sum) / static_cast<double>(n) + 0.5);
  map(image, blend_table(mean, factor));
}

void adjust_saturation(Image& image, double factor) {
  check_factor("adjust_saturation", factor);
  const auto f = static_cast<float>(factor);
  for (std::size_t i = 0; i + 3 <= image.pixels.size(); i += 3) {
    std::uint8_t* p = image.pixels.data() + i;
    const unsigned grey = luma(p);
    for (int c = 0; c < 3; ++c) p[c] = blend(grey, p[c], f);
  }
}

void adjust_hue(Image& image, double shift) {
  if (!(shift >= -0.5 && shift <= 0.5)) fail<Error>("adjust_hue: expected a shift from -0.5 to 0.5, got {}", shift);
  const auto steps = static_cast<unsigned>(static_cast<int>(shift * 255));
  for (std::size_t i = 0; i + 3 <= image.pixels.size(); i += 3) {
    Hsv hsv = to_hsv(image.pixels.data() + i);
    hsv.hue = (hsv.hue + steps) & 255U;
    from_hsv(hsv, image.pixels.data() + i);
  }
}

}  // namespace halfstep::data
