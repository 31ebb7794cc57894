// SPDX-License-Identifier: Apache-2.0
// Blocks of smooth_l1_loss and huber_loss in vectors, of float32 or float64.
#pragma once

#include <cstdint>

namespace halfstep::cpu {

/// With d = |x - y| and parameter p.
enum class HuberPart : std::int8_t {
  smooth_l1_terms,   ///< d^2 / (2 p) where d < p, else d - p / 2
  smooth_l1_slopes,  ///< their derivatives by x; by y with both swapped
  huber_terms,       ///< d^2 / 2 where d <= p, else p (d - p / 2)
  huber_slopes,
};

/// to[i] = the part of x[i] and y[i]; `to` may be x or y.
void huber_block(HuberPart part, const float* x, const float* y, float parameter, std::int64_t n, float* to);
void huber_block(HuberPart part, const double* x, const double* y, double parameter, std::int64_t n, double* to);

}  // namespace halfstep::cpu
