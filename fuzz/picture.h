// SPDX-License-Identifier: Apache-2.0
// Any bytes are either read as a picture of the format, of the size that the header says, whole and in parts, or
// refused with an IoError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "halfstep/core/error.h"
#include "halfstep/data/image.h"

namespace halfstep::fuzz {

inline int read_picture(data::ImageFormat format, const std::uint8_t* bytes, std::size_t size) {
  using namespace halfstep::data;
  // A low limit keeps each run short; it is checked before memory is taken, so a higher one finds nothing more.
  const ImageLimits limits{.max_pixels = 1 << 18};
  try {
    ImageDecoder decoder(std::span(bytes, size), "input", limits);
    const ImageInfo info = decoder.info();
    if (info.format != format) return 0;
    if (info.width < 1 || info.height < 1 || info.width * info.height > limits.max_pixels) std::abort();
    Image image;
    // The part and the shrink come from the last byte, so that all of them are tried.
    const unsigned choice = bytes[size - 1];
    const PixelRegion region{.left = info.width * (choice & 3) / 4,
                             .top = info.height * (choice >> 2 & 3) / 4,
                             .width = (info.width + 3) / 4,
                             .height = (info.height + 3) / 4};
    if (region.left + region.width <= info.width && region.top + region.height <= info.height) {
      const int shrink = 1 << (choice >> 4 & 3);
      const ImagePatch patch = decoder.decode(region, shrink, image);
      if (patch.left * patch.shrink > region.left || patch.top * patch.shrink > region.top ||
          (patch.left + image.width) * patch.shrink < region.left + region.width ||
          (patch.top + image.height) * patch.shrink < region.top + region.height) {
        std::abort();
      }
    }
    decoder.decode(image);
    if (image.width != info.width || image.height != info.height) std::abort();
    if (image.pixels.size() != static_cast<std::size_t>(info.width * info.height * 3)) std::abort();
  } catch (const IoError&) {
  }
  return 0;
}

}  // namespace halfstep::fuzz
