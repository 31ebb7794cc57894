// SPDX-License-Identifier: Apache-2.0
// Internal: what the readers of JPEG and PNG have in common.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "halfstep/core/text.h"
#include "halfstep/data/image.h"

namespace halfstep::data {

/// One picture in one format.
class FormatDecoder {
 public:
  virtual ~FormatDecoder() = default;
  virtual ImagePatch decode(const PixelRegion& region, int shrink, Image& image) = 0;
  const ImageInfo& info() const { return info_; }

 protected:
  FormatDecoder(std::string_view name, const ImageLimits& limits) : name_(printable(name)), limits_(limits) {}
  /// Throws IoError when the sizes in info_ are over the limits.
  void check_size() const;

  std::string name_;
  ImageLimits limits_;
  ImageInfo info_;
};

/// A decoder whose header has been read. Throw IoError naming `name` for what is no such picture or over the limits.
/// @{
std::unique_ptr<FormatDecoder> open_jpeg(std::span<const std::uint8_t> bytes, std::string_view name,
                                         const ImageLimits& limits);
std::unique_ptr<FormatDecoder> open_png(std::span<const std::uint8_t> bytes, std::string_view name,
                                        const ImageLimits& limits);
/// @}

}  // namespace halfstep::data
