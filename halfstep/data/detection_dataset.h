// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/core/dtype.h"
#include "halfstep/core/export.h"
#include "halfstep/data/dataset.h"
#include "halfstep/data/detection_labels.h"
#include "halfstep/data/detection_transforms.h"
#include "halfstep/data/image.h"

namespace halfstep::data {

/// Where decoded pictures are kept for the next epoch. They are kept as they are read, scaled to the input's size, so
/// that the batches have the same bits with a cache and without.
enum class PictureCache {
  none,
  memory,  ///< 3 bytes a pixel, up to DetectionDatasetOptions::cache_bytes
  disk,    ///< files of 3 bytes a pixel in DetectionDatasetOptions::cache_folder, which programs may share
};

/// Options of DetectionDataset.
struct DetectionDatasetOptions {
  DType dtype = f32;            ///< of the pictures: f32, f16 or bf16
  std::int64_t batch_size = 1;  ///< of the loader; for DetectionTransform::rectangular
  PictureCache cache = PictureCache::none;
  std::uint64_t cache_bytes = 0;            ///< memory: the most that is kept; 0: half of the machine's
  std::filesystem::path cache_folder = {};  ///< disk: made if it isn't there
  /// Lets a JPEG be decoded at 1/2, 1/4 or 1/8 of its size if that is still as large as needed: several times as fast,
  /// with slightly different pixels.
  bool scaled_decode = true;
  std::int64_t max_damaged = 100;  ///< pictures that may be damaged before it is an error
  ImageLimits limits = {};
};

/// Labelled pictures for a detector, read and transformed when a batch asks for them:
///
///     data::DataLoader loader{data::DetectionDataset{data::load_detection("coco.yaml", "train"), {.size = 640}},
///                             {.batch_size = 16, .shuffle = true, .workers = 2}};
///
/// A batch has
/// - the pictures as `input` [N, 3, H, W] with channels-last strides, red, green and blue from 0 to 1;
/// - the objects as `target`, float32 [N, M, 5]: class, centre x and y, width and height as fractions of the input.
/// Rows
///   of class -1 fill up; M is a power of 2, at least 8. Crowds are left out: they are in data();
/// - `more[0]`, float64 [N, 6]: the picture's number in data().pictures, scale, left pad, top pad, the picture's width
///   and height. Without augmentation an input pixel is an original pixel * scale + pad; with it, and of a picture that
///   could not be read, the scale is 0.
///
/// Randomness is keyed by the request's seed and epoch and the picture's number. A picture that can't be read is logged
/// once, counted, and in its place is a plain one without objects; more than `max_damaged` different ones throw
/// IoError. Copies share data, cache and count.
class HS_API DetectionDataset final : public Dataset {
 public:
  /// Sizes that are not known yet are read from the pictures' headers. Throws Error for data without pictures or with
  /// labels that are no class's, and for invalid options; IoError for a cache folder that can't be made.
  explicit DetectionDataset(DetectionData data, const DetectionTransform& transform = {},
                            const DetectionDatasetOptions& options = {});

  std::int64_t size() const override;
  Batch batch(const BatchRequest& request) const override;

  /// What it was made of; sizes of pictures that were not known are there now.
  const DetectionData& data() const;
  const DetectionTransform& transform() const;
  const DetectionDatasetOptions& options() const;
  /// The picture that sample `index` is, in data().pictures: the same number, but for rectangular batches, whose order
  /// is another. Throws ShapeError for no such sample.
  std::int64_t picture(std::int64_t index) const;
  /// Files that could not be read so far, sorted.
  std::vector<std::string> bad_pictures() const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

}  // namespace halfstep::data
