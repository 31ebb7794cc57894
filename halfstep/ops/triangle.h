// SPDX-License-Identifier: Apache-2.0
// Triangles and diagonals of matrices.
#pragma once

#include "halfstep/core/tensor.h"

namespace halfstep {

/// The lower triangle of the matrices in the last two dimensions, zeros elsewhere. `diagonal` moves its edge up by so
/// many places.
HS_API Tensor tril(const Tensor& input, std::int64_t diagonal = 0);
/// The upper triangle, likewise.
HS_API Tensor triu(const Tensor& input, std::int64_t diagonal = 0);
/// tril() in place.
HS_API Tensor tril_(Tensor input, std::int64_t diagonal = 0);
/// triu() in place.
HS_API Tensor triu_(Tensor input, std::int64_t diagonal = 0);

/// A view of the diagonal of two dimensions, which is the last dimension of the result. `offset` above 0 is above the
/// main diagonal.
HS_API Tensor diagonal(const Tensor& input, std::int64_t offset = 0, std::int64_t dim1 = 0, std::int64_t dim2 = 1);
/// Zeros of `sizes` with `gradient` where diagonal(offset, dim1, dim2) would read: the gradient of diagonal.
HS_API Tensor diagonal_backward(const Tensor& gradient, const Shape& sizes, std::int64_t offset, std::int64_t dim1,
                                std::int64_t dim2);
/// [*, n] -> [*, n + |offset|, n + |offset|], with the values on the diagonal.
HS_API Tensor diag_embed(const Tensor& input, std::int64_t offset = 0);
/// A vector as the diagonal of a matrix; or the diagonal of a matrix, copied.
HS_API Tensor diag(const Tensor& input, std::int64_t offset = 0);
/// The sum of the main diagonal of a matrix.
HS_API Tensor trace(const Tensor& input);

}  // namespace halfstep
