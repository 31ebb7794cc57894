// SPDX-License-Identifier: Apache-2.0
// Sorting along a dimension. NaN counts as the largest value, -0 equals 0, and equal values keep their order.
#pragma once

#include <optional>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// Options of sort and argsort.
struct SortOptions {
  bool descending = false;
  bool stable = false;  ///< for PyTorch's signature: equal values always keep their order here
};
/// Values, and the i64 index that each had along the dimension.
struct SortResult {
  Tensor values;
  Tensor indices;
};
/// The elements in ascending order along a dimension (or descending, with the option).
HS_API SortResult sort(const Tensor& input, std::int64_t dim = -1, const SortOptions& options = {});
/// The indices that sort would give.
HS_API Tensor argsort(const Tensor& input, std::int64_t dim = -1, const SortOptions& options = {});

/// Options of topk.
struct TopKOptions {
  bool largest = true;  ///< false: the smallest
  bool sorted = true;   ///< best first (they come so in any case)
};
/// The k largest along the dimension; of equal values those with the lower index.
HS_API SortResult topk(const Tensor& input, std::int64_t k, std::int64_t dim = -1, const TopKOptions& options = {});
/// The k-th smallest along the dimension (k from 1), and its index.
HS_API SortResult kthvalue(const Tensor& input, std::int64_t k, std::int64_t dim = -1, bool keepdim = false);

}  // namespace halfstep
