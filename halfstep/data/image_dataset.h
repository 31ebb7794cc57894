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
  /// Pictures that may be damaged or missing before it is an error.
  std::int64_t max_bad_images = 100;
  ImageLimits limits = {};
};

/// Pictures that are read, decoded and transformed when a batch asks for them:
///
///     data::DataLoader loader{data::ImageDataset{data::open_images(folder, data::Split::kTrain),
///     data::TrainTransform{}},
///                             {.batch_size = 64, .shuffle = true, .workers = 2}};
///
/// A batch has the pictures as [N, 3, size, size] with channels-last strides and the labels as int64 [N]. What is
/// random is keyed by the request's seed and epoch and the picture's index.
///
/// A picture that can't be read is reported through the log once, counted, and replaced: in its place stands the next
/// one that can be read (by index, from the last to the first), with its own label and the random numbers of the place.
/// More than `max_bad_images` different ones throw IoError. Copies share the count.
class HS_API ImageDataset final : public Dataset {
 public:
  /// Throws Error without a source or for options that make no sense.
  ImageDataset(std::shared_ptr<const ImageSource> source, const ImageTransform& transform,
               const ImageDatasetOptions& options = {});

  std::int64_t size() const override { return source_->size(); }
  Batch batch(const BatchRequest& request) const override;

  /// Where the pictures come from.
  const ImageSource& source() const { return *source_; }
  /// Names of the classes.
  const std::vector<std::string>& classes() const { return source_->classes(); }
  /// Names of the pictures that could not be read so far, sorted.
  std::vector<std::string> bad_images() const;

 private:
  struct Bad;
  std::shared_ptr<const ImageSource> source_;
  std::shared_ptr<const ImagePipeline> pipeline_;
  ImageDatasetOptions options_;
  std::shared_ptr<Bad> bad_;
};

}  // namespace halfstep::data
