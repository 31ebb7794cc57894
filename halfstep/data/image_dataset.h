// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/core/dtype.h"
#include "halfstep/core/export.h"
#include "halfstep/data/dataset.h"
#include "halfstep/data/image.h"
#include "halfstep/data/image_source.h"
#include "halfstep/data/transforms.h"

namespace halfstep::data {

/// Options of ImageDataset.
struct ImageDatasetOptions {
  DType dtype = f32;  ///< of the pictures: f32, f16 or bf16
  /// Number of images that may be damaged or missing before it is an error.
  std::int64_t max_damaged = 100;
  ImageLimits limits = {};
};

/// Images that are read, decoded and transformed when a batch requests them:
///
///     data::DataLoader loader{data::ImageDataset{data::open_images(folder, data::Split::kTrain),
///     data::TrainTransform{}},
///                             {.batch_size = 64, .shuffle = true, .workers = 2}};
///
/// A batch has the images as [N, 3, size, size] with channels-last strides and the labels as int64 [N]. Randomness is
/// keyed by the request's seed and epoch and the image's index.
///
/// An unreadable image is logged once, counted, and replaced by the next readable one (by index, wrapping from the last
/// to the first), with that image's label and the random numbers of the replaced position. More than `max_damaged`
/// different ones throw IoError. Copies share the count.
class HS_API ImageDataset final : public Dataset {
 public:
  /// Throws Error without a source or for invalid options.
  ImageDataset(std::shared_ptr<const ImageSource> source, const ImageTransform& transform,
               const ImageDatasetOptions& options = {});

  std::int64_t size() const override { return source_->size(); }
  Batch batch(const BatchRequest& request) const override;

  /// The source of the images.
  const ImageSource& source() const { return *source_; }
  /// Names of the classes.
  const std::vector<std::string>& classes() const { return source_->classes(); }
  /// Names of the images that could not be read so far, sorted.
  std::vector<std::string> bad_images() const;

 private:
  struct Bad;
  std::shared_ptr<const ImageSource> source_;
  std::shared_ptr<const ImagePipeline> pipeline_;
  ImageDatasetOptions options_;
  std::shared_ptr<Bad> bad_;
};

}  // namespace halfstep::data
