// SPDX-License-Identifier: Apache-2.0
// How tensors are written as text; Tensor::str() and operator<< use it.
#pragma once

#include <optional>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// How tensors are printed. The defaults are PyTorch's.
struct PrintOptions {
  int precision = 4;                              ///< digits after the point of floating values
  std::int64_t threshold = 1000;                  ///< tensors of more elements are cut in the middle of each dimension
  std::int64_t edge_items = 3;                    ///< elements shown at each end of a dimension that is cut
  int line_width = 80;                            ///< lines are broken before this column
  std::optional<bool> scientific = std::nullopt;  ///< always or never; by default where the values call for it
};

/// Sets how tensors are printed from now on, by all threads. Throws Error for negative numbers.
HS_API void set_print_options(const PrintOptions& options);
/// How tensors are printed now.
HS_API PrintOptions print_options();

}  // namespace halfstep
