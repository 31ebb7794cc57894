// SPDX-License-Identifier: Apache-2.0
// A trained detector on pictures of any size: what `halfstep predict` does of each.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "halfstep/core/dtype.h"
#include "halfstep/core/export.h"
#include "halfstep/data/image.h"
#include "halfstep/models/detections.h"
#include "halfstep/models/yolov5.h"

namespace halfstep::training {

/// Options of Detector.
struct DetectorOptions {
  std::int64_t image_size = 640;              ///< of a picture's longer side in the network's input, in pixels
  models::DetectionsOptions detections = {};  ///< which boxes are kept
  std::vector<std::int64_t> classes = {};     ///< the only ones that are looked for; empty: all
  std::optional<DType> autocast = {};         ///< of the forward pass; none: the network's own precision
  /// What computes the network's results; empty: the network.
  std::function<models::DetectorLevels(const Tensor& pictures)> levels = {};
};

/// What was found in a picture, and how long it took.
struct FoundObjects {
  std::vector<models::Detection> objects = {};  ///< by falling score, in pixels of the picture, inside of it
  bool finite = true;                           ///< whether all that the network gave are numbers
  std::int64_t height = 0, width = 0;           ///< of the network's input
  double prepare_ms = 0;                        ///< resizing and copying to the device
  double forward_ms = 0;                        ///< the network
  double suppress_ms = 0;                       ///< decoding and non-maximum suppression
};

/// Finds objects: the picture is resized so that its longer side is `image_size`, its sides are filled up to multiples
/// of the network's largest stride, and what is found is mapped back. In eval mode, without recording, on the device of
/// the network's parameters.
class HS_API Detector {
 public:
  /// Puts the network into eval mode. Throws Error for options out of range.
  explicit Detector(std::shared_ptr<const models::Yolov5> network, const DetectorOptions& options = {});
  FoundObjects operator()(const data::ImageView& picture) const;

 private:
  std::shared_ptr<const models::Yolov5> network_;
  DetectorOptions options_;
  std::int64_t stride_ = 1;
};

}  // namespace halfstep::training
