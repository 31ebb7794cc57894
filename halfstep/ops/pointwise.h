// SPDX-License-Identifier: Apache-2.0
// Elementwise functions, with PyTorch's names, dtypes and special values. Integers and bool are computed as f32 by the
// functions that are not exact on them; 16-bit inputs compute in float32 and are rounded once.
#pragma once

#include <limits>
#include <optional>

#include "halfstep/core/tensor.h"

namespace halfstep {

// --- of one tensor; each keeps the layout of its input. Throw DTypeError for dtypes that have no such function.

/// The absolute value; the lowest integer of a dtype, whose absolute value is not representable, stays unchanged. The
/// gradient at 0 is 0.
HS_API Tensor abs(const Tensor& input);
/// -1, 0 or 1; 0 for NaN. The gradient is 0, as for all step functions here.
HS_API Tensor sign(const Tensor& input);
/// input * input.
HS_API Tensor square(const Tensor& input);
/// Rounded down to an integer.
HS_API Tensor floor(const Tensor& input);
/// Rounded up to an integer.
HS_API Tensor ceil(const Tensor& input);
/// Rounded to the nearest integer; halves go to the even one.
HS_API Tensor round(const Tensor& input);
/// Rounded toward zero to an integer.
HS_API Tensor trunc(const Tensor& input);
/// The square root; NaN below 0.
HS_API Tensor sqrt(const Tensor& input);
/// 1 / sqrt(input)
HS_API Tensor rsqrt(const Tensor& input);
/// 1 / input
HS_API Tensor reciprocal(const Tensor& input);
/// e to the power of the input.
HS_API Tensor exp(const Tensor& input);
/// 2 to the power of the input.
HS_API Tensor exp2(const Tensor& input);
/// exp(input) - 1 without cancellation near 0.
HS_API Tensor expm1(const Tensor& input);
/// The natural logarithm; -infinity at 0, NaN below.
HS_API Tensor log(const Tensor& input);
/// The logarithm to base 2; -infinity at 0, NaN below.
HS_API Tensor log2(const Tensor& input);
/// The logarithm to base 10; -infinity at 0, NaN below.
HS_API Tensor log10(const Tensor& input);
/// log(1 + input) without cancellation near 0.
HS_API Tensor log1p(const Tensor& input);
/// The sine of an angle in radians.
HS_API Tensor sin(const Tensor& input);
/// The cosine of an angle in radians.
HS_API Tensor cos(const Tensor& input);
/// The tangent of an angle in radians.
HS_API Tensor tan(const Tensor& input);
/// The angle in [-pi/2, pi/2] whose sine is the input; NaN outside [-1, 1].
HS_API Tensor asin(const Tensor& input);
/// The angle in [0, pi] whose cosine is the input; NaN outside [-1, 1].
HS_API Tensor acos(const Tensor& input);
/// The angle in [-pi/2, pi/2] whose tangent is the input.
HS_API Tensor atan(const Tensor& input);
/// The hyperbolic sine.
HS_API Tensor sinh(const Tensor& input);
/// The hyperbolic cosine.
HS_API Tensor cosh(const Tensor& input);
/// The inverse of sinh.
HS_API Tensor asinh(const Tensor& input);
/// The inverse of cosh, at least 0; NaN below 1.
HS_API Tensor acosh(const Tensor& input);
/// The inverse of tanh; infinite at -1 and 1, NaN beyond.
HS_API Tensor atanh(const Tensor& input);
/// The hyperbolic tangent.
HS_API Tensor tanh(const Tensor& input);
/// The error function: 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to the input.
HS_API Tensor erf(const Tensor& input);
/// 1 - erf(input) without cancellation for large inputs.
HS_API Tensor erfc(const Tensor& input);
/// The inverse of erf on (-1, 1); infinite at -1 and 1, NaN beyond.
HS_API Tensor erfinv(const Tensor& input);
/// Replaces NaN and the infinities; by default the infinities become the dtype's largest and lowest finite value.
HS_API Tensor nan_to_num(const Tensor& input, double nan = 0, std::optional<double> posinf = {},
                         std::optional<double> neginf = {});

/// The functions of the same names, in place. The destination's dtype stays.
HS_API Tensor& abs_(Tensor& input);
HS_API Tensor& neg_(Tensor& input);
HS_API Tensor& square_(Tensor& input);
HS_API Tensor& sqrt_(Tensor& input);
HS_API Tensor& rsqrt_(Tensor& input);
HS_API Tensor& reciprocal_(Tensor& input);
HS_API Tensor& exp_(Tensor& input);
HS_API Tensor& log_(Tensor& input);
HS_API Tensor& sin_(Tensor& input);
HS_API Tensor& cos_(Tensor& input);
HS_API Tensor& tanh_(Tensor& input);
HS_API Tensor& floor_(Tensor& input);
HS_API Tensor& ceil_(Tensor& input);
HS_API Tensor& round_(Tensor& input);
HS_API Tensor& trunc_(Tensor& input);

// --- of two tensors, with broadcasting and type promotion

/// The larger of two; NaN if either is. Where they are equal each gets half of the gradient.
HS_API Tensor maximum(const Tensor& input, const Tensor& other);
/// The smaller of two; NaN if either is. Where they are equal each gets half of the gradient.
HS_API Tensor minimum(const Tensor& input, const Tensor& other);
/// The remainder of the division that truncates toward zero, with the sign of `input`. Throws Error when an integer is
/// divided by zero (as remainder and floor_divide do); floats give NaN.
HS_API Tensor fmod(const Tensor& input, const Tensor& other);
HS_API Tensor fmod(const Tensor& input, Scalar other);
/// The remainder of the division that rounds down, with the sign of `other`.
HS_API Tensor remainder(const Tensor& input, const Tensor& other);
HS_API Tensor remainder(const Tensor& input, Scalar other);
/// The quotient rounded down. Not differentiable.
HS_API Tensor floor_divide(const Tensor& input, const Tensor& other);
HS_API Tensor floor_divide(const Tensor& input, Scalar other);
/// input to the power of exponent. Integers wrap around; an integer to a negative integer power throws Error when the
/// exponent is a number, and gives 0 (or a power of 1 or -1) when it is a tensor.
HS_API Tensor pow(const Tensor& input, const Tensor& exponent);
HS_API Tensor pow(const Tensor& input, Scalar exponent);
HS_API Tensor pow(Scalar base, const Tensor& exponent);
/// The angle of the point (other, input), in (-pi, pi].
HS_API Tensor atan2(const Tensor& input, const Tensor& other);
/// sqrt(input^2 + other^2) without overflow on the way.
HS_API Tensor hypot(const Tensor& input, const Tensor& other);

/// `out` forms: the result is written into `out`, which must have its shape. Not recorded.
HS_API Tensor& maximum_out(Tensor& out, const Tensor& input, const Tensor& other);
HS_API Tensor& minimum_out(Tensor& out, const Tensor& input, const Tensor& other);

// --- of three

/// input + weight * (end - input).
HS_API Tensor lerp(const Tensor& input, const Tensor& end, const Tensor& weight);
HS_API Tensor lerp(const Tensor& input, const Tensor& end, double weight);
HS_API Tensor& lerp_(Tensor& input, const Tensor& end, double weight);
/// input + value * tensor1 * tensor2.
HS_API Tensor addcmul(const Tensor& input, const Tensor& tensor1, const Tensor& tensor2, Scalar value = 1);
HS_API Tensor& addcmul_(Tensor& input, const Tensor& tensor1, const Tensor& tensor2, Scalar value = 1);
/// input + value * tensor1 / tensor2. Floating dtypes only.
HS_API Tensor addcdiv(const Tensor& input, const Tensor& tensor1, const Tensor& tensor2, Scalar value = 1);
HS_API Tensor& addcdiv_(Tensor& input, const Tensor& tensor1, const Tensor& tensor2, Scalar value = 1);

/// Brings values into [min, max]; an absent bound has no effect, NaN stays. With numbers as bounds the gradient is 0
/// where a value lies on a bound or beyond, or is NaN; with tensors a value that equals a bound shares the gradient
/// with it equally (both as in PyTorch 2.15). An infinite bound has no effect: the gradient of an infinite value there
/// is 1, where PyTorch gives 0. A NaN bound makes all elements NaN; with numbers as
/// bounds the gradient is then 0. `min` above `max` gives `max`. Throws Error without any bound.
HS_API Tensor clamp(const Tensor& input, std::optional<Scalar> min, std::optional<Scalar> max = {});
HS_API Tensor clamp(const Tensor& input, const Tensor& min, const Tensor& max);
HS_API Tensor clamp_min(const Tensor& input, Scalar min);
HS_API Tensor clamp_min(const Tensor& input, const Tensor& min);
HS_API Tensor clamp_max(const Tensor& input, Scalar max);
HS_API Tensor clamp_max(const Tensor& input, const Tensor& max);
HS_API Tensor& clamp_(Tensor& input, std::optional<Scalar> min, std::optional<Scalar> max = {});

}  // namespace halfstep
