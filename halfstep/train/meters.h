// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "halfstep/core/export.h"

namespace halfstep::training {

/// The last value of a quantity and its mean, as progress lines show them.
struct Meter {
  double last = 0;
  double sum = 0;
  double count = 0;
  /// One more value, which stands for `n` samples.
  void add(double value, double n = 1) {
    last = value;
    sum += value * n;
    count += n;
  }
  /// 0 before the first.
  double mean() const { return count > 0 ? sum / count : 0; }
};

/// Counts samples whose class is the network's first prediction, or among its first five.
struct Hits {
  std::int64_t top1 = 0;
  std::int64_t top5 = 0;
  Hits& operator+=(const Hits& other) {
    top1 += other.top1;
    top5 += other.top5;
    return *this;
  }
};

/// Counts over rows of `classes` scores, one for each label. A score that isn't a number never hits; ties count against
/// the label, lower classes first, so that a network with constant output doesn't appear correct.
HS_API Hits count_hits(std::span<const float> scores, std::span<const std::int64_t> labels);

}  // namespace halfstep::training
