// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/meters.h"

#include <cmath>

namespace halfstep::training {

Hits count_hits(std::span<const float> scores, std::span<const std::int64_t> labels) {
  Hits hits;
  if (labels.empty()) return hits;
  const std::size_t classes = scores.size() / labels.size();
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const auto label = static_cast<std::size_t>(labels[i]);
    if (labels[i] < 0 || label >= classes) continue;
    const std::span<const float> row = scores.subspan(i * classes, classes);
    const float own = row[label];
    if (std::isnan(own)) continue;
    int above = 0;
    for (std::size_t k = 0; k < classes; ++k) above += row[k] > own || (row[k] == own && k < label) ? 1 : 0;
    hits.top1 += above < 1 ? 1 : 0;
    hits.top5 += above < 5 ? 1 : 0;
  }
  return hits;
}

}  // namespace halfstep::training
