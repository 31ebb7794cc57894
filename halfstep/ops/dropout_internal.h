// SPDX-License-Identifier: Apache-2.0
// What ops that drop elements share.
#pragma once

#include <cstdint>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// Reserves a word of the default generator for each of `numel` elements: seed and offset, as a tensor of two i64 on
/// `device`, since they change from step to step.
Tensor reserve_dropout_state(std::int64_t numel, Device device);

}  // namespace halfstep
