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

/// Part of a picture, in whole pixels.
struct PixelRegion {
  std::int64_t left = 0;
  std::int64_t top = 0;
  std::int64_t width = 0;
  std::int64_t height = 0;
  friend bool operator==(const PixelRegion&, const PixelRegion&) = default;
};

/// A picture in memory that belongs to someone else: red, green, blue, 8 bits each.
struct ImageView {
  const std::uint8_t* pixels = nullptr;
  std::int64_t width = 0;
  std::int64_t height = 0;
  std::int64_t stride = 0;  ///< bytes from one row to the next

  /// The first byte of row `y`.
  const std::uint8_t* row(std::int64_t y) const { return pixels + y * stride; }
};

/// A picture in memory: [height, width, 3] bytes, red, green, blue, row by row.
struct Image {
  std::int64_t width = 0;
  std::int64_t height = 0;
  std::vector<std::uint8_t> pixels = {};

  /// Makes room for width x height pixels, keeping the memory where there is enough; what was there is lost.
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

/// The formats that are read. Which one a file has is told from its contents, never from its name.
enum class ImageFormat { jpeg, png };

/// What a picture's header says.
struct ImageInfo {
  ImageFormat format = ImageFormat::jpeg;
  std::int64_t width = 0;
  std::int64_t height = 0;
  /// Channels in the file: 1 grey, 2 grey with alpha, 3 colour (a palette too), 4 colour with alpha or CMYK.
  int channels = 3;
};

/// What is accepted before memory is taken.
struct ImageLimits {
  /// Pixels of a picture. The default is where Pillow suspects a decompression bomb and gives up.
  std::int64_t max_pixels = 178'956'970;
  /// Bytes of a file.
  std::uint64_t max_bytes = std::uint64_t{512} << 20;
};

/// Where the pixels that ImageDecoder::decode gave lie: its pixel (0, 0) is the pixel (left, top) of the picture shrunk
/// by `shrink`, whose sizes are `full_width` and `full_height`.
struct ImagePatch {
  std::int64_t left = 0;
  std::int64_t top = 0;
  std::int64_t full_width = 0;
  std::int64_t full_height = 0;
  int shrink = 1;
};

class FormatDecoder;

/// Reads one JPEG or PNG picture as Pillow's `Image.open(f).convert("RGB")` does.
///
/// JPEG: grey, YCbCr, RGB, CMYK and YCCK (both inverted, as Adobe writes them), baseline and progressive, 8 bits; the
/// orientation in EXIF data is ignored. Damage that only spoils pixels is accepted and leaves wrong pixels; a file that
/// is cut short before the last pixel asked for is refused. PNG: every colour type, depth and interlacing; of 16 bits
/// the upper 8 are taken (Pillow clips grey of 16 bits at 255 instead), alpha is dropped, gamma and profiles ignored.
///
/// The bytes are not trusted: sizes are checked against the limits before memory is taken. They must stay where they
/// are as long as the decoder is in use; `name` stands for them in the errors. One thread at a time. All errors are
/// IoErrors: bytes in no known format, damaged or cut short, or a picture over the limits.
class HS_API ImageDecoder {
 public:
  /// Reads the header.
  ImageDecoder(std::span<const std::uint8_t> bytes, std::string_view name, const ImageLimits& limits = {});
  ImageDecoder(ImageDecoder&&) noexcept;
  ImageDecoder& operator=(ImageDecoder&&) noexcept;
  ~ImageDecoder();

  /// What the header says.
  const ImageInfo& info() const;

  /// The whole picture.
  void decode(Image& image);
  /// At least the part `region`, with exactly the pixels that the whole picture has there: of a JPEG only the blocks
  /// around it are transformed, and what lies below is not even read. `shrink` 2, 4 or 8 lets JPEG give a picture of
  /// 1/2, 1/4 or 1/8 (rounded up) of the sizes by leaving out high frequencies, which is several times as fast but not
  /// what a resampling gives; `region` still counts full-size pixels. PNG ignores it. Returns what was decoded.
  ImagePatch decode(const PixelRegion& region, int shrink, Image& image);

 private:
  std::unique_ptr<FormatDecoder> decoder_;
};

/// A whole picture from bytes; errors as ImageDecoder.
HS_API Image decode_image(std::span<const std::uint8_t> bytes, std::string_view name, const ImageLimits& limits = {});
/// A whole picture from a file. IoError also when it can't be read.
HS_API Image read_image(const std::filesystem::path& path, const ImageLimits& limits = {});

/// The bytes of a file of at most `max_bytes`, into `bytes`. Throws IoError that names the file.
HS_API void read_file(const std::filesystem::path& path, std::uint64_t max_bytes, std::vector<std::uint8_t>& bytes);

}  // namespace halfstep::data
