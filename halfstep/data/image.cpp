// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/image.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <new>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/data/image_internal.h"

namespace halfstep::data {
namespace {

bool starts_with(std::span<const std::uint8_t> bytes, std::string_view signature) {
  return bytes.size() >= signature.size() && std::memcmp(bytes.data(), signature.data(), signature.size()) == 0;
}

/// What the bytes look like, for an error.
std::string describe(std::span<const std::uint8_t> bytes) {
  if (bytes.empty()) return "no bytes";
  if (starts_with(bytes, "GIF8")) return "a GIF picture";
  if (starts_with(bytes, "BM")) return "a BMP picture";
  if (starts_with(bytes, "II*") || starts_with(bytes, std::string_view("MM\0*", 4))) return "a TIFF picture";
  if (starts_with(bytes, "RIFF") && bytes.size() >= 12 && std::memcmp(bytes.data() + 8, "WEBP", 4) == 0) {
    return "a WebP picture";
  }
  std::string text =
      bytes.size() == 1 ? "1 byte that starts with" : fmt::format("{} bytes that start with", bytes.size());
  for (const std::uint8_t byte : bytes.first(std::min<std::size_t>(bytes.size(), 4)))
    text += fmt::format(" {:02x}", byte);
  return text;
}

class File {
 public:
  explicit File(const char* name) : descriptor_(::open(name, O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

}  // namespace

void FormatDecoder::check_size() const {
  if (info_.width <= 0 || info_.height <= 0 || info_.width > limits_.max_pixels / info_.height) {
    fail<IoError>("decode_image: {}: expected 1 to {} pixels, got a header with {}x{}", name_, limits_.max_pixels,
                  info_.width, info_.height);
  }
}

ImageDecoder::ImageDecoder(std::span<const std::uint8_t> bytes, std::string_view name, const ImageLimits& limits) {
  if (bytes.size() > limits.max_bytes) {
    fail<IoError>("decode_image: {}: expected at most {} bytes, got {}", printable(name), limits.max_bytes,
                  bytes.size());
  }
  if (starts_with(bytes, "\xff\xd8\xff")) {
    decoder_ = open_jpeg(bytes, name, limits);
  } else if (starts_with(bytes, "\x89PNG\r\n\x1a\n")) {
    decoder_ = open_png(bytes, name, limits);
  } else {
    fail<IoError>("decode_image: {}: expected a JPEG or PNG picture, got {}", printable(name), describe(bytes));
  }
}

ImageDecoder::ImageDecoder(ImageDecoder&&) noexcept = default;
ImageDecoder& ImageDecoder::operator=(ImageDecoder&&) noexcept = default;
ImageDecoder::~ImageDecoder() = default;

const ImageInfo& ImageDecoder::info() const { return decoder_->info(); }

void ImageDecoder::decode(Image& image) {
  decoder_->decode({.left = 0, .top = 0, .width = info().width, .height = info().height}, 1, image);
}

ImagePatch ImageDecoder::decode(const PixelRegion& region, int shrink, Image& image) {
  const ImageInfo& picture = info();
  if (region.left < 0 || region.top < 0 || region.width < 1 || region.height < 1 || region.width > picture.width ||
      region.height > picture.height || region.left > picture.width - region.width ||
      region.top > picture.height - region.height) {
    fail<ShapeError>("decode: expected a region inside the picture of {}x{}, got {}x{} at ({}, {})", picture.width,
                     picture.height, region.width, region.height, region.left, region.top);
  }
  if (shrink != 1 && shrink != 2 && shrink != 4 && shrink != 8) {
    fail<Error>("decode: expected a shrink of 1, 2, 4 or 8, got {}", shrink);
  }
  return decoder_->decode(region, shrink, image);
}

Image decode_image(std::span<const std::uint8_t> bytes, std::string_view name, const ImageLimits& limits) {
  Image image;
  ImageDecoder(bytes, name, limits).decode(image);
  return image;
}

Image read_image(const std::filesystem::path& path, const ImageLimits& limits) {
  std::vector<std::uint8_t> bytes;
  read_file(path, limits.max_bytes, bytes);
  return decode_image(bytes, shown_path(path), limits);
}

void read_file(const std::filesystem::path& path, std::uint64_t max_bytes, std::vector<std::uint8_t>& bytes) {
  // Without O_NONBLOCK a named pipe would block for ever, before it can be refused.
  const File file(path.c_str());
  if (file.get() < 0) fail<IoError>("read_file: cannot open {}: {}", shown_path(path), std::strerror(errno));
  struct stat info {};
  if (::fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) {
    fail<IoError>("read_file: expected a file, got something else at {}", shown_path(path));
  }
  const auto size = static_cast<std::uint64_t>(info.st_size);
  if (size > max_bytes) {
    fail<IoError>("read_file: {}: expected at most {} bytes, got {}", shown_path(path), max_bytes, size);
  }
  try {
    bytes.resize(static_cast<std::size_t>(size));
  } catch (const std::bad_alloc&) {
    fail<IoError>("read_file: {}: no memory for {} bytes", shown_path(path), size);
  }
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = ::read(file.get(), bytes.data() + done, bytes.size() - done);
    if (n == 0) break;
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail<IoError>("read_file: reading {}: {}", shown_path(path), std::strerror(errno));
    done += static_cast<std::size_t>(n);
  }
  bytes.resize(done);  // the file may have become shorter
}

}  // namespace halfstep::data
