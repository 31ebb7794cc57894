// SPDX-License-Identifier: Apache-2.0
// From the sums that a convolution's weight gradient is made of to the gradient.
#pragma once

#include <cstdint>

#include "halfstep/backends/cpu/onednn.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep::cpu {

/// Sums that add up to the gradient, some of them in each term. That of filter o, tap t and channel c is
/// sums[term * all + o * filter + t * tap + c / run * next_run + c % run]. Taps of a line may count as one with the
/// channels of all: [taps, channels] is [KH KW, C] or [KH, KW C].
struct WeightSums {
  const float* sums;
  std::int64_t terms, all;
  std::int64_t filter;
  std::int64_t taps, tap;
  std::int64_t channels, run, next_run;
};

/// Floats of scratch memory that write_weight() needs.
std::int64_t weight_line_floats(const ConvGeometry& geometry);
/// Adds up the terms in their order and writes them to `w`, of any layout and floating dtype, rounded once. False where
/// a sum isn't finite.
bool write_weight(const ConvGeometry& geometry, const WeightSums& from, float* lines, TensorView& w);

}  // namespace halfstep::cpu
