// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// A tensor with the name it has in its network, such as `fc1.weight`. Optimizers and scalers speak of parameters by
/// these names.
struct NamedTensor {
  std::string name;
  Tensor tensor;
};

/// All of a network's parameters, in the order of their registration.
using NamedTensors = std::vector<NamedTensor>;

}  // namespace halfstep
