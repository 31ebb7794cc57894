// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "halfstep/core/export.h"
#include "halfstep/data/mnist.h"

namespace halfstep::data {

/// Number of pixels of a built-in digit, 28 by 28.
inline constexpr std::int64_t kDigitPixels = 28 * 28;

/// Options of the built-in digits: equal options give equal images.
struct DigitOptions {
  std::uint64_t seed = 0;
  /// Number of images; 0: 60,000 for training, 10,000 for testing.
  std::int64_t count = 0;
};

/// The built-in data set: digits drawn with a pen, in MNIST's format, generated on the fly so that nothing is
/// downloaded.
///
/// Each digit has several ways of writing it (a one with or without flag and base, an open or closed four, a seven with
/// or without a bar, ...), of which one is drawn with random proportions, slant, rotation, bending, unsteadiness, size,
/// position, thickness, pressure, sharpness and noise. Labels are uniform over 0 to 9.
///
/// Image i depends only on the seed, the part and i, not on the number of threads or images. Only exactly rounded
/// arithmetic is used, so every machine draws the same images.
///
/// Throws Error for a negative count.
HS_API MnistData make_digits(Split split, const DigitOptions& options = {});

/// Draws image `index` of make_digits into `pixels`, row by row; returns its label.
HS_API int draw_digit(std::uint64_t seed, Split split, std::int64_t index,
                      std::span<std::uint8_t, kDigitPixels> pixels);

}  // namespace halfstep::data
