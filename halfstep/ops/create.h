// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <vector>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// All elements `value`.
HS_API Tensor full(const Shape& sizes, Scalar value, const TensorOptions& options = {});
HS_API Tensor zeros(const Shape& sizes, const TensorOptions& options = {});
HS_API Tensor ones(const Shape& sizes, const TensorOptions& options = {});
/// As `other` in sizes, dtype, device and layout.
HS_API Tensor zeros_like(const Tensor& other);
HS_API Tensor ones_like(const Tensor& other);
HS_API Tensor full_like(const Tensor& other, Scalar value);
/// A tensor of the values given, row-major, converted to the dtype of the options. Throws ShapeError when their number
/// is not that of `sizes`.
HS_API Tensor tensor(const std::vector<double>& values, const Shape& sizes, const TensorOptions& options = {});
/// A vector of the values given.
HS_API Tensor tensor(const std::vector<double>& values, const TensorOptions& options = {});
HS_API Tensor tensor_from_integers(const std::vector<std::int64_t>& values, const Shape& sizes,
                                   const TensorOptions& options = {.dtype = i64});
/// The same for a vector of integers, without a detour over double. (Lists in braces mean numbers and take the form
/// above.)
template <std::same_as<std::vector<std::int64_t>> Values>
Tensor tensor(const Values& values, const Shape& sizes, const TensorOptions& options = {.dtype = i64}) {
  return tensor_from_integers(values, sizes, options);
}
/// A 0-d tensor.
HS_API Tensor scalar_tensor(Scalar value, const TensorOptions& options = {});
/// start, start + step, ... below end (above it for a negative step). i64 by default, as PyTorch's is for integers.
HS_API Tensor arange(std::int64_t start, std::int64_t end, std::int64_t step = 1,
                     const TensorOptions& options = {.dtype = i64});
/// `steps` values from `start` to `end`, both included, evenly spaced.
HS_API Tensor linspace(double start, double end, std::int64_t steps, const TensorOptions& options = {});
/// The identity matrix.
HS_API Tensor eye(std::int64_t n, const TensorOptions& options = {});

}  // namespace halfstep
