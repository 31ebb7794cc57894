// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/core/tensor.h"

namespace halfstep {

/// input + alpha * other, elementwise with broadcasting. The result has the promoted dtype of the inputs (PyTorch's
/// rules); bools add as "or", integers wrap around. Throws DTypeError for a floating alpha with integers.
HS_API Tensor add(const Tensor& input, const Tensor& other, Scalar alpha = 1);
HS_API Tensor add(const Tensor& input, Scalar other);
/// input - alpha * other. Throws DTypeError for bool.
HS_API Tensor sub(const Tensor& input, const Tensor& other, Scalar alpha = 1);
HS_API Tensor sub(const Tensor& input, Scalar other);
/// Elementwise product.
HS_API Tensor mul(const Tensor& input, const Tensor& other);
HS_API Tensor mul(const Tensor& input, Scalar other);
/// Elementwise quotient, correctly rounded (also when dividing by a scalar); integers are divided as f32.
HS_API Tensor div(const Tensor& input, const Tensor& other);
HS_API Tensor div(const Tensor& input, Scalar other);
/// -input.
HS_API Tensor neg(const Tensor& input);
/// add(), written into `out`, which must have the result's shape. Not recorded.
HS_API Tensor& add_out(Tensor& out, const Tensor& input, const Tensor& other, Scalar alpha = 1);
/// sub(), written into `out` as by add_out().
HS_API Tensor& sub_out(Tensor& out, const Tensor& input, const Tensor& other, Scalar alpha = 1);
/// mul(), written into `out` as by add_out().
HS_API Tensor& mul_out(Tensor& out, const Tensor& input, const Tensor& other);
/// div(), written into `out` as by add_out().
HS_API Tensor& div_out(Tensor& out, const Tensor& input, const Tensor& other);

inline Tensor operator+(const Tensor& a, const Tensor& b) { return add(a, b); }
inline Tensor operator+(const Tensor& a, Scalar b) { return add(a, b); }
inline Tensor operator+(Scalar a, const Tensor& b) { return add(b, a); }
inline Tensor operator-(const Tensor& a, const Tensor& b) { return sub(a, b); }
inline Tensor operator-(const Tensor& a, Scalar b) { return sub(a, b); }
HS_API Tensor operator-(Scalar a, const Tensor& b);
inline Tensor operator*(const Tensor& a, const Tensor& b) { return mul(a, b); }
inline Tensor operator*(const Tensor& a, Scalar b) { return mul(a, b); }
inline Tensor operator*(Scalar a, const Tensor& b) { return mul(b, a); }
inline Tensor operator/(const Tensor& a, const Tensor& b) { return div(a, b); }
inline Tensor operator/(const Tensor& a, Scalar b) { return div(a, b); }
HS_API Tensor operator/(Scalar a, const Tensor& b);
inline Tensor operator-(const Tensor& a) { return neg(a); }

}  // namespace halfstep
