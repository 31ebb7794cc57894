// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>

namespace halfstep::training {

/// The class of a row of scores: the largest one's, the first of equal ones; -1 when all are NaN.
template <class T>
std::int64_t likeliest(const T* row, std::int64_t classes) {
  std::int64_t best = -1;
  for (std::int64_t c = 0; c < classes; ++c) {
    if (!std::isnan(row[c]) && (best < 0 || row[c] > row[best])) best = c;
  }
  return best;
}

}  // namespace halfstep::training
