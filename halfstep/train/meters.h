// SPDX-License-Identifier: Apache-2.0
#pragma once

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

}  // namespace halfstep::training
