// SPDX-License-Identifier: Apache-2.0
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "halfstep/core/atomic_file.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/input_file_internal.h"
#include "halfstep/core/philox.h"
#include "halfstep/core/text.h"
#include "halfstep/data/detection_pictures_internal.h"
#include "halfstep/data/resize.h"
#include "halfstep/runtime/log.h"

namespace halfstep::data {
namespace {

namespace fs = std::filesystem;

/// The first number of a cached picture's file: what the others mean.
constexpr std::uint64_t kCacheFormat = 0x3130434950534800;

std::uint64_t half_of_memory() {
  const long pages = ::sysconf(_SC_PHYS_PAGES), bytes = ::sysconf(_SC_PAGESIZE);
  constexpr std::uint64_t kUnknown = std::uint64_t{4} << 30;
  return pages > 0 && bytes > 0 ? static_cast<std::uint64_t>(pages) * static_cast<std::uint64_t>(bytes) / 2 : kUnknown;
}

void pad_for_kernels(Image& image) { image.pixels.resize(image.pixels.size() + kPixelOverread); }

/// The largest shrink after which the picture is still as large as the result.
int shrink_for(const ImageInfo& info, std::int64_t width, std::int64_t height) {
  if (info.format != ImageFormat::jpeg) return 1;
  int shrink = 8;
  while (shrink > 1 && (info.width < width * shrink || info.height < height * shrink)) shrink /= 2;
  return shrink;
}

/// 128 bits of a text, for the name of a file.
std::array<std::uint64_t, 2> hash_of(std::string_view text) {
  std::array<std::uint64_t, 2> hash{0, 1};
  for (std::size_t at = 0; at < text.size() || at == 0; at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + at, std::min(sizeof word, text.size() - at));
    for (std::uint64_t& half : hash) half = derive_seed(half, word, text.size());
  }
  return hash;
}

/// What is at a cached picture's place. Reading and writing would follow a link, and writing wait for a pipe's reader.
enum class CachePlace { free, file, taken };

CachePlace place_at(const fs::path& file) {
  struct stat info {};
  if (::lstat(file.c_str(), &info) == 0) return S_ISREG(info.st_mode) ? CachePlace::file : CachePlace::taken;
  return errno == ENOENT ? CachePlace::free : CachePlace::taken;
}

}  // namespace

DetectionPictures::DetectionPictures(std::shared_ptr<const DetectionData> data, std::int64_t size, bool upscale,
                                     const DetectionDatasetOptions& options)
    : data_(std::move(data)), size_(size), options_(options) {
  scaled_.reserve(data_->pictures.size());
  for (const LabeledPicture& picture : data_->pictures) {
    // A picture without known sizes can't be read: it will be plain.
    const std::int64_t w = std::max<std::int64_t>(picture.width, 1), h = std::max<std::int64_t>(picture.height, 1);
    scaled_.push_back(letterbox(w, h, size, size, size, upscale));
  }
  most_bytes_ = options.cache_bytes > 0 ? options.cache_bytes : half_of_memory();
  if (options.cache == PictureCache::memory) kept_.resize(scaled_.size());
  if (options.cache == PictureCache::disk) {
    if (options.cache_folder.empty()) fail<Error>("DetectionDataset: cache_folder: expected a folder, got none");
    std::error_code error;
    fs::create_directories(options.cache_folder, error);
    if (error) {
      fail<IoError>("DetectionDataset: cache_folder: making {}: {}", shown_path(options.cache_folder), error.message());
    }
  }
}

bool DetectionPictures::reserve(std::uint64_t bytes) const {
  const std::scoped_lock lock(mutex_);
  if (kept_bytes_ + bytes > most_bytes_) {
    log_once(LogLevel::warning, "DetectionDataset: cache",
             fmt::format("the cache of pictures is full with {} bytes; the rest are read each time", kept_bytes_));
    return false;
  }
  kept_bytes_ += bytes;
  return true;
}

void DetectionPictures::release(std::uint64_t bytes) const {
  const std::scoped_lock lock(mutex_);
  kept_bytes_ -= bytes;
}

void DetectionPictures::load(std::int64_t index, const PixelRegion& region, PictureScratch& scratch,
                             PicturePart& part) const {
  const PixelRegion whole{.left = 0, .top = 0, .width = width(index), .height = height(index)};
  part.shared = nullptr;
  if (options_.cache == PictureCache::none) return read(index, region, scratch, part);
  if (options_.cache == PictureCache::disk) {
    if (from_disk(index, region, part)) return;
    read(index, whole, scratch, part);
    to_disk(index, part.own);
    return;
  }
  {
    const std::scoped_lock lock(mutex_);
    part.shared = kept_[static_cast<std::size_t>(index)];
  }
  if (part.shared == nullptr) {
    const auto bytes = static_cast<std::uint64_t>(3 * whole.width * whole.height) + kPixelOverread;
    if (!reserve(bytes)) return read(index, region, scratch, part);
    auto kept = std::make_shared<Image>();
    try {
      read(index, whole, scratch, part);
    } catch (...) {
      release(bytes);
      throw;
    }
    *kept = std::move(part.own);
    part.own = {};
    part.shared = kept;
    const std::scoped_lock lock(mutex_);
    std::shared_ptr<const Image>& place = kept_[static_cast<std::size_t>(index)];
    if (place != nullptr) kept_bytes_ -= bytes;  // another thread was quicker
    place = std::move(kept);
  }
  part.view = part.shared->view();
  part.left = part.top = 0;
}

void DetectionPictures::read(std::int64_t index, const PixelRegion& region, PictureScratch& scratch,
                             PicturePart& part) const {
  const LabeledPicture& picture = data_->pictures[static_cast<std::size_t>(index)];
  read_file(picture.file, options_.limits.max_bytes, scratch.bytes);
  ImageDecoder decoder(scratch.bytes, picture.file.native(), options_.limits);
  const ImageInfo& info = decoder.info();
  if (info.width != picture.width || info.height != picture.height) {
    fail<IoError>("{}: expected a picture of {}x{}, got {}x{}", shown_path(picture.file), picture.width, picture.height,
                  info.width, info.height);
  }
  const std::int64_t w = width(index), h = height(index);
  const int shrink = options_.scaled_decode ? shrink_for(info, w, h) : 1;
  const std::int64_t from_width = (info.width + shrink - 1) / shrink, from_height = (info.height + shrink - 1) / shrink;
  const auto whole_pixels = [&](const PixelRegion& r) {
    const std::int64_t left = r.left * shrink, top = r.top * shrink;
    return PixelRegion{.left = left,
                       .top = top,
                       .width = std::min((r.left + r.width) * shrink, info.width) - left,
                       .height = std::min((r.top + r.height) * shrink, info.height) - top};
  };
  if (from_width == w && from_height == h) {
    const ImagePatch patch = decoder.decode(whole_pixels(region), shrink, part.own);
    part.left = patch.left;
    part.top = patch.top;
  } else {
    const ResizePlan plan(from_width, from_height,
                          {.width = w,
                           .height = h,
                           .box = {.left = 0,
                                   .top = 0,
                                   .right = static_cast<double>(info.width) / shrink,
                                   .bottom = static_cast<double>(info.height) / shrink},
                           .window = region});
    const ImagePatch patch = decoder.decode(whole_pixels(plan.source_region()), shrink, scratch.decoded);
    plan.run(scratch.decoded.view(), patch.left, patch.top, scratch.rows, part.own);
    part.left = region.left;
    part.top = region.top;
  }
  pad_for_kernels(part.own);
  part.view = part.own.view();
}

fs::path DetectionPictures::cache_file(std::int64_t index) const {
  std::error_code ignored;
  const fs::path file = fs::absolute(data_->pictures[static_cast<std::size_t>(index)].file, ignored);
  const auto hash = hash_of(file.native());
  return options_.cache_folder /
         fmt::format("{:016x}{:016x}-{}x{}.pixels", hash[0], hash[1], width(index), height(index));
}

/// What a cached picture was made from, and how.
std::array<std::uint64_t, 8> DetectionPictures::cache_header(std::int64_t index) const {
  const LabeledPicture& picture = data_->pictures[static_cast<std::size_t>(index)];
  struct stat info {};
  if (::stat(picture.file.c_str(), &info) != 0) info = {};
  return {kCacheFormat,
          static_cast<std::uint64_t>(width(index)),
          static_cast<std::uint64_t>(height(index)),
          options_.scaled_decode ? 1U : 0U,
          static_cast<std::uint64_t>(info.st_size),
          static_cast<std::uint64_t>(info.st_mtim.tv_sec),
          static_cast<std::uint64_t>(info.st_mtim.tv_nsec),
          static_cast<std::uint64_t>(picture.width) << 32 | static_cast<std::uint64_t>(picture.height)};
}

bool DetectionPictures::from_disk(std::int64_t index, const PixelRegion& region, PicturePart& part) const {
  const fs::path file = cache_file(index);
  if (place_at(file) != CachePlace::file) return false;
  try {
    const InputFile input(file);
    const auto expected = cache_header(index);
    auto header = expected;
    const std::uint64_t row = static_cast<std::uint64_t>(width(index)) * 3;
    if (input.size() != sizeof header + row * static_cast<std::uint64_t>(height(index))) return false;
    input.read(0, header.data(), sizeof header);
    if (header != expected) return false;
    part.own.resize(width(index), region.height);
    input.read(sizeof header + row * static_cast<std::uint64_t>(region.top), part.own.pixels.data(),
               part.own.pixels.size());
  } catch (const IoError& error) {
    log_once(LogLevel::warning, "DetectionDataset: reading the cache",
             fmt::format("a cached picture can't be read: {}", error.what()));
    return false;
  }
  pad_for_kernels(part.own);
  part.view = part.own.view();
  part.left = 0;
  part.top = region.top;
  return true;
}

void DetectionPictures::to_disk(std::int64_t index, const Image& image) const {
  try {
    const fs::path path = cache_file(index);
    if (place_at(path) == CachePlace::taken) fail<IoError>("{}: expected a file or none", shown_path(path));
    // Whoever looks finds no file or a whole one.
    AtomicFile file(path, /*durable=*/false);
    const auto header = cache_header(index);
    file.write(header.data(), sizeof header);
    file.write(image.pixels.data(), static_cast<std::size_t>(image.width * image.height * 3));
    file.commit();
  } catch (const IoError& error) {
    log_once(LogLevel::warning, "DetectionDataset: writing the cache",
             fmt::format("pictures can't be cached: {}", error.what()));
  }
}

}  // namespace halfstep::data
