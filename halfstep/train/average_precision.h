// SPDX-License-Identifier: Apache-2.0
// How good the boxes of a detector are: average precision, by COCO's protocol and by the one that trainers print.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/core/export.h"

namespace halfstep::training {

/// A box as COCO's files have it: left, top, width and height in pixels.
using BoxSides = std::array<double, 4>;

/// A box that a detector found.
struct DetectedBox {
  std::int64_t label = 0;  ///< number of its class
  double score = 0;
  BoxSides box = {};
};
/// A box that is in a picture.
struct TrueBox {
  std::int64_t label = 0;  ///< number of its class
  BoxSides box = {};
  double area = -1;    ///< of the object in pixels, which decides whether it counts as small; -1: the box's
  bool crowd = false;  ///< stands for many objects: boxes inside are neither right nor wrong (COCO's `iscrowd`)
};

/// Average precision and recall, each a mean over classes, 0 to 1; -1 where there is no such object. By COCO's
/// protocol: `ap` is the mean over ten overlaps from 0.5 to 0.95, `small`, `medium` and `large` are of objects under 32
/// x 32, to 96 x 96 and above, `ar1`, `ar10` and `ar100` the recall of so many boxes a picture.
struct CocoSummary {
  double ap = -1, ap50 = -1, ap75 = -1;
  double ap_small = -1, ap_medium = -1, ap_large = -1;
  double ar1 = -1, ar10 = -1, ar100 = -1;
  double ar_small = -1, ar_medium = -1, ar_large = -1;
  std::vector<double> ap_of_class = {};    ///< `ap` by class number; -1: no object
  std::vector<double> ap50_of_class = {};  ///< `ap50` by class number
};

/// What a class reached, at the score at which the mean F1 of all classes is largest.
struct ClassDetection {
  std::int64_t label = 0;
  std::int64_t pictures = 0;  ///< that have such objects
  std::int64_t objects = 0;
  double precision = 0, recall = 0, ap50 = 0, ap = 0;
};
/// The figures that detectors' trainers print: of classes that have objects.
struct DetectionSummary {
  double precision = 0, recall = 0;  ///< means over classes, at `score`
  double ap50 = 0, ap = 0;           ///< means over classes: overlap 0.5; ten overlaps from 0.5 to 0.95
  double score = 0;                  ///< where the mean F1 of all classes is largest
  std::vector<ClassDetection> classes = {};

  /// By which the best weights of a run are chosen: 0.1 ap50 + 0.9 ap.
  double fitness() const { return 0.1 * ap50 + 0.9 * ap; }
};
/// Precision, recall and F1 of a class over the score, for figures.
struct DetectionCurves {
  std::int64_t label = 0;
  std::vector<double> precision = {}, recall = {}, f1 = {};  ///< at scores from 0 to 1, at equal distances
  std::vector<double> precision_at_recall = {};              ///< of overlap 0.5, at recalls from 0 to 1, as many
};

/// Collects the boxes of pictures.
class HS_API DetectionEvaluation {
 public:
  /// `classes`: their number. Throws Error unless it is above 0.
  explicit DetectionEvaluation(std::int64_t classes);

  /// A picture: all that was found in it and all that is in it. The order of pictures decides between equal scores.
  /// Throws Error for a label that isn't a class, a box that isn't finite or has a negative side, or a score of NaN.
  void add(std::vector<DetectedBox> detected, std::vector<TrueBox> truth);
  /// The pictures of another evaluation, behind those that are here: how ranks join theirs. Throws Error for another
  /// number of classes.
  void add(const DetectionEvaluation& other);
  std::int64_t classes() const { return classes_; }
  std::int64_t pictures() const;
  std::int64_t objects() const;

  /// COCO's protocol (Lin et al. 2014), as pycocotools computes it: greedy matching by falling score at most 100 boxes
  /// a picture and class, crowds and objects of other sizes ignored, precision at 101 recalls.
  CocoSummary coco() const;
  /// The trainers' protocol: each box claims the object of its class that it overlaps most, and of the boxes that claim
  /// one that of the best score is right; the area under the envelope of the precision, by the trapezoidal rule over
  /// 101 recalls; scores smoothed over a tenth of their range before the best is chosen. Crowds are left out.
  DetectionSummary summary() const;
  /// Curves of the classes that have objects, at `points` places.
  std::vector<DetectionCurves> curves(int points = 1000) const;
  /// Counts [classes + 1, classes + 1], row-major, of what was found (row) where what is (column): boxes of a score of
  /// at least `score`, paired by falling overlap of at least `overlap` whatever their classes. The last row counts
  /// objects that were missed, the last column boxes where nothing is. Throws Error for more than
  /// kMostConfusionClasses classes (train/verdicts.h).
  std::vector<std::int64_t> confusion(double score = 0.25, double overlap = 0.45) const;

  /// All of it as bytes, and back: what ranks send each other. Throws Error for bytes that aren't such.
  std::string serialized() const;
  static DetectionEvaluation deserialized(std::string_view bytes);

 private:
  struct Picture {
    std::vector<DetectedBox> detected;
    std::vector<TrueBox> truth;
  };
  std::int64_t classes_;
  std::vector<Picture> pictures_;
};

/// The share of the union of two boxes that both cover; with `crowd` of the area of `detected`. 0 without an area.
HS_API double overlap_of(const BoxSides& detected, const BoxSides& truth, bool crowd = false);

}  // namespace halfstep::training
