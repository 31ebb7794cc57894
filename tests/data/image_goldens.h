// SPDX-License-Identifier: Apache-2.0
// What tests of pictures share: tests/goldens/images.json, noise, and files made of them.
#pragma once

#include <zlib.h>

#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "halfstep/data/image.h"
#include "tests/support/test_data.h"

namespace halfstep::test {

inline std::vector<std::uint8_t> from_base64(const std::string& text) {
  static const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::vector<std::uint8_t> bytes;
  unsigned bits = 0;
  int have = 0;
  for (const char c : text) {
    if (c == '=') break;
    bits = (bits << 6 | static_cast<unsigned>(digits.find(c))) & 0xFFFFU;
    have += 6;
    if (have >= 8) {
      have -= 8;
      bytes.push_back(static_cast<std::uint8_t>(bits >> have));
    }
  }
  return bytes;
}

/// Pixels: base64 of zlib.
inline std::vector<std::uint8_t> golden_pixels(const nlohmann::json& entry) {
  const std::vector<std::uint8_t> packed = from_base64(entry.at("pixels").get<std::string>());
  std::vector<std::uint8_t> pixels(1 << 20);
  uLongf size = pixels.size();
  if (uncompress(pixels.data(), &size, packed.data(), packed.size()) != Z_OK) throw std::runtime_error("bad golden");
  pixels.resize(size);
  return pixels;
}

inline std::vector<std::uint8_t> golden_file(const nlohmann::json& entry) {
  return from_base64(entry.at("file").get<std::string>());
}

inline const nlohmann::json& image_goldens() {
  static const nlohmann::json goldens = [] {
    std::ifstream file(goldens_dir() / "images.json");
    return nlohmann::json::parse(file);
  }();
  return goldens;
}

/// The entry of a list with this name.
inline const nlohmann::json& image_golden(const std::string& list, const std::string& name) {
  for (const nlohmann::json& entry : image_goldens().at(list)) {
    if (entry.at("name") == name) return entry;
  }
  throw std::runtime_error("no golden " + name);
}

/// The same pixels as noise() of make_images.py.
inline data::Image noise_image(std::int64_t width, std::int64_t height, std::uint32_t seed) {
  data::Image image;
  image.resize(width, height);
  for (std::uint8_t& pixel : image.pixels) {
    seed = seed * 1664525U + 1013904223U;
    pixel = static_cast<std::uint8_t>(seed >> 24);
  }
  return image;
}

/// The largest difference of two pictures' pixels; 256 when they have unlike sizes.
inline int largest_difference(const std::vector<std::uint8_t>& a, const std::vector<std::uint8_t>& b) {
  if (a.size() != b.size()) return 256;
  int largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(int{a[i]} - int{b[i]}));
  return largest;
}

}  // namespace halfstep::test
