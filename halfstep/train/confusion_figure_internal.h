// SPDX-License-Identifier: Apache-2.0
// The confusion matrix as a figure, of classifiers and of detectors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "halfstep/io/drawing.h"

namespace halfstep::training {

/// What draw_confusion_figure() shows.
struct ConfusionFigure {
  std::string title = {}, summary = {};     ///< the summary is under the title
  std::int64_t classes = 0;                 ///< rows and columns
  std::vector<std::int64_t> counts = {};    ///< [classes, classes] of what it is (row) and what the network says
  std::vector<std::string> rows = {};       ///< names, of all of them
  std::vector<std::string> columns = {};    ///< names, of all of them
  std::int64_t most_named = 40;             ///< of more classes there are no names, and of more than 100 blocks
  std::string no_mistakes = "No mistakes";  ///< heading where the diagonal has all counts
  /// The text of a mistake, by row and column, in so many pixels of a size of 11.
  std::function<std::string(std::int64_t row, std::int64_t column, double width)> mistake = {};
};
/// The matrix with its most frequent mistakes beside it.
io::Drawing draw_confusion_figure(const ConfusionFigure& figure);

/// Whether a run with so many classes has a matrix. The log says once for a folder that it lacks one.
bool has_confusion(std::int64_t classes, const std::filesystem::path& folder);

/// The name of a class, or its number where it has none.
std::string class_name(const std::vector<std::string>& names, std::int64_t label);

}  // namespace halfstep::training
