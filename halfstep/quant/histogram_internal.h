// SPDX-License-Identifier: Apache-2.0
// Internal: histograms of calibration, and what is searched in them.
#pragma once

#include <cstdint>
#include <vector>

namespace halfstep::quant {

/// Counts in equal bins from low to high (in one value's neighbourhood if they are equal).
struct Histogram {
  std::vector<float> counts;
  float low = 0, high = 0;
};

/// torch.histc: of the values from low to high.
std::vector<float> histc(const std::vector<float>& values, std::size_t bins, float low, float high);
/// Adds values, which lie from low to high, to the histogram, which grows to cover them: as PyTorch's
/// HistogramObserver, each old bin is spread in 16 parts over the new ones. An empty one (no counts) takes their range.
void add_to(Histogram& histogram, const std::vector<float>& values, std::size_t bins, float low, float high);

/// A range of values.
struct ValueRange {
  float low, high;
};
/// The range of least squared error when its values are rounded to `levels` of them, by PyTorch's search from both
/// ends.
ValueRange least_squares_range(const Histogram& histogram, int levels);
/// The range that holds `share` of the values, by linear interpolation in bins: half of the rest is cut on either side,
/// or all of it on the far side where all values have one sign.
ValueRange percentile_range(const Histogram& histogram, double share);
/// Of magnitudes (a histogram from 0): the one at which to clip, so that the histogram, with what is clipped in its
/// last bin, diverges least (Kullback and Leibler) from the same rounded to `levels`. Migacz, 8-bit inference with
/// TensorRT, 2017.
float least_divergent_bound(const Histogram& histogram, std::size_t levels);

}  // namespace halfstep::quant
