// SPDX-License-Identifier: Apache-2.0
// Sums of products, written with a letter for each dimension.
#pragma once

#include <initializer_list>
#include <span>
#include <string_view>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// Einstein's sum convention: `einsum("bij,bjk->bik", {a, b})`. Each operand has one letter (a-z, A-Z) per dimension;
/// the result has the letters after `->`, and all others are summed over. Without `->` the result has the letters that
/// occur once, in alphabetical order (capitals first), after the dimensions of the ellipsis. A letter that occurs twice
/// in an operand takes its diagonal. `...` stands for any number of dimensions, which broadcast. Dimensions of size 1
/// broadcast against others of their letter. Spaces are ignored.
///
/// Several operands are contracted in pairs, starting with the pair whose result is smallest compared with its
/// operands. Products are matrix products, which sum in float32 (float64 for f64); under autocast they run in lower
/// precision. Throws Error for a malformed equation and ShapeError for sizes that disagree.
HS_API Tensor einsum(std::string_view equation, std::span<const Tensor> operands);
inline Tensor einsum(std::string_view equation, std::initializer_list<Tensor> operands) {
  return einsum(equation, std::span<const Tensor>(operands.begin(), operands.size()));
}

/// Sums over the last `dims` dimensions of `input` and the first `dims` of `other`.
HS_API Tensor tensordot(const Tensor& input, const Tensor& other, int dims = 2);
/// Sums over dims_a[i] of `input` with dims_b[i] of `other`; the remaining dimensions of both are the result's.
HS_API Tensor tensordot(const Tensor& input, const Tensor& other, const Shape& dims_a, const Shape& dims_b);

}  // namespace halfstep
