// SPDX-License-Identifier: Apache-2.0
// Elementary functions on vectors of float32, a few units in the last place from exact (each says how many; measured
// on every 301st float). Infinities, NaN, zeros with their sign and subnormals come out as the C library's functions
// have them. Polynomials were fitted for float32 by weighted least squares (minimax by Lawson's iteration),
// coefficients rounded from the lowest order up with the rest fitted again. Every target computes the same bits: all
// use fused multiply-adds.

// The include guard of a header that is compiled once for each target.
#if defined(HALFSTEP_BACKENDS_CPU_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFSTEP_BACKENDS_CPU_MATH_INL_H_
#undef HALFSTEP_BACKENDS_CPU_MATH_INL_H_
#else
#define HALFSTEP_BACKENDS_CPU_MATH_INL_H_
#endif

#include "halfstep/backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {

namespace detail {

HWY_INLINE F32Vec constant(float value) { return hn::Set(F32Tag(), value); }

/// c0 + c1 x + c2 x^2 + ..., by Horner's rule.
HWY_INLINE F32Vec polynomial(F32Vec, float c) { return constant(c); }
template <class... C>
HWY_INLINE F32Vec polynomial(F32Vec x, float c, C... rest) {
  return hn::MulAdd(polynomial(x, rest...), x, constant(c));
}

/// 2^n for n from -126 to 127.
HWY_INLINE F32Vec power_of_two(hn::Vec<hn::RebindToSigned<F32Tag>> n) {
  const hn::RebindToSigned<F32Tag> di;
  return hn::BitCast(F32Tag(), hn::ShiftLeft<23>(hn::Add(n, hn::Set(di, 127))));
}

/// x = n ln 2 + r with |r| <= ln 2 / 2, up to a rounding.
struct ExpParts {
  hn::Vec<hn::RebindToSigned<F32Tag>> n;
  F32Vec r;
};
HWY_INLINE ExpParts reduce_exp(F32Vec x) {
  const hn::RebindToSigned<F32Tag> di;
  const F32Vec n = hn::Round(hn::Mul(x, constant(0x1.715476p+0f)));
  // ln 2 as float32 and what is missing from it.
  F32Vec r = hn::NegMulAdd(n, constant(0x1.62e43p-1f), x);
  r = hn::NegMulAdd(n, constant(-1.904654300e-09f), r);
  return {hn::ConvertTo(di, n), r};
}

/// log(1 + f) + e ln 2 for f from sqrt(1/2) - 1 to sqrt(2) - 1, with `extra` added before the largest part.
HWY_INLINE F32Vec log_of_parts(F32Vec f, F32Vec e, F32Vec extra) {
  const F32Vec f2 = hn::Mul(f, f);
  const F32Vec p =
      polynomial(f, 3.333331347e-01f, -2.500001192e-01f, 2.000207305e-01f, -1.666785479e-01f, 1.422023028e-01f,
                 -1.240818650e-01f, 1.188622639e-01f, -1.166076735e-01f, 6.733094156e-02f);
  F32Vec y = hn::MulAdd(hn::Mul(f2, f), p, extra);
  // 0x1.62ep-1 has few bits, so that its product with e is exact.
  y = hn::MulAdd(e, constant(1.428606820e-06f), y);
  y = hn::NegMulAdd(constant(0.5f), f2, y);
  return hn::Add(hn::Mul(e, constant(0.693145751953125f)), hn::Add(f, y));
}

/// x > 0, finite and normal, as (1 + f) 2^e with f as above.
HWY_INLINE void split_exponent(F32Vec x, F32Vec& f, F32Vec& e) {
  const F32Tag d;
  const hn::RebindToSigned<F32Tag> di;
  const auto bits = hn::BitCast(di, x);
  // Exponents are counted from sqrt(1/2).
  const auto n = hn::ShiftRight<23>(hn::Sub(bits, hn::Set(di, 0x3f3504f3)));
  f = hn::Sub(hn::BitCast(d, hn::Sub(bits, hn::ShiftLeft<23>(n))), constant(1.0f));
  e = hn::ConvertTo(d, n);
}

/// erfc(x) exp(x^2) for x from 0 to about 10.2, as P((x - 2) / (x + 2)) / (1 + 2 x).
HWY_INLINE F32Vec scaled_erfc(F32Vec x) {
  const F32Vec one = constant(1.0f), two = constant(2.0f);
  const F32Vec a = hn::Add(x, two), b = hn::MulAdd(x, two, one);
  const F32Vec inverse = hn::Div(one, hn::Mul(a, b));
  const F32Vec t = hn::Mul(hn::Mul(hn::Sub(x, two), b), inverse);
  const F32Vec p = polynomial(t, 1.276978374e+00f, -9.276381880e-02f, -1.660302281e-01f, 1.640510261e-01f,
                              -5.422051251e-02f, -8.031255566e-03f, 8.719374426e-03f, 1.256154268e-03f,
                              -1.438463107e-03f, -4.097864730e-04f, 1.806960790e-04f, 8.692246774e-05f);
  return hn::Mul(p, hn::Mul(a, inverse));
}

/// erf(x) / x - 1 for x from 0 to 0.92, from x^2.
HWY_INLINE F32Vec erf_series(F32Vec square) {
  return polynomial(square, 1.283791661e-01f, -3.761263192e-01f, 1.128367856e-01f, -2.685873397e-02f, 5.199769046e-03f,
                    -8.131160284e-04f, 8.329431876e-05f);
}

}  // namespace detail

/// e^x, within 1 unit in the last place.
HWY_INLINE F32Vec exp(F32Vec x) {
  using detail::constant;
  // Beyond these the result is 0 or infinity whatever x is, and n stays in range.
  const F32Vec clamped = hn::Min(hn::Max(x, constant(-105.0f)), constant(90.0f));
  const detail::ExpParts parts = detail::reduce_exp(clamped);
  const F32Vec r = parts.r;
  const F32Vec q = detail::polynomial(r, 5.000000000e-01f, 1.666666567e-01f, 4.166647792e-02f, 8.333566599e-03f,
                                      1.393372891e-03f, 1.974359329e-04f);
  const F32Vec p = hn::Add(hn::MulAdd(hn::Mul(r, r), q, r), constant(1.0f));
  // Two factors, since 2^n itself may be out of range; only the second product can round.
  const auto half = hn::ShiftRight<1>(parts.n);
  const F32Vec y = hn::Mul(hn::Mul(p, detail::power_of_two(half)), detail::power_of_two(hn::Sub(parts.n, half)));
  return hn::IfThenElse(hn::IsNaN(x), x, y);
}

/// e^x for x <= 0 (or NaN), where results below 2^-126 may become 0 and no infinity can come: a cheaper one, where the
/// result is added to something larger.
HWY_INLINE F32Vec exp_nonpositive(F32Vec x) {
  using detail::constant;
  const F32Vec low = constant(-87.0f);
  const detail::ExpParts parts = detail::reduce_exp(hn::Max(x, low));
  const F32Vec r = parts.r;
  const F32Vec q = detail::polynomial(r, 5.000000000e-01f, 1.666666567e-01f, 4.166647792e-02f, 8.333566599e-03f,
                                      1.393372891e-03f, 1.974359329e-04f);
  const F32Vec p = hn::Add(hn::MulAdd(hn::Mul(r, r), q, r), constant(1.0f));
  const F32Vec y = hn::IfThenZeroElse(hn::Lt(x, low), hn::Mul(p, detail::power_of_two(parts.n)));
  return hn::IfThenElse(hn::IsNaN(x), x, y);
}

/// e^x - 1, within 2 units.
HWY_INLINE F32Vec expm1(F32Vec x) {
  using detail::constant;
  const F32Vec clamped = hn::Min(hn::Max(x, constant(-20.0f)), constant(89.0f));
  const detail::ExpParts parts = detail::reduce_exp(clamped);
  const F32Vec r = parts.r;
  const F32Vec q = detail::polynomial(r, 5.000000000e-01f, 1.666666567e-01f, 4.166647792e-02f, 8.333566599e-03f,
                                      1.393372891e-03f, 1.974359329e-04f);
  const F32Vec p = hn::MulAdd(hn::Mul(r, r), q, r);
  // 2^n p + (2^n - 1), from half of each since 2^128 is out of range.
  const hn::RebindToSigned<F32Tag> di;
  const F32Vec s = detail::power_of_two(hn::Sub(parts.n, hn::Set(di, 1)));
  const F32Vec y = hn::MulAdd(s, p, hn::Sub(s, constant(0.5f)));
  // Tiny x (and NaN, and -0) are their own results; halving would round the subnormal ones.
  const auto normal = hn::Ge(hn::Abs(x), constant(0x1p-25f));
  return hn::IfThenElse(normal, hn::Add(y, y), x);
}

/// Natural logarithm, within 1 unit.
HWY_INLINE F32Vec log(F32Vec x) {
  using detail::constant;
  const F32Vec zero = hn::Zero(F32Tag());
  const auto subnormal = hn::Lt(x, constant(0x1p-126f));
  const F32Vec scaled = hn::IfThenElse(subnormal, hn::Mul(x, constant(0x1p24f)), x);
  F32Vec f, e;
  detail::split_exponent(scaled, f, e);
  e = hn::Sub(e, hn::IfThenElseZero(subnormal, constant(24.0f)));
  F32Vec y = detail::log_of_parts(f, e, zero);
  const float infinity = hwy::HighestValue<float>() * 2;
  y = hn::IfThenElse(hn::Eq(x, zero), constant(-infinity), y);
  // Infinity and NaN are their own results, negative numbers have none.
  y = hn::IfThenElse(hn::Lt(x, constant(infinity)), y, x);
  return hn::IfThenElse(hn::Lt(x, zero), constant(infinity - infinity), y);
}

/// log(1 + x), within 2 units.
HWY_INLINE F32Vec log1p(F32Vec x) {
  using detail::constant;
  const F32Vec zero = hn::Zero(F32Tag()), one = constant(1.0f);
  const float infinity = hwy::HighestValue<float>() * 2;
  const F32Vec u = hn::Add(x, one);
  F32Vec f, e;
  detail::split_exponent(u, f, e);
  // Where 1 + x needs no exponent, x itself is f, exactly; elsewhere what the sum lost comes back to first order.
  const F32Vec lost = hn::Sub(x, hn::Sub(u, one));
  const F32Vec lost_large = hn::Sub(one, hn::Sub(u, x));
  const F32Vec missing = hn::Div(hn::IfThenElse(hn::Gt(x, one), lost_large, lost), u);
  const auto near = hn::Eq(e, zero);
  F32Vec y = detail::log_of_parts(hn::IfThenElse(near, x, f), e, hn::IfThenZeroElse(near, missing));
  y = hn::IfThenElse(hn::Eq(u, zero), constant(-infinity), y);
  y = hn::IfThenElse(hn::Lt(x, constant(infinity)), y, x);
  y = hn::IfThenElse(hn::Lt(x, constant(-1.0f)), constant(infinity - infinity), y);
  return hn::IfThenElse(hn::Ge(hn::Abs(x), constant(0x1p-25f)), y, x);
}

/// Hyperbolic tangent, within 2 units.
HWY_INLINE F32Vec tanh(F32Vec x) {
  using detail::constant;
  const F32Vec one = constant(1.0f);
  const F32Vec a = hn::Abs(x);
  const F32Vec s = hn::Mul(x, x);
  const F32Vec p = detail::polynomial(s, -3.333328366e-01f, 1.333148628e-01f, -5.374317244e-02f, 2.064970694e-02f,
                                      -5.716198124e-03f);
  const F32Vec near = hn::MulAdd(hn::Mul(x, s), p, x);
  // 1 - 2 z / (1 + z) with z = exp(-2 |x|)
  const F32Vec z = exp_nonpositive(hn::Neg(hn::Add(a, a)));
  const F32Vec far = hn::Sub(one, hn::Div(hn::Add(z, z), hn::Add(one, z)));
  return hn::CopySign(hn::IfThenElse(hn::Lt(a, constant(0.625f)), near, far), x);
}

/// 1 / (1 + exp(-x)), within 2.2 units.
HWY_INLINE F32Vec sigmoid(F32Vec x) {
  const F32Vec one = detail::constant(1.0f);
  const F32Vec z = exp(hn::Neg(hn::Abs(x)));
  return hn::Div(hn::IfThenElse(hn::Lt(x, hn::Zero(F32Tag())), z, one), hn::Add(one, z));
}

/// log(1 + exp(-|x|)): what softplus and log-sigmoid add to max(x, 0) and min(x, 0).
HWY_INLINE F32Vec log1p_exp_minus_abs(F32Vec x) { return log1p(exp(hn::Neg(hn::Abs(x)))); }

/// Phi(x), the standard normal distribution function, and exp(-x^2 / 2). Phi is relatively exact to 6 units on the
/// negative side too, where (1 + erf) / 2 would cancel.
struct NormalParts {
  F32Vec phi;
  F32Vec bell;
};
HWY_INLINE NormalParts normal_parts(F32Vec x) {
  using detail::constant;
  // Beyond 14.2 both are below the smallest subnormal.
  const F32Vec a = hn::Min(hn::Abs(x), constant(14.5f));
  const F32Vec square = hn::Mul(a, a);
  const F32Vec lost = hn::MulSub(a, a, square);
  F32Vec bell = exp(hn::Mul(square, constant(-0.5f)));
  bell = hn::NegMulAdd(hn::Mul(bell, constant(0.5f)), lost, bell);
  const F32Vec tail = hn::Mul(hn::Mul(constant(0.5f), bell), detail::scaled_erfc(hn::Mul(a, constant(0.707106781f))));
  F32Vec phi = hn::IfThenElse(hn::Lt(x, hn::Zero(F32Tag())), tail, hn::Sub(constant(1.0f), tail));
  // Around 0 the scaled function loses some units.
  const F32Vec scaled = hn::Mul(x, constant(0.353553391f));
  const F32Vec near =
      hn::Add(constant(0.5f), hn::MulAdd(scaled, detail::erf_series(hn::Mul(square, constant(0.5f))), scaled));
  phi = hn::IfThenElse(hn::Lt(a, constant(0.7f)), near, phi);
  const auto nan = hn::IsNaN(x);
  return {hn::IfThenElse(nan, x, phi), hn::IfThenElse(nan, x, bell)};
}

/// Error function, within 2 units.
HWY_INLINE F32Vec erf(F32Vec x) {
  using detail::constant;
  const F32Vec square = hn::Mul(x, x);
  const F32Vec near = hn::MulAdd(x, detail::erf_series(square), x);
  const F32Vec a = hn::Min(hn::Abs(x), constant(4.0f));  // 1 from 3.92 on
  const F32Vec tail = hn::Mul(exp_nonpositive(hn::Neg(hn::Mul(a, a))), detail::scaled_erfc(a));
  const F32Vec far = hn::CopySign(hn::Sub(constant(1.0f), tail), x);
  // NaN takes the side of the series.
  return hn::IfThenElse(hn::Ge(hn::Abs(x), constant(0.92f)), far, near);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#endif  // the per-target include guard
