// SPDX-License-Identifier: Apache-2.0
// Joining tensors, taking them apart, repeating and reordering them.
#pragma once

#include <initializer_list>
#include <span>
#include <vector>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// Joins tensors along an existing dimension; the other sizes must agree. The result has the promoted dtype of all.
/// Empty one-dimensional tensors are skipped, as in PyTorch. Throws ShapeError, DTypeError, and Error for no tensors.
HS_API Tensor cat(std::span<const Tensor> tensors, std::int64_t dim = 0);
inline Tensor cat(std::initializer_list<Tensor> tensors, std::int64_t dim = 0) {
  return cat(std::span<const Tensor>(tensors.begin(), tensors.size()), dim);
}
/// Joins tensors of one shape along a new dimension.
HS_API Tensor stack(std::span<const Tensor> tensors, std::int64_t dim = 0);
inline Tensor stack(std::initializer_list<Tensor> tensors, std::int64_t dim = 0) {
  return stack(std::span<const Tensor>(tensors.begin(), tensors.size()), dim);
}

/// Views of `size` elements each along `dim`; the last may be shorter.
HS_API std::vector<Tensor> split(const Tensor& input, std::int64_t size, std::int64_t dim = 0);
/// Views of the sizes given, which must add up to the dimension's. (A vector, so that a number is not taken for a
/// list.)
HS_API std::vector<Tensor> split(const Tensor& input, const std::vector<std::int64_t>& sizes, std::int64_t dim = 0);
/// At most `chunks` views of equal size, the last possibly shorter.
HS_API std::vector<Tensor> chunk(const Tensor& input, std::int64_t chunks, std::int64_t dim = 0);
/// One view for each index along `dim`, without that dimension.
HS_API std::vector<Tensor> unbind(const Tensor& input, std::int64_t dim = 0);

/// The input `repeats[d]` times along each dimension d; more repeats than dimensions add leading ones.
HS_API Tensor repeat(const Tensor& input, const Shape& repeats);
/// As repeat, but fewer repeats than dimensions mean the last ones.
HS_API Tensor tile(const Tensor& input, const Shape& repeats);
/// Each element `repeats` times in a row along `dim`.
HS_API Tensor repeat_interleave(const Tensor& input, std::int64_t repeats, std::int64_t dim);
/// Moves elements by `shifts[i]` places along `dims[i]`; what leaves at one end comes back at the other. Without `dims`
/// the elements are moved in row-major order.
HS_API Tensor roll(const Tensor& input, const Shape& shifts, const Shape& dims = {});
/// Reverses the order of the elements along each of `dims`.
HS_API Tensor flip(const Tensor& input, const Shape& dims);

}  // namespace halfstep
