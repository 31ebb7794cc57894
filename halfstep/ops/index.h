// SPDX-License-Identifier: Apache-2.0
// Reading and writing by index. Indices are i64 (i32 is converted). Every index is checked: an Error names its value,
// its position and the bound. Negative indices count from the end in `index`, `index_put` and related functions only,
// as in PyTorch. Sums over repeated indices are taken in a fixed order, so that results are bit-identical from run to
// run, and in float32 for f16 and bf16, rounded once.
//
// Functions whose names end in `_` write into their first argument, which may be a view, and return it.
#pragma once

#include <initializer_list>
#include <span>
#include <vector>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// result[i][j] = input[index[i][j]][j] for dim 0, and so on. `index` has as many dimensions as `input` and, but in
/// `dim`, is no larger; the result has its sizes.
HS_API Tensor gather(const Tensor& input, std::int64_t dim, const Tensor& index);
/// gather along `dim` with `index` and `input` broadcast against each other in the other dimensions.
HS_API Tensor take_along_dim(const Tensor& input, const Tensor& index, std::int64_t dim);
/// The input with input[index[i][j]][j] = src[i][j] for dim 0, and so on. Of several values for one place the last in
/// row-major order stays. The gradient of `src` is right where indices don't repeat, as in PyTorch.
HS_API Tensor scatter(const Tensor& input, std::int64_t dim, const Tensor& index, const Tensor& src);
HS_API Tensor scatter(const Tensor& input, std::int64_t dim, const Tensor& index, Scalar value);
HS_API Tensor scatter_(Tensor input, std::int64_t dim, const Tensor& index, const Tensor& src);
HS_API Tensor scatter_(Tensor input, std::int64_t dim, const Tensor& index, Scalar value);
/// As scatter, but values add up with each other and with the input.
HS_API Tensor scatter_add(const Tensor& input, std::int64_t dim, const Tensor& index, const Tensor& src);
HS_API Tensor scatter_add_(Tensor input, std::int64_t dim, const Tensor& index, const Tensor& src);
/// As scatter, but the largest of the values for a place and the input's there; NaN is the largest. The gradient is
/// divided evenly among equal ones. torch.scatter_reduce with `amax`.
HS_API Tensor scatter_amax(const Tensor& input, std::int64_t dim, const Tensor& index, const Tensor& src);

/// The slices of `input` along `dim` that the vector `index` names.
HS_API Tensor index_select(const Tensor& input, std::int64_t dim, const Tensor& index);
/// The input with alpha * source added: slice i of `source` to slice index[i].
HS_API Tensor index_add(const Tensor& input, std::int64_t dim, const Tensor& index, const Tensor& source,
                        Scalar alpha = 1);
HS_API Tensor index_add_(Tensor input, std::int64_t dim, const Tensor& index, const Tensor& source, Scalar alpha = 1);

/// input[indices[0], indices[1], ...] as NumPy and PyTorch mean it: indices broadcast together; an undefined one stands
/// for the whole dimension; a bool one for the places where it is true, over as many dimensions as it has. The
/// dimensions of the indices come where the first of them stood, or in front when a whole dimension lies between them.
HS_API Tensor index(const Tensor& input, const std::vector<Tensor>& indices);
/// A copy of the input, with `values` (which broadcast to the shape of index(input, indices)) written there, or added
/// with `accumulate`.
HS_API Tensor index_put(const Tensor& input, const std::vector<Tensor>& indices, const Tensor& values,
                        bool accumulate = false);
HS_API Tensor index_put_(Tensor input, const std::vector<Tensor>& indices, const Tensor& values,
                         bool accumulate = false);
/// The elements where `mask` (bool; both broadcast) is true, as a vector. The host reads their number.
HS_API Tensor masked_select(const Tensor& input, const Tensor& mask);

/// Options of embedding.
struct EmbeddingFuncOptions {
  std::optional<std::int64_t> padding_idx =
      std::nullopt;  ///< a row that gets no gradient; negative counts from the end
};
/// Rows of `weight` [rows, width]: indices [*] -> [*, width].
HS_API Tensor embedding(const Tensor& indices, const Tensor& weight, const EmbeddingFuncOptions& options = {});

/// The positions of elements other than zero, [count, dimensions] i64. The host reads the count.
HS_API Tensor nonzero(const Tensor& input);
/// nonzero(condition) as one vector a dimension, to index with.
HS_API std::vector<Tensor> where(const Tensor& condition);
/// [*] i64 -> [*, num_classes] i64, 1 at the value's place. With -1, one more than the largest value, which the host
/// reads.
HS_API Tensor one_hot(const Tensor& input, std::int64_t num_classes = -1);

}  // namespace halfstep
