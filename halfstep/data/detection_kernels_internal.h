// SPDX-License-Identifier: Apache-2.0
// Internal: rows of pixels of a detector's input. A pixel is a word: red in the lowest byte, then green, then blue; the
// highest byte means nothing.
#pragma once

#include <array>
#include <cstdint>

#include "halfstep/core/dtype.h"
#include "halfstep/core/export.h"

namespace halfstep::data {

/// Bits behind the point of a place in a picture.
inline constexpr int kPlaceBits = 16;

/// Pixels 0 to n - 1 from the places (xs[i], ys[i]) of a picture of 3 bytes a pixel, counted from the middle of its
/// first pixel: bilinear, with weights of 8 bits, rounded after the columns and after the rows. Places beyond the
/// picture count as its edge. Up to 4 bytes behind the last pixel are read.
HS_API void sample_pixels(const std::uint8_t* picture, std::int64_t stride, std::int64_t width, std::int64_t height,
                          const std::int32_t* xs, const std::int32_t* ys, std::int64_t n, std::uint32_t* out);

/// What 8-bit hue (0 to 179), saturation and value become.
struct HsvTables {
  std::array<std::int32_t, 256> hue, saturation, value;
};
/// Multiplied by these factors, hue around the circle, the others up to 255, rounded down.
HS_API HsvTables hsv_tables(double hue, double saturation, double value);

/// Takes the pixels to 8-bit hue, saturation and value (OpenCV's integer formula), through the tables and back.
HS_API void change_hsv(std::uint32_t* pixels, std::int64_t n, const HsvTables& tables);

/// Each byte becomes share / 65536 of itself and the rest of the other's, rounded.
HS_API void mix_pixels(std::uint32_t* pixels, const std::uint32_t* others, std::int64_t n, std::uint32_t share);

/// Three bytes a pixel. Writes up to 16 bytes beyond.
HS_API void pack_pixels(const std::uint32_t* pixels, std::int64_t n, std::uint8_t* out);

/// Each byte divided by 255, rounded to float32 and then to the dtype: f32, f16 or bf16.
HS_API void bytes_to_units(const std::uint8_t* bytes, std::int64_t n, DType dtype, void* out);

}  // namespace halfstep::data
