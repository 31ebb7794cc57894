// SPDX-License-Identifier: Apache-2.0
// From a detector's decoded predictions to the objects that it found.
#pragma once

#include <cstdint>
#include <vector>

#include "halfstep/core/tensor.h"

namespace halfstep::models {

/// Options of detections(). The defaults are those of prediction; an evaluation takes a score of 0.001, an overlap of
/// 0.6 and multi_label.
struct DetectionsOptions {
  double score = 0.25;              ///< objectness and objectness times class probability are above this; 0 to 1
  double overlap = 0.45;            ///< boxes that overlap a better one of their class by more are dropped; 0 to 1
  std::int64_t limit = 300;         ///< the most objects of a picture
  std::int64_t candidates = 30000;  ///< the most boxes of a picture, by falling score, that are compared
  bool multi_label = false;         ///< a box may be found as each class above `score`, not only as the likeliest
  bool agnostic = false;            ///< boxes suppress those of other classes too
};

/// An object that was found.
struct Detection {
  std::int64_t label = 0;                           ///< number of its class
  double score = 0;                                 ///< objectness times class probability
  double left = 0, top = 0, right = 0, bottom = 0;  ///< pixels of the network's input
};

/// The objects in each picture by falling score, of predictions [N, boxes, 5 + classes] as Yolov5::decode gives them:
/// centre x and y, width, height, objectness, classes. Non-maximum suppression by class (halfstep::batched_nms); equal
/// scores keep the order of the predictions. A prediction that isn't finite is left out. On a device the predictions
/// are waited for and copied. Throws ShapeError, DTypeError, and Error for options out of range.
HS_API std::vector<std::vector<Detection>> detections(const Tensor& predictions, const DetectionsOptions& options = {});

}  // namespace halfstep::models
