// SPDX-License-Identifier: Apache-2.0
// Internal: values that a step changes, until it is known whether the step counts.
#pragma once

#include <initializer_list>
#include <vector>

#include "halfstep/core/tensor.h"

namespace halfstep::quant {

/// The values as they were before the steps that aren't settled, on their device.
class Pending {
 public:
  /// To be called before `values`, always the same ones, are changed: keeps what they are, if nothing is pending.
  void hold(std::initializer_list<const Tensor*> values);
  /// What is pending counts, or, where `found_inf` (f32 or bool, one element) isn't 0, the values become what they were
  /// before it. The device decides. An undefined `found_inf` is 0.
  void settle(const Tensor& found_inf, std::initializer_list<const Tensor*> values);

 private:
  Tensor flag_;  // f32 [1]: whether something is pending
  std::vector<Tensor> kept_;
};

}  // namespace halfstep::quant
