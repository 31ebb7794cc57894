// SPDX-License-Identifier: Apache-2.0
// What people look at of a detector's evaluation: the table of classes, curves over the score, the confusion matrix,
// and how the labels of a data set are spread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "halfstep/core/export.h"
#include "halfstep/data/detection_labels.h"
#include "halfstep/io/drawing.h"
#include "halfstep/train/average_precision.h"
#include "halfstep/train/detection_pictures.h"
#include "halfstep/train/task.h"

namespace halfstep::training {

/// The table that `halfstep eval` prints: Class, Images, Instances, P, R, mAP50 and mAP50-95, all classes in the first
/// row, then those that have objects (of more than 100 those with the lowest mAP50-95). Empty without pictures. `names`
/// of classes may be empty or too few: numbers.
HS_API ResultTable detection_table(const DetectionEvaluation& evaluation, const std::vector<std::string>& names);
/// The same as CSV, with all classes that have objects: class,pictures,objects,precision,recall,map50,map50_95.
HS_API std::string detection_csv(const DetectionEvaluation& evaluation, const std::vector<std::string>& names);

/// Precision over recall at overlap 0.5; F1, precision and recall over the score. A thick line is the mean of the
/// classes that have objects; each of up to 10 classes has a colour and a name, more are thin and grey,
/// and of more than 1000 there is the mean only.
HS_API io::Drawing draw_precision_recall(const std::vector<DetectionCurves>& curves, const DetectionSummary& summary,
                                         const std::vector<std::string>& names, const std::string& title);
/// What draw_score_curve() shows over the score.
enum class ScoreCurve : std::uint8_t { f1, precision, recall };
HS_API io::Drawing draw_score_curve(ScoreCurve which, const std::vector<DetectionCurves>& curves,
                                    const std::vector<std::string>& names, const std::string& title);
/// The confusion matrix of boxes of a score of at least 0.25 that overlap an object by at least 0.45, as that of
/// classification: what it is in rows, what was found in columns. The last row is boxes where nothing is, the last
/// column objects that were missed; up to 100 classes have names. Throws Error for more than kMostConfusionClasses.
HS_API io::Drawing draw_confusion(const DetectionEvaluation& evaluation, const std::vector<std::string>& names,
                                  const std::string& title);

/// The box of an object as fractions of its picture.
struct LabelBox {
  std::int64_t label = 0;  ///< number of its class
  double x = 0, y = 0;     ///< centre
  double width = 0, height = 0;
};
/// Those of a data set's objects, without crowds.
HS_API std::vector<LabelBox> label_boxes(const data::DetectionData& data);
/// Objects of each class, where their centres are, and how large they are. Throws Error for a negative label.
HS_API io::Drawing draw_labels(const std::vector<LabelBox>& boxes, const std::vector<std::string>& names,
                               const std::string& title);

/// Writes `classes.csv`, `confusion.svg` (up to kMostConfusionClasses), `precision-recall.svg`, `f1.svg`,
/// `precision.svg` and `recall.svg` into a folder, each at once or not at all; nothing without pictures. Throws
/// IoError.
HS_API void write_detection_results(const DetectionEvaluation& evaluation, const std::vector<std::string>& names,
                                    const std::filesystem::path& folder, const std::string& title);
/// Writes `predictions.png`: draw_compared(). Nothing without pictures. Throws IoError.
HS_API void write_compared(const std::vector<ComparedPicture>& pictures, const std::vector<std::string>& names,
                           const std::filesystem::path& folder, const std::string& title);
/// Writes `train-batch.png`: draw_train_batch(). Throws IoError, and ShapeError for another batch.
HS_API void write_train_batch(const Tensor& input, const Tensor& target, const std::vector<std::string>& names,
                              const std::filesystem::path& folder, const std::string& title);
/// Writes `labels.svg`: draw_labels(). Throws IoError.
HS_API void write_labels(const std::vector<LabelBox>& boxes, const std::vector<std::string>& names,
                         const std::filesystem::path& folder, const std::string& title);

}  // namespace halfstep::training
