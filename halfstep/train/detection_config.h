// SPDX-License-Identifier: Apache-2.0
// What a run of a detector is told besides what all runs are.
#pragma once

#include <cstdint>
#include <string>

namespace halfstep::training {

/// Pictures, loss and evaluation of a detector; the flags of `halfstep train`. The defaults are the recipe of small
/// YOLOv5 networks on COCO.
struct DetectionConfig {
  // Pictures in training: see data::DetectionTransform.
  double mosaic = 1;          ///< probability that four pictures make one
  double mixup = 0;           ///< probability that a mosaic is blended with another one
  double copy_paste = 0;      ///< share of the objects with polygons that are copied, mirrored
  double degrees = 0;         ///< largest rotation
  double translate = 0.1;     ///< largest shift, as a fraction of the side
  double scale = 0.5;         ///< pictures are scaled by 1 - scale to 1 + scale
  double shear = 0;           ///< largest, in degrees
  double perspective = 0;     ///< largest, 0 to 0.001
  double hsv_h = 0.015;       ///< largest change of hue, as a fraction
  double hsv_s = 0.7;         ///< of saturation
  double hsv_v = 0.4;         ///< of value
  double flip_ud = 0;         ///< probability of a picture upside down
  double flip_lr = 0.5;       ///< of one mirrored left and right
  bool multi_scale = false;   ///< the size of each batch is 0.5 to 1.5 times the image size
  bool rect = true;           ///< pictures of an evaluation keep their shape as far as the stride allows
  bool polygon_boxes = true;  ///< boxes of training are those around objects' polygons, where there are any
  std::string cache = "off";  ///< off, ram or disk: where decoded pictures are kept

  // Loss: see models::DetectionLossOptions.
  double box_gain = 0.05;    ///< weight of the boxes
  double object_gain = 1;    ///< of objectness
  double class_gain = 0.5;   ///< of the classes
  double anchor_ratio = 4;   ///< by which an object's sides may differ from an anchor's
  double focal_gamma = 0;    ///< of focal loss; 0: plain cross entropy
  double class_weight = 1;   ///< of positives among the classes
  double object_weight = 1;  ///< of positives in objectness

  // Evaluation: see models::DetectionsOptions.
  double score = 0.001;               ///< the least of a box
  double overlap = 0.6;               ///< the largest of two boxes of a class
  std::int64_t max_detections = 300;  ///< most boxes of a picture
};

}  // namespace halfstep::training
