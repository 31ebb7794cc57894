// SPDX-License-Identifier: Apache-2.0
// Internal: the pictures of a DetectionDataset, scaled to its size, from files or a cache.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "halfstep/data/detection_dataset.h"

namespace halfstep::data {

/// Kernels read pixels as words: bytes that must be there behind the last pixel.
inline constexpr std::size_t kPixelOverread = 16;

/// Part of a scaled picture: its first pixel is (left, top) of the whole. The view is valid as long as this is, and
/// until the next load() into it.
struct PicturePart {
  ImageView view;
  std::int64_t left = 0, top = 0;
  Image own;  // where the pixels are, or
  std::shared_ptr<const Image> shared;
};

/// Memory that is reused from picture to picture.
struct PictureScratch {
  std::vector<std::uint8_t> bytes;
  Image decoded;
  Image rows;
};

class DetectionPictures {
 public:
  /// Pictures of `data`, whose longer sides are to be `size`; with `upscale` off those that are smaller stay.
  DetectionPictures(std::shared_ptr<const DetectionData> data, std::int64_t size, bool upscale,
                    const DetectionDatasetOptions& options);

  /// The sizes that a picture has once it is loaded.
  /// @{
  std::int64_t width(std::int64_t index) const { return scaled_[static_cast<std::size_t>(index)].width; }
  std::int64_t height(std::int64_t index) const { return scaled_[static_cast<std::size_t>(index)].height; }
  /// @}

  /// At least `region` of the scaled picture, with the pixels that the whole one has. Throws IoError for a picture that
  /// can't be read. Any number of threads may load, each with its own scratch.
  void load(std::int64_t index, const PixelRegion& region, PictureScratch& scratch, PicturePart& part) const;

 private:
  void read(std::int64_t index, const PixelRegion& region, PictureScratch& scratch, PicturePart& part) const;
  /// Room for a picture in memory; false for none.
  bool reserve(std::uint64_t bytes) const;
  void release(std::uint64_t bytes) const;
  bool from_disk(std::int64_t index, const PixelRegion& region, PicturePart& part) const;
  void to_disk(std::int64_t index, const Image& image) const;
  std::filesystem::path cache_file(std::int64_t index) const;
  std::array<std::uint64_t, 8> cache_header(std::int64_t index) const;

  std::shared_ptr<const DetectionData> data_;
  std::int64_t size_;
  DetectionDatasetOptions options_;
  std::vector<Letterbox> scaled_;
  std::uint64_t most_bytes_ = 0;
  mutable std::mutex mutex_;
  mutable std::vector<std::shared_ptr<const Image>> kept_;
  mutable std::uint64_t kept_bytes_ = 0;
};

}  // namespace halfstep::data
