// SPDX-License-Identifier: Apache-2.0
// Blocks of the binary cross entropy, of logits and of probabilities, in vectors of float32.
#pragma once

#include <cstdint>

namespace halfstep::cpu {

/// terms[i] = (1 - y) x + (1 + (w - 1) y) log(1 + exp(-x)) for logits x, targets y and positive weights w; `terms` may
/// be one of them.
void bce_with_logits_terms(const float* x, const float* y, const float* w, std::int64_t n, float* terms);
/// terms[i] = -(y max(log x, -100) + (1 - y) max(log(1 - x), -100)) for probabilities x; without w.
void bce_terms(const float* x, const float* y, const float* w, std::int64_t n, float* terms);
/// slopes[i] = (1 - y) sigmoid(x) - w y sigmoid(-x), the terms' derivatives by x.
void bce_with_logits_slopes(const float* x, const float* y, const float* w, std::int64_t n, float* slopes);

}  // namespace halfstep::cpu
