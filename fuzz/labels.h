// SPDX-License-Identifier: Apache-2.0
// What every reader of labels promises.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>

#include "halfstep/core/text.h"
#include "halfstep/data/detection_labels.h"

namespace halfstep::fuzz {

/// Boxes with an area that lie in the picture, and polygons too.
inline void check_objects(std::span<const data::LabeledObject> objects, std::int64_t classes) {
  constexpr double kRounding = 1e-9;
  for (const data::LabeledObject& o : objects) {
    if (o.label < 0 || o.label >= classes) std::abort();
    if (!(o.width > 0 && o.height > 0)) std::abort();
    if (!(o.x - o.width / 2 >= -kRounding && o.x + o.width / 2 <= 1 + kRounding)) std::abort();
    if (!(o.y - o.height / 2 >= -kRounding && o.y + o.height / 2 <= 1 + kRounding)) std::abort();
    for (const auto& polygon : o.segments) {
      if (polygon.size() < 6 || polygon.size() % 2 != 0) std::abort();
      for (const double number : polygon) {
        if (!(number >= 0 && number <= 1)) std::abort();
      }
    }
  }
}

/// Texts of one line for what was skipped.
inline void check_problems(std::int64_t skipped, std::span<const std::string> texts) {
  if (skipped < static_cast<std::int64_t>(texts.size())) std::abort();
  for (const std::string& text : texts) {
    if (text.empty() || printable(text) != text) std::abort();
  }
}

}  // namespace halfstep::fuzz
