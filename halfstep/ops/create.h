// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <initializer_list>
#include <vector>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// All elements `value`.
HS_API Tensor full(const Shape& sizes, Scalar value, const TensorOptions& options = {});
/// All elements 0.
HS_API Tensor zeros(const Shape& sizes, const TensorOptions& options = {});
/// All elements 1.
HS_API Tensor ones(const Shape& sizes, const TensorOptions& options = {});
/// zeros() with the sizes, dtype, device and layout of `other`.
HS_API Tensor zeros_like(const Tensor& other);
/// ones() with the sizes, dtype, device and layout of `other`.
HS_API Tensor ones_like(const Tensor& other);
/// full() with the sizes, dtype, device and layout of `other`.
HS_API Tensor full_like(const Tensor& other, Scalar value);
/// With the sizes, device and layout of `other`, and another dtype.
HS_API Tensor zeros_like(const Tensor& other, DType dtype);
HS_API Tensor ones_like(const Tensor& other, DType dtype);
HS_API Tensor full_like(const Tensor& other, Scalar value, DType dtype);
/// A tensor of the values given, row-major, converted to the dtype of the options. Throws ShapeError when their number
/// is not that of `sizes`.
HS_API Tensor tensor(const std::vector<double>& values, const Shape& sizes, const TensorOptions& options = {});
/// A vector of the values given: `tensor({1, 2, 3})`.
HS_API Tensor tensor(const std::vector<double>& values, const TensorOptions& options = {});
/// A matrix, or a stack of matrices, of the rows given: `tensor({{1, 2}, {3, 4}})`. Throws ShapeError when they differ
/// in length.
HS_API Tensor tensor(std::initializer_list<std::initializer_list<double>> rows, const TensorOptions& options = {});
HS_API Tensor tensor(std::initializer_list<std::initializer_list<std::initializer_list<double>>> matrices,
                     const TensorOptions& options = {});
HS_API Tensor tensor_from_integers(const std::vector<std::int64_t>& values, const Shape& sizes,
                                   const TensorOptions& options = {.dtype = i64});
/// The same for a vector of integers, without converting through double. (Brace lists hold numbers and use the form
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
/// 0, 1, ... end - 1.
HS_API Tensor arange(std::int64_t end);
namespace detail {
HS_API Tensor arange_floating(double start, double end, double step, const TensorOptions& options);
}  // namespace detail
/// The same if at least one of the numbers is floating-point: f32 by default. Element i is start + i * step, computed
/// in float64.
template <class A, class B, class C = int>
requires(std::floating_point<A> || std::floating_point<B> || std::floating_point<C>) Tensor
    arange(A start, B end, C step = 1, const TensorOptions& options = {}) {
  return detail::arange_floating(static_cast<double>(start), static_cast<double>(end), static_cast<double>(step),
                                 options);
}
/// `steps` values from `start` to `end`, both included, evenly spaced.
HS_API Tensor linspace(double start, double end, std::int64_t steps, const TensorOptions& options = {});
/// `steps` values from base^start to base^end, evenly spaced in their exponents.
HS_API Tensor logspace(double start, double end, std::int64_t steps, double base = 10,
                       const TensorOptions& options = {});
/// The identity matrix.
HS_API Tensor eye(std::int64_t n, const TensorOptions& options = {});

}  // namespace halfstep
