// SPDX-License-Identifier: Apache-2.0
// Blocks of smooth_l1_loss and huber_loss, in vectors of float32.
#pragma once

#include <cstdint>

namespace halfstep::cpu {

/// With d = |x - y|: terms[i] = d^2 / (2 beta) where d < beta, else d - beta / 2. `terms` may be x or y.
void smooth_l1_terms(const float* x, const float* y, float beta, std::int64_t n, float* terms);
/// Their derivatives by x; by y with both swapped.
void smooth_l1_slopes(const float* x, const float* y, float beta, std::int64_t n, float* slopes);
/// terms[i] = d^2 / 2 where d <= delta, else delta (d - delta / 2).
void huber_terms(const float* x, const float* y, float delta, std::int64_t n, float* terms);
void huber_slopes(const float* x, const float* y, float delta, std::int64_t n, float* slopes);

}  // namespace halfstep::cpu
