// SPDX-License-Identifier: Apache-2.0
// Views: other sizes and strides on the same storage. All are recorded; see the methods of Tensor for the forms with a
// dot.
#pragma once

#include <span>
#include <vector>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// Joins dimensions start to end (both included, counted from the end when negative) into one.
HS_API Tensor flatten(const Tensor& input, std::int64_t start = 0, std::int64_t end = -1);
/// The elements in row-major order under other sizes, one of which may be -1: a view where strides allow it, else a
/// copy. Throws ShapeError when the numbers of elements differ.
HS_API Tensor reshape(const Tensor& input, const Shape& sizes);
/// The same data under other sizes; throws ShapeError when that needs a copy.
HS_API Tensor view(const Tensor& input, const Shape& sizes);
/// view() to the sizes of `other`.
HS_API Tensor view_as(const Tensor& input, const Tensor& other);
/// reshape() to the sizes of `other`.
HS_API Tensor reshape_as(const Tensor& input, const Tensor& other);
/// Splits one dimension into several; one of the sizes may be -1.
HS_API Tensor unflatten(const Tensor& input, std::int64_t dim, const Shape& sizes);
/// Without the dimensions of size 1; with `dim` that one only, and only if its size is 1.
HS_API Tensor squeeze(const Tensor& input);
HS_API Tensor squeeze(const Tensor& input, std::int64_t dim);
/// With a new dimension of size 1 in front of `dim`; -1 puts it last.
HS_API Tensor unsqueeze(const Tensor& input, std::int64_t dim);
/// Repeats dimensions of size 1 without copying; -1 keeps a size.
HS_API Tensor expand(const Tensor& input, const Shape& sizes);
/// expand() to the sizes of `other`.
HS_API Tensor expand_as(const Tensor& input, const Tensor& other);
/// expand() under NumPy's name.
HS_API Tensor broadcast_to(const Tensor& input, const Shape& sizes);
/// All tensors expanded to their common shape.
HS_API std::vector<Tensor> broadcast_tensors(std::span<const Tensor> tensors);
/// Grids of the coordinates in vectors: result i has value i of tensor i along dimension i ("ij" indexing).
HS_API std::vector<Tensor> meshgrid(std::span<const Tensor> tensors);
/// Slice number `index` along `dim`, without that dimension. Throws Error when there is no such index.
HS_API Tensor select(const Tensor& input, std::int64_t dim, std::int64_t index);
/// `length` slices along `dim` from number `start` on.
HS_API Tensor narrow(const Tensor& input, std::int64_t dim, std::int64_t start, std::int64_t length);
/// Dimensions `source` come to the places `destination`; the others keep their order.
HS_API Tensor movedim(const Tensor& input, const Shape& source, const Shape& destination);
/// transpose() under NumPy's name.
HS_API Tensor swapaxes(const Tensor& input, std::int64_t axis0, std::int64_t axis1);
/// [N, C, H, W] with its channels next to each other in memory, the layout of image networks: itself if they are, or,
/// of images of one channel or place, which lie the same in every layout, a view whose strides say channels-last.
HS_API Tensor to_channels_last(const Tensor& input);
/// Whether a tensor of 4 dimensions lies in memory as [N, H, W, C].
HS_API bool is_channels_last(const Tensor& input);
/// Two dimensions exchanged.
HS_API Tensor transpose(const Tensor& input, std::int64_t dim0, std::int64_t dim1);
/// Dimension i of the result is dimension `dims[i]` of the input; all must be named.
HS_API Tensor permute(const Tensor& input, const Shape& dims);
/// The last two dimensions exchanged (the gradient rules' matrix transpose).
HS_API Tensor matrix_transpose(const Tensor& input);
/// Any sizes, strides and offset (in elements) on the input's storage; throws ShapeError when they leave it. It is
/// differentiable, including overlapping elements, if the input is dense and contains all the elements.
HS_API Tensor as_strided(const Tensor& input, const Shape& sizes, const Shape& strides, std::int64_t offset);
/// Zeros of `sizes` with `gradient` written where slice(dim, start, end, step) would read: the gradient of slice.
HS_API Tensor slice_backward(const Tensor& gradient, const Shape& sizes, std::int64_t dim, std::int64_t start,
                             std::int64_t end, std::int64_t step);

}  // namespace halfstep
