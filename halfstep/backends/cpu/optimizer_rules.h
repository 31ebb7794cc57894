// SPDX-License-Identifier: Apache-2.0
// The optimizers' formulas on blocks of values that lie in the first-level cache, vectorised.
#pragma once

#include <cstdint>

#include "halfstep/core/dtype.h"

namespace halfstep::cpu {

/// Where the rounding of the new parameters goes, f16 or bf16; nowhere when null.
struct RoundedCopy {
  void* data = nullptr;
  DType dtype = DType::bf16;
};

struct SgdRule {
  double lr, momentum, weight_decay;
  double rate;  ///< share of the gradient in the momentum buffer: 1 - dampening, or 1 at the first step
  double kept;  ///< share of the buffer that stays: the momentum, or 0 at the first step
  double sign;  ///< -1 to maximise
  bool nesterov;
};
/// p -= lr * d, where d = sign * g + weight_decay * p, or with momentum the buffer b = kept * b + rate * d (nesterov:
/// d + momentum * b). `states`: b; none without momentum.
void sgd_block(const SgdRule& rule, float* p, const float* g, float* const* states, std::int64_t n, RoundedCopy copy);
void sgd_block(const SgdRule& rule, double* p, const double* g, double* const* states, std::int64_t n);

struct AdamRule {
  double beta1, beta2, eps;
  double step_size;  ///< lr / (1 - beta1^t)
  double root;       ///< 1 / sqrt(1 - beta2^t)
  double shrink;     ///< what the parameter is multiplied by first: 1 - lr * weight decay where that is decoupled
  double decay;      ///< share of the parameter that is added to the gradient, where it isn't
  double sign;       ///< -1 to maximise
  bool amsgrad;
};
/// p -= step_size * m / (root * sqrt(v) + eps) after m, v moved to the gradient and its square. `states`: m, v, and for
/// amsgrad the largest v so far, which then takes v's place.
void adam_block(const AdamRule& rule, float* p, const float* g, float* const* states, std::int64_t n, RoundedCopy copy);
void adam_block(const AdamRule& rule, double* p, const double* g, double* const* states, std::int64_t n);

}  // namespace halfstep::cpu
