// SPDX-License-Identifier: Apache-2.0
// The loss of an anchor-based detector: which cells answer for an object, and how far they are from it.
#pragma once

#include <vector>

#include "halfstep/core/tensor.h"
#include "halfstep/models/yolov5.h"

namespace halfstep::models {

/// Options of detection_loss. The defaults are the published ones.
struct DetectionLossOptions {
  double box = 0.05;        ///< weight of the boxes' part, for three levels
  double objectness = 1;    ///< of the objectness part, for three levels at 640 pixels
  double classes = 0.5;     ///< of the classes' part, for three levels and 80 classes
  double image_size = 640;  ///< pixels of a side
  double anchor_ratio = 4;  ///< an anchor answers for objects whose sides differ from its own by less than this factor
  double label_smoothing = 0;  ///< targets of classes are 1 - e / 2 and e / 2
  double focal_gamma = 0;      ///< above 0: focal loss (Lin et al. 2017), with 0.25 as the weight of positives
  double class_weight = 1;     ///< of positives among classes
  double object_weight = 1;    ///< of positives in objectness
  std::vector<double> balance = {4, 1, 0.4};  ///< weights of the levels' objectness, from the finest; more: 1
};

/// A detector's loss and its parts, without dimensions, in float32 (float64 for float64 predictions).
struct DetectionLoss {
  Tensor loss;        ///< mean over the batch's pictures: the sum of the parts
  Tensor box;         ///< weighted: 1 - complete IoU, a mean over matches
  Tensor objectness;  ///< weighted: binary cross entropy with the matches' IoU, a mean over all cells
  Tensor classes;     ///< weighted: binary cross entropy, a mean over matches and classes; 0 for one class
  Tensor matches;     ///< how many pairs of a cell's anchor and an object there are
};

/// The loss of predictions `levels`, as Yolov5 gives them, for `objects` [N, M, 5]: class, centre x and y, width and
/// height as fractions of the picture; rows of class -1 fill up. An object is matched, in each level, with the anchors
/// of a similar size (anchor_ratio) in the cell of its centre and in the two cells nearest to it. Where several objects
/// meet in one place its objectness is the largest IoU among them, whatever their order. Computed in float32 whatever
/// surrounds it, of ops whose sizes depend on the inputs' sizes only, so that a step can be captured. Throws ShapeError
/// and Error for what doesn't fit.
HS_API DetectionLoss detection_loss(const DetectorLevels& levels, const Tensor& objects, const DetectionHead& head,
                                    const DetectionLossOptions& options = {});

}  // namespace halfstep::models
