// SPDX-License-Identifier: Apache-2.0
// Internal: what the readers of labels have in common.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "halfstep/data/detection_labels.h"

namespace halfstep::data {

/// The share of a box that lies in the picture, below which the label is taken for a mistake: one in pixels, or of
/// another picture. What annotators draw goes over the edge by a few pixels.
inline constexpr double kLeastInside = 0.5;

/// As place_box, for the polygons' bounding box; clips the polygons too.
std::string place_segments(LabeledObject& object);

/// Keeps the first of labels with the same class and box.
void drop_equal(std::vector<LabeledObject>& objects, std::string_view name, LabelProblems& problems);

}  // namespace halfstep::data
