// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/ops/attributes.h"

namespace halfstep {

/// scaled_dot_product_attention and its backward pass.
struct AttentionAttributes {
  double scale = 1;
  double dropout = 0;
  bool causal = false;
  bool want[4] = {true, true, true, true};  ///< which gradients are asked for: query, key, value, mask
  OptionalDType dtypes[3] = {};             ///< of the gradients of query, key and value
};

}  // namespace halfstep
