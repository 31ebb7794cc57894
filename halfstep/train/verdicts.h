// SPDX-License-Identifier: Apache-2.0
// What a classifier said of the samples of an evaluation, and what people look at of it: a table of the classes, the
// confusion matrix, pictures.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "halfstep/core/tensor.h"
#include "halfstep/data/dataset.h"
#include "halfstep/data/transforms.h"
#include "halfstep/dist/process_group.h"
#include "halfstep/io/drawing.h"

namespace halfstep::training {

/// The verdicts on samples, in their order.
struct HS_API Verdicts {
  std::int64_t classes = 0;
  std::vector<std::int32_t> label;  ///< -1: none of the classes
  std::vector<std::int32_t> said;   ///< the likeliest class, the first of equal ones; -1: all scores are NaN
  std::vector<float> share;         ///< the probability that the network gives it, from 0 to 1

  /// Forgets all of them.
  void clear();
  /// Adds a batch: scores [N, classes] before softmax, labels [N] or soft targets [N, classes], whose largest share is
  /// the label. Reads both. Throws ShapeError.
  void add(const Tensor& scores, const Tensor& target);
  /// Becomes the verdicts of all ranks, one rank's behind the other's.
  void merge(dist::ProcessGroup& group);
  std::int64_t size() const { return static_cast<std::int64_t>(said.size()); }
  /// Samples whose label was said.
  std::int64_t right() const;
};

/// A class in the table of classes. Fractions of 1, and 0 where there is nothing to divide by, as of
/// training::Precision and its like.
struct ClassRow {
  std::string name = {};
  std::int64_t count = 0;  ///< samples with this label
  std::int64_t said = 0;   ///< samples of which this class was said
  std::int64_t right = 0;  ///< both
  double precision = 0;    ///< right / said
  double recall = 0;       ///< right / count
  double f1 = 0;           ///< 2 right / (said + count)
};
/// A row for each class; those without a name of their own are called by number.
HS_API std::vector<ClassRow> class_rows(const Verdicts& verdicts, const std::vector<std::string>& names = {});
/// As CSV: class,precision,recall,f1,count.
HS_API std::string class_rows_csv(const std::vector<ClassRow>& rows);

/// The most classes that a confusion matrix is counted and drawn of, of classifiers and detectors: it grows with their
/// square. ImageNet's 1,000 and LVIS' 1,203 have one; runs with more classes write none and say so.
inline constexpr std::int64_t kMostConfusionClasses = 2000;

/// How often a class (row) was taken for a class (column), row by row; samples without a label or verdict are left out.
/// Throws Error for more than kMostConfusionClasses classes.
HS_API std::vector<std::int64_t> confusion_counts(const Verdicts& verdicts);
/// The confusion matrix, up to 40 classes with their names; more of them in blocks. With the most frequent mistakes.
/// Throws as confusion_counts().
HS_API io::Drawing draw_confusion(const Verdicts& verdicts, const std::vector<std::string>& names,
                                  const std::string& title);

/// How a picture lies in a network's input.
struct PictureForm {
  std::int64_t channels = 3;  ///< 1 or 3
  /// 0: the input's last two dimensions, [channels, height, width]; otherwise of flattened pictures.
  std::int64_t height = 0, width = 0;
  data::Normalization normalization = {};  ///< undone to get pixels
};
/// Whether the samples of an input [N, ...] are pictures of that form.
HS_API bool are_pictures(const Tensor& input, const PictureForm& form);
/// A sample of an input [N, ...] as a picture. Throws ShapeError for a tensor that holds none of that form.
HS_API io::Bitmap bitmap_of(const Tensor& input, std::int64_t sample, const PictureForm& form);

/// Pictures with what was said of them, framed green where that is right and red where it is wrong: the first ones, and
/// the mistakes of which the network was surest. `samples` are those of the verdicts, in their order.
HS_API io::Drawing draw_predictions(const Verdicts& verdicts, const std::vector<std::string>& names,
                                    const data::Dataset& samples, const PictureForm& form, const std::string& title);

}  // namespace halfstep::training
