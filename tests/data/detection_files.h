// SPDX-License-Identifier: Apache-2.0
// Small data sets for detection in a temporary folder.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "halfstep/data/image.h"
#include "tests/data/idx_files.h"

namespace halfstep::test {

inline std::filesystem::path write_text(const std::filesystem::path& path, const std::string& text) {
  return write_file(path, Bytes(text.begin(), text.end()));
}

/// A PNG of 8-bit colour, byte by byte: one stored block behind another, so that every pixel is what was put in.
inline Bytes png_of(const data::Image& image) {
  const auto number = [](std::uint32_t value) {
    Bytes bytes;
    for (const int shift : {24, 16, 8, 0}) bytes.push_back(static_cast<std::uint8_t>(value >> shift));
    return bytes;
  };
  const auto chunk = [&](const std::string& type, const Bytes& content) {
    Bytes body(type.begin(), type.end());
    body = body + content;
    const auto crc = static_cast<std::uint32_t>(crc32(0, body.data(), static_cast<uInt>(body.size())));
    return number(static_cast<std::uint32_t>(content.size())) + body + number(crc);
  };
  Bytes raw;
  for (std::int64_t y = 0; y < image.height; ++y) {
    raw.push_back(0);  // no filter
    raw.insert(raw.end(), image.row(y), image.row(y) + 3 * image.width);
  }
  uLongf packed_size = compressBound(static_cast<uLong>(raw.size()));
  Bytes packed(packed_size);
  compress2(packed.data(), &packed_size, raw.data(), static_cast<uLong>(raw.size()), 1);
  packed.resize(packed_size);
  const Bytes header = number(static_cast<std::uint32_t>(image.width)) +
                       number(static_cast<std::uint32_t>(image.height)) + Bytes{8, 2, 0, 0, 0};
  return Bytes{0x89, 'P', 'N', 'G', '\r', '\n', 0x1A, '\n'} + chunk("IHDR", header) + chunk("IDAT", packed) +
         chunk("IEND", {});
}

/// A picture whose pixels are paint(x, y).
inline data::Image painted(std::int64_t width, std::int64_t height,
                           const std::function<std::array<std::uint8_t, 3>(std::int64_t, std::int64_t)>& paint) {
  data::Image image;
  image.resize(width, height);
  for (std::int64_t y = 0; y < height; ++y) {
    for (std::int64_t x = 0; x < width; ++x) {
      const auto colour = paint(x, y);
      std::copy(colour.begin(), colour.end(), image.row(y) + 3 * x);
    }
  }
  return image;
}

/// One of plain colour with a rectangle of another.
inline data::Image with_rectangle(std::int64_t width, std::int64_t height, std::array<std::uint8_t, 3> ground,
                                  std::array<std::uint8_t, 3> colour, const data::PixelRegion& rectangle) {
  return painted(width, height, [&](std::int64_t x, std::int64_t y) {
    const bool in = x >= rectangle.left && x < rectangle.left + rectangle.width && y >= rectangle.top &&
                    y < rectangle.top + rectangle.height;
    return in ? colour : ground;
  });
}

inline std::filesystem::path write_png(const std::filesystem::path& path, const data::Image& image) {
  return write_file(path, png_of(image));
}

inline std::filesystem::path write_grey(const std::filesystem::path& path, std::int64_t width, std::int64_t height) {
  return write_png(path, painted(width, height, [](auto, auto) { return std::array<std::uint8_t, 3>{90, 90, 90}; }));
}

}  // namespace halfstep::test
