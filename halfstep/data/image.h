// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/core/export.h"

namespace halfstep::data {

/// Part of an image, in whole pixels.
struct PixelRegion {
  std::int64_t left = 0;
  std::int64_t top = 0;
  std::int64_t width = 0;
  std::int64_t height = 0;
  friend bool operator==(const PixelRegion&, const PixelRegion&) = default;
};

/// A non-owning view of an image in memory: red, green, blue, 8 bits each.
struct ImageView {
  const std::uint8_t* pixels = nullptr;
  std::int64_t width = 0;
  std::int64_t height = 0;
  std::int64_t stride = 0;  ///< bytes from one row to the next

  /// The first byte of row `y`.
  const std::uint8_t* row(std::int64_t y) const { return pixels + y * stride; }
};

/// An image in memory: [height, width, 3] bytes, red, green, blue, row by row.
struct Image {
  std::int64_t width = 0;
  std::int64_t height = 0;
  std::vector<std::uint8_t> pixels = {};

  /// Resizes to width x height pixels, reusing the memory if it is large enough; the contents are lost.
  void resize(std::int64_t new_width, std::int64_t new_height) {
    width = new_width;
    height = new_height;
    pixels.resize(static_cast<std::size_t>(width * height * 3));
  }
  std::uint8_t* row(std::int64_t y) { return pixels.data() + y * width * 3; }
  /// The first byte of row `y`.
  const std::uint8_t* row(std::int64_t y) const { return pixels.data() + y * width * 3; }
  ImageView view() const { return {pixels.data(), width, height, width * 3}; }
  /// `region` must lie inside.
  ImageView view(const PixelRegion& region) const {
    return {row(region.top) + region.left * 3, region.width, region.height, width * 3};
  }
};

/// The supported formats. A file's format is detected from its contents, never from its name.
enum class ImageFormat { jpeg, png };

/// The contents of an image's header.
struct ImageInfo {
  ImageFormat format = ImageFormat::jpeg;
  std::int64_t width = 0;
  std::int64_t height = 0;
  /// Channels in the file: 1 grey, 2 grey with alpha, 3 colour (a palette too), 4 colour with alpha or CMYK.
  int channels = 3;
};

/// Limits that are checked before memory is allocated.
struct ImageLimits {
  /// Pixels of an image. The default is where Pillow suspects a decompression bomb and gives up.
  std::int64_t max_pixels = 178'956'970;
  /// Bytes of a file.
  std::uint64_t max_bytes = std::uint64_t{512} << 20;
};

/// The position of the pixels returned by ImageDecoder::decode: pixel (0, 0) is the pixel (left, top) of the image
/// shrunk by `shrink`, whose sizes are `full_width` and `full_height`.
struct ImagePatch {
  std::int64_t left = 0;
  std::int64_t top = 0;
  std::int64_t full_width = 0;
  std::int64_t full_height = 0;
  int shrink = 1;
};

class FormatDecoder;

/// Reads one JPEG or PNG image as Pillow's `Image.open(f).convert("RGB")` does.
///
/// JPEG: grey, YCbCr, RGB, CMYK and YCCK (both inverted, as Adobe writes them), baseline and progressive, 8 bits; the
/// orientation in EXIF data is ignored. Damage that only spoils pixels is accepted and leaves wrong pixels; a file
/// truncated before the last requested pixel is rejected. PNG: every colour type, depth and interlacing; of 16 bits the
/// upper 8 are taken (Pillow clips grey of 16 bits at 255 instead), alpha is dropped, gamma and profiles ignored.
///
/// The bytes are not trusted: sizes are checked against the limits before memory is allocated. They must stay valid as
/// long as the decoder is in use; `name` identifies them in errors. One thread at a time. All errors are IoErrors:
/// bytes in no known format, damaged or truncated, or an image over the limits.
class HS_API ImageDecoder {
 public:
  /// Reads the header.
  ImageDecoder(std::span<const std::uint8_t> bytes, std::string_view name, const ImageLimits& limits = {});
  ImageDecoder(ImageDecoder&&) noexcept;
  ImageDecoder& operator=(ImageDecoder&&) noexcept;
  ~ImageDecoder();

  /// The header.
  const ImageInfo& info() const;

  /// The whole image.
  void decode(Image& image);
  /// At least the part `region`, with exactly the pixels of the whole image: of a JPEG only the blocks around it are
  /// transformed, and anything below is not even read. `shrink` 2, 4 or 8 lets JPEG decode at 1/2, 1/4 or 1/8 (rounded
  /// up) of the size by omitting high frequencies, which is several times as fast but differs from resampling; `region`
  /// still counts full-size pixels. PNG ignores it. Returns what was decoded.
  ImagePatch decode(const PixelRegion& region, int shrink, Image& image);

 private:
  std::unique_ptr<FormatDecoder> decoder_;
};

/// A whole image from bytes; errors as ImageDecoder.
HS_API Image decode_image(std::span<const std::uint8_t> bytes, std::string_view name, const ImageLimits& limits = {});
/// A whole image from a file. IoError also if it can't be read.
HS_API Image read_image(const std::filesystem::path& path, const ImageLimits& limits = {});

/// The bytes of a file of at most `max_bytes`, into `bytes`. Throws IoError that names the file.
HS_API void read_file(const std::filesystem::path& path, std::uint64_t max_bytes, std::vector<std::uint8_t>& bytes);

}  // namespace halfstep::data
