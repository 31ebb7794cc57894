// SPDX-License-Identifier: Apache-2.0
// Unscaling of gradients, which amp_unscale, amp_check and the optimizers share.
#pragma once

#include "kernel.h"

namespace sim {

/// What unscaled gradients of T are: float32 for f16, whose range they may leave.
template <class T>
using Unscaled = std::conditional_t<std::is_same_v<T, Half>, float, T>;

/// value * inverse, rounded to what it is stored in.
template <class T>
Unscaled<T> unscale(T value, double inverse) {
  return convert<Unscaled<T>>(load(value) * static_cast<Compute<T>>(inverse));
}

}  // namespace sim
