// SPDX-License-Identifier: Apache-2.0
// From labelled pictures to the input of a detector: what is drawn for a sample, and what it does to boxes.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "halfstep/core/export.h"
#include "halfstep/core/random.h"
#include "halfstep/data/detection_labels.h"
#include "halfstep/data/transforms.h"

namespace halfstep::data {

/// What happens to the pictures of a DetectionDataset. The defaults are the recipe that YOLOv5n is published with.
///
/// Training: each picture is scaled so that its longer side is `size`; with three others it makes a mosaic of twice the
/// size, of which a random part, moved and scaled, becomes the input; then mixup, colours and flips. Evaluation
/// (`train` off): the picture is scaled so that its longer side is `size`, and centred (letterbox).
struct DetectionTransform {
  bool train = true;         ///< random changes; off: evaluation
  std::int64_t size = 640;   ///< of the input's sides, a multiple of `stride`
  std::int64_t stride = 32;  ///< of the network's coarsest level
  int fill = 114;            ///< value of pixels beside the picture, 0 to 255

  // Training. Each probability is a sample's.
  double mosaic = 1;             ///< probability of a mosaic of four pictures
  double mixup = 0;              ///< probability of mixing a mosaic with another, by a share from Beta(32, 32)
  double copy_paste = 0;         ///< probability that an object with polygons is copied to the other side of the mosaic
  double degrees = 0;            ///< rotation by up to these, both ways
  double translate = 0.1;        ///< shift by up to this share of the size, both ways
  double scale = 0.5;            ///< scale from 1 - scale to 1 + scale
  double shear = 0;              ///< along either axis by up to these degrees, both ways
  double perspective = 0;        ///< up to this, both ways, a pixel; at most largest_perspective()
  double flip_up_down = 0;       ///< probability
  double flip_left_right = 0.5;  ///< probability
  double hue = 0.015;            ///< factor of the hue from 1 - hue to 1 + hue; also the next two, of their channel
  double saturation = 0.7;       ///< of the saturation
  double value = 0.4;            ///< of the brightness
  /// Each batch has a size of its own, a multiple of `stride` between half and one and a half times `size`.
  bool multi_scale = false;

  // Evaluation.
  /// Batches of the least height and width that fit their pictures: the samples are ordered by their ratio of height to
  /// width, and a batch's sides are multiples of `stride`. Otherwise all are size x size.
  bool rectangular = false;
  double pad = 0.5;     ///< rectangular: added to either side, in strides, before it is rounded up
  bool upscale = true;  ///< pictures smaller than `size` are enlarged; otherwise they keep their size
};

/// How a picture lies in an input: an input pixel is an original pixel * scale + (left, top).
struct Letterbox {
  double scale = 1;
  std::int64_t width = 0;   ///< of the scaled picture, in whole pixels
  std::int64_t height = 0;  ///< of the scaled picture, in whole pixels
  std::int64_t left = 0;    ///< columns before it
  std::int64_t top = 0;     ///< rows above it
};

/// The letterbox of a picture of width x height whose longer side is to be `size`, in an input of these sizes. If it
/// doesn't fit it becomes smaller. With an odd number of pixels to spare the one more is right or below.
HS_API Letterbox letterbox(std::int64_t width, std::int64_t height, std::int64_t size, std::int64_t input_width,
                           std::int64_t input_height, bool upscale = true);

/// The size that a batch has with DetectionTransform::multi_scale.
HS_API std::int64_t multi_scale_size(const DetectionTransform& transform, std::uint64_t seed, std::int64_t epoch,
                                     std::int64_t number);

/// The order and shapes of rectangular batches.
struct RectangularBatches {
  std::vector<std::int64_t> order;                  ///< of the pictures, by height / width
  std::vector<std::array<std::int64_t, 2>> shapes;  ///< height and width of each batch
};
/// For pictures of these heights and widths (in turn; 0 counts as square), `batch_size` in a batch.
HS_API RectangularBatches rectangular_batches(std::span<const std::array<std::int64_t, 2>> sizes,
                                              std::int64_t batch_size, const DetectionTransform& transform);

/// The largest DetectionTransform::perspective for inputs of this size: 0.25 / size.
HS_API double largest_perspective(std::int64_t size);
/// Throws Error for an option out of range, naming it.
HS_API void check_options(const DetectionTransform& transform);

}  // namespace halfstep::data
