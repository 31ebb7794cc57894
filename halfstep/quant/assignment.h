// SPDX-License-Identifier: Apache-2.0
// Which layers of a quantized network are left in floating point for its accuracy.
#pragma once

#include <cstddef>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "halfstep/core/export.h"

namespace halfstep::quant {

/// What one measurement of assign_precision gave.
struct AssignmentRound {
  std::vector<std::string> left = {};  ///< layers in floating point, as in `order`
  double accuracy = 0;
  bool met = false;  ///< at least AssignmentOptions::least_accuracy
};

/// Options of assign_precision.
struct AssignmentOptions {
  double least_accuracy = 0;  ///< of float32 less the drop that is allowed
  /// The most layers that are left; in any case fewer than there are.
  std::size_t most = std::numeric_limits<std::size_t>::max();
  std::function<void(const AssignmentRound& round)> on_round = {};  ///< called after each measurement
};

/// What assign_precision found.
struct Assignment {
  bool met = false;
  std::vector<std::string> left = {};        ///< layers in floating point: few that do, or, not met, the best measured
  double accuracy = 0;                       ///< measured with them
  std::vector<AssignmentRound> rounds = {};  ///< all measurements
};

/// Looks for few layers that have to stay in floating point for a quantized network to be accurate enough. `order` has
/// the layers that can stay so, the one that bears quantization worst first, as sensitivity() sorts them; `accuracy`
/// measures the network with some of them in floating point and all others quantized, where more is better.
///
/// It measures the network without any such layer, then with the first 1, 2, 4, ... of them, halves between the last
/// two until the first k do and the first k - 1 don't, and then tries for each of these k, the most robust first,
/// whether it can be quantized after all. These are at most 2 + 2 log2(n) + k measurements of n layers, each of another
/// set; none of the layers that are found can be given up alone if accuracy only grows with their number. NaN is never
/// enough. Not met is the set of the highest accuracy, of several the smallest. Throws Error for a layer that is named
/// twice, and what `accuracy` throws. The order by sensitivity and the fallback layer by layer are those of accuracy
/// control in NNCF (quantize_with_accuracy_control) and Intel Neural Compressor.
HS_API Assignment assign_precision(std::span<const std::string> order,
                                   const std::function<double(std::span<const std::string> left)>& accuracy,
                                   const AssignmentOptions& options);

}  // namespace halfstep::quant
