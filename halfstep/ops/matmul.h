// SPDX-License-Identifier: Apache-2.0
// Matrix products. Inputs of different dtypes compute in their promoted dtype, as everywhere; sums are taken in float32
// (float64 for f64) and rounded once.
#pragma once

#include <optional>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// Options of matrix products.
struct MatmulOptions {
  std::optional<DType> dtype =
      {};  ///< of the result, when it is to be another than the inputs': f16 and bf16 inputs may give f32
};

/// [m, k] x [k, n] -> [m, n]. Throws ShapeError for anything else.
HS_API Tensor mm(const Tensor& input, const Tensor& other, const MatmulOptions& options = {});
/// [b, m, k] x [b, k, n] -> [b, m, n].
HS_API Tensor bmm(const Tensor& input, const Tensor& other, const MatmulOptions& options = {});
/// [m, k] x [k] -> [m].
HS_API Tensor mv(const Tensor& input, const Tensor& vector);
/// Matrix product with NumPy's rules: vectors are rows or columns, leading dimensions broadcast.
HS_API Tensor matmul(const Tensor& input, const Tensor& other);
/// [n] and [m] -> [n, m].
HS_API Tensor outer(const Tensor& input, const Tensor& other);
/// input * weight^T + bias: [*, in], weight [out, in], bias [out] (may be undefined) -> [*, out].
HS_API Tensor linear(const Tensor& input, const Tensor& weight, const Tensor& bias = {});
/// Options of addmm, addmv, addr, addbmm and baddbmm.
struct AddmmOptions {
  double beta = 1;   ///< factor of the input; 0 ignores it, NaN included
  double alpha = 1;  ///< factor of the product
};
/// beta * input + alpha * (a x b), input broadcast to [m, n].
HS_API Tensor addmm(const Tensor& input, const Tensor& a, const Tensor& b, const AddmmOptions& options = {});
/// beta * input + alpha * (matrix x vector), input broadcast to [m].
HS_API Tensor addmv(const Tensor& input, const Tensor& matrix, const Tensor& vector, const AddmmOptions& options = {});
/// beta * input + alpha * outer(a, b), input broadcast to [n, m].
HS_API Tensor addr(const Tensor& input, const Tensor& a, const Tensor& b, const AddmmOptions& options = {});
/// beta * input + alpha * (the sum of the products of a batch), input broadcast to [m, n].
HS_API Tensor addbmm(const Tensor& input, const Tensor& a, const Tensor& b, const AddmmOptions& options = {});
/// beta * input + alpha * (a x b) for batches, input broadcast to [b, m, n].
HS_API Tensor baddbmm(const Tensor& input, const Tensor& a, const Tensor& b, const AddmmOptions& options = {});

}  // namespace halfstep
