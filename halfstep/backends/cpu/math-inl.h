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

// Powers of two, whose exponents are whole numbers: floats where an instruction takes them as such, with the results of
// integers.
#if HWY_TARGET <= HWY_AVX3
using ExponentTag = F32Tag;
using ExponentVec = hn::Vec<ExponentTag>;

/// y 2^n, rounded once.
HWY_INLINE F32Vec scale(F32Vec y, ExponentVec n) { return F32Vec{_mm512_scalef_ps(y.raw, n.raw)}; }
/// The same for n from -126 to 127.
HWY_INLINE F32Vec scale_normal(F32Vec y, ExponentVec n) { return scale(y, n); }
/// 2^n for these n.
HWY_INLINE F32Vec power_of_two(ExponentVec n) { return scale(constant(1.0f), n); }
#else
using ExponentTag = hn::RebindToSigned<F32Tag>;
using ExponentVec = hn::Vec<ExponentTag>;

HWY_INLINE F32Vec power_of_two(ExponentVec n) {
  return hn::BitCast(F32Tag(), hn::ShiftLeft<23>(hn::Add(n, hn::Set(ExponentTag(), 127))));
}
HWY_INLINE F32Vec scale_normal(F32Vec y, ExponentVec n) { return hn::Mul(y, power_of_two(n)); }
/// For n from -252 to 254: in two factors, since 2^n itself may be out of range; only the second product can round.
HWY_INLINE F32Vec scale(F32Vec y, ExponentVec n) {
  const ExponentVec half = hn::ShiftRight<1>(n);
  return scale_normal(scale_normal(y, half), hn::Sub(n, half));
}
#endif

/// x + rest = n ln 2 + r with |r| <= ln 2 / 2, up to a rounding; |x| below 2^20, `rest` what x lacks.
struct ExpParts {
  ExponentVec n;
  F32Vec r;
};
HWY_INLINE ExpParts reduce_exp(F32Vec x, F32Vec rest) {
  // Next to 1.5 * 2^23 floats are integers, whose low bits are n's: no conversion is needed.
  const F32Vec shift = constant(0x1.8p23f);
  const F32Vec shifted = hn::MulAdd(x, constant(0x1.715476p+0f), shift);
  const F32Vec n = hn::Sub(shifted, shift);
  // ln 2 as float32, whose product is taken away exactly, and what is missing from it.
  const F32Vec r =
      hn::Add(hn::NegMulAdd(n, constant(0x1.62e43p-1f), x), hn::NegMulAdd(n, constant(-1.904654300e-09f), rest));
#if HWY_TARGET <= HWY_AVX3
  return {n, r};
#else
  return {hn::Sub(hn::BitCast(ExponentTag(), shifted), hn::BitCast(ExponentTag(), shift)), r};
#endif
}
HWY_INLINE ExpParts reduce_exp(F32Vec x) { return reduce_exp(x, hn::Zero(F32Tag())); }
/// e^r - 1 for |r| <= ln 2 / 2.
HWY_INLINE F32Vec expm1_reduced(F32Vec r) {
  const F32Vec q =
      polynomial(r, 4.999999404e-01f, 1.666652113e-01f, 4.166826606e-02f, 8.368677460e-03f, 1.382073388e-03f);
  return hn::MulAdd(hn::Mul(r, r), q, r);
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

/// Phi(-a) exp(a^2 / 2) for a from 0 to 14.5, Phi being the standard normal distribution function: high + low, the sum
/// within 0.7 units in the last place of `high`. As P((a - k) / (a + 1.75)) / (a + 1.75), where k makes P's first
/// coefficient a short number; what the additions and the division lose is kept.
struct TailRatio {
  F32Vec high, low;
};
struct TailPolynomial {
  static constexpr float kFirst = 0.65234375f, kPlus = 1.75f, kMinus = 1.69802380f;
  /// (P(t) - kFirst) / t, by `sum(t, coefficients...)`.
  template <class V, class F>
  HWY_INLINE static V of(V t, F&& sum) {
    return sum(t, -2.712689340e-01f, -2.086331323e-02f, 3.454835713e-02f, 1.156266127e-02f, -3.229748225e-03f,
               -4.114212468e-03f, -1.261698664e-03f, 4.840798210e-04f, 7.128826110e-04f, 2.208334045e-04f,
               -1.158603191e-04f, -7.359206211e-05f);
  }
  /// P(t) without its first coefficient.
  HWY_INLINE static F32Vec rest(F32Vec t) {
    return hn::Mul(t, of(t, [](F32Vec x, auto... c) HWY_ATTR { return polynomial(x, c...); }));
  }
};
HWY_INLINE TailRatio tail_ratio(F32Vec a) {
  const F32Vec c = constant(TailPolynomial::kPlus), first = constant(TailPolynomial::kFirst);
  const F32Vec sum = hn::Add(a, c);
  const F32Vec sum_lost = hn::Sub(a, hn::Sub(sum, c));
  const F32Vec inverse = hn::Div(constant(1.0f), sum);
  const F32Vec above = hn::Sub(a, constant(TailPolynomial::kMinus));
  const F32Vec quotient = hn::Mul(above, inverse);
  const F32Vec missing = hn::NegMulAdd(quotient, sum_lost, hn::NegMulAdd(quotient, sum, above));
  const F32Vec t = hn::MulAdd(missing, inverse, quotient);
  const F32Vec rest = TailPolynomial::rest(t);
  const F32Vec p = hn::Add(first, rest);
  const F32Vec p_lost = hn::Sub(rest, hn::Sub(p, first));
  const F32Vec high = hn::Mul(p, inverse);
  const F32Vec remainder = hn::NegMulAdd(high, sum_lost, hn::Add(hn::NegMulAdd(high, sum, p), p_lost));
  return {high, hn::Mul(remainder, inverse)};
}

/// The same within 4 units in the last place.
HWY_INLINE F32Vec tail_ratio_low(F32Vec a) {
  const F32Vec inverse = hn::Div(constant(1.0f), hn::Add(a, constant(TailPolynomial::kPlus)));
  const F32Vec t = hn::Mul(hn::Sub(a, constant(TailPolynomial::kMinus)), inverse);
  return hn::Mul(hn::Add(constant(TailPolynomial::kFirst), TailPolynomial::rest(t)), inverse);
}

/// Phi(-a) = (high + low) 2^n and exp(-a^2 / 2) = (1 + bell) 2^n for a from 0 to 14.5.
struct NormalTail {
  F32Vec high, low, bell;
  ExponentVec n;
};
HWY_INLINE NormalTail normal_tail(F32Vec a) {
  const F32Vec square = hn::Mul(a, a);
  const F32Vec half = constant(-0.5f);
  const ExpParts parts = reduce_exp(hn::Mul(square, half), hn::Mul(hn::MulSub(a, a, square), half));
  const F32Vec bell = expm1_reduced(parts.r);
  const TailRatio ratio = tail_ratio(a);
  return {ratio.high, hn::MulAdd(ratio.high, bell, ratio.low), bell, parts.n};
}

/// erf(x) / x - 1 for x from 0 to 0.92, from x^2.
HWY_INLINE F32Vec erf_series(F32Vec square) {
  return polynomial(square, 1.283791661e-01f, -3.761263192e-01f, 1.128367856e-01f, -2.685873397e-02f, 5.199769046e-03f,
                    -8.131160284e-04f, 8.329431876e-05f);
}

}  // namespace detail

/// e^x, within 1.1 units in the last place.
HWY_INLINE F32Vec exp(F32Vec x) {
  using detail::constant;
  // Beyond these the result is 0 or infinity whatever x is, and n stays in range.
  const F32Vec clamped = hn::Min(hn::Max(x, constant(-105.0f)), constant(90.0f));
  const detail::ExpParts parts = detail::reduce_exp(clamped);
  const F32Vec y = detail::scale(hn::Add(detail::expm1_reduced(parts.r), constant(1.0f)), parts.n);
  return hn::IfThenElse(hn::IsNaN(x), x, y);
}

/// e^x for x <= 0 (or NaN), where results below 2^-126 may become 0 and no infinity can come: a cheaper one, where the
/// result is added to something larger.
HWY_INLINE F32Vec exp_nonpositive(F32Vec x) {
  using detail::constant;
  const F32Vec low = constant(-87.0f);
  const detail::ExpParts parts = detail::reduce_exp(hn::Max(x, low));
  const F32Vec p = hn::Add(detail::expm1_reduced(parts.r), constant(1.0f));
  const F32Vec y = hn::IfThenZeroElse(hn::Lt(x, low), detail::scale_normal(p, parts.n));
  return hn::IfThenElse(hn::IsNaN(x), x, y);
}

/// e^x - 1, within 2 units.
HWY_INLINE F32Vec expm1(F32Vec x) {
  using detail::constant;
  const F32Vec clamped = hn::Min(hn::Max(x, constant(-20.0f)), constant(89.0f));
  const detail::ExpParts parts = detail::reduce_exp(clamped);
  const F32Vec p = detail::expm1_reduced(parts.r);
  // 2^n p + (2^n - 1), from half of each since 2^128 is out of range.
  const F32Vec s = detail::power_of_two(hn::Sub(parts.n, hn::Set(detail::ExponentTag(), 1)));
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

namespace detail {

/// With z = exp(-|x|) = (1 + q) 2^n, for any x but NaN: 1 / (1 + z) is `inverse`, within a unit.
struct SigmoidTail {
  F32Vec inverse, q;
  ExponentVec n;
};
HWY_INLINE SigmoidTail sigmoid_tail(F32Vec x) {
  const F32Vec one = constant(1.0f);
  const ExpParts parts = reduce_exp(hn::Max(hn::Neg(hn::Abs(x)), constant(-110.0f)));
  const F32Vec q = expm1_reduced(parts.r);
  // Where 2^n is below 2^-126 the sum doesn't see z.
  const F32Vec power = power_of_two(hn::Max(parts.n, hn::Set(ExponentTag(), -126)));
  const F32Vec z = hn::MulAdd(q, power, power);
  const F32Vec sum = hn::Add(one, z);
  const F32Vec sum_lost = hn::Sub(z, hn::Sub(sum, one));
  // Its reciprocal with one rounding, by a Newton step on the division's.
  const F32Vec near = hn::Div(one, sum);
  const F32Vec remainder = hn::NegMulAdd(near, sum_lost, hn::NegMulAdd(near, sum, one));
  return {hn::MulAdd(near, remainder, near), q, parts.n};
}

/// sigmoid(x) = y 2^n, for any x but NaN: z / (1 + z) on the negative side, else 1 / (1 + z).
struct SigmoidParts {
  F32Vec y;
  ExponentVec n;
};
HWY_INLINE SigmoidParts sigmoid_parts(F32Vec x) {
  const auto negative = hn::Lt(x, hn::Zero(F32Tag()));
  const SigmoidTail t = sigmoid_tail(x);
  const ExponentTag di;
  return {hn::MulAdd(hn::IfThenElseZero(negative, t.q), t.inverse, t.inverse),
          hn::IfThenElseZero(hn::RebindMask(di, negative), t.n)};
}

}  // namespace detail

/// 1 / (1 + exp(-x)), within 1.5 units.
HWY_INLINE F32Vec sigmoid(F32Vec x) {
  const detail::SigmoidParts s = detail::sigmoid_parts(x);
  return hn::IfThenElse(hn::IsNaN(x), x, detail::scale(s.y, s.n));
}

/// sigmoid(x) and sigmoid(-x), each as sigmoid() has it, for little more than one of them.
template <class V>
struct SigmoidPair {
  V up, down;
};
HWY_INLINE SigmoidPair<F32Vec> sigmoid_pair(F32Vec x) {
  const auto negative = hn::Lt(x, hn::Zero(F32Tag())), nan = hn::IsNaN(x);
  const detail::SigmoidTail t = detail::sigmoid_tail(x);
  const F32Vec small = detail::scale(hn::MulAdd(t.q, t.inverse, t.inverse), t.n);
  return {hn::IfThenElse(nan, x, hn::IfThenElse(negative, small, t.inverse)),
          hn::IfThenElse(nan, x, hn::IfThenElse(negative, t.inverse, small))};
}

/// f sigmoid(x) for f of x's sign, within 2 units: no digits are lost where sigmoid(x) is subnormal, and -infinity
/// gives 0, the limit for an f that grows slower than exp(-x).
HWY_INLINE F32Vec times_sigmoid(F32Vec f, F32Vec x) {
  const detail::SigmoidParts s = detail::sigmoid_parts(x);
  // From -110 on the product is below the smallest subnormal.
  const F32Vec y = hn::Mul(hn::Max(f, detail::constant(-110.0f)), s.y);
  return hn::IfThenElse(hn::IsNaN(x), x, detail::scale(y, s.n));
}

/// x sigmoid(x) for results of 16 bits, within 4 units.
HWY_INLINE F32Vec silu_low(F32Vec x) {
  using detail::constant;
  const F32Vec one = constant(1.0f);
  const auto negative = hn::Lt(x, hn::Zero(F32Tag()));
  // Below -110 the product is less than the smallest subnormal. Of a number and NaN, x86's maximum is the second
  // operand.
  const F32Vec limited = hn::Max(constant(-110.0f), x);
  const detail::ExpParts parts = detail::reduce_exp(hn::Max(constant(-110.0f), hn::Neg(hn::Abs(x))));
  const F32Vec power = hn::Add(detail::expm1_reduced(parts.r), one);
  const F32Vec ratio = hn::Div(limited, hn::Add(one, detail::scale(power, parts.n)));
  // x z / (1 + z) on the negative side, scaled last.
  return detail::scale(hn::Mul(ratio, hn::IfThenElse(negative, power, one)),
                       hn::IfThenElseZero(hn::RebindMask(detail::ExponentTag(), negative), parts.n));
}

/// Its slope, s + x s (1 - s) with s = sigmoid(x), within 6 units of these terms.
HWY_INLINE F32Vec silu_slope(F32Vec x) {
  using detail::constant;
  const F32Vec one = constant(1.0f);
  // Below -125 the slope is less than the smallest subnormal, and above 125 it is 1.
  const F32Vec limited = hn::Max(constant(-125.0f), hn::Min(constant(125.0f), x));
  const auto negative = hn::Lt(limited, hn::Zero(F32Tag()));
  const detail::ExpParts parts = detail::reduce_exp(hn::Neg(hn::Abs(limited)));
  const F32Vec power = hn::Add(detail::expm1_reduced(parts.r), one);
  // With z = exp(-|x|): 1 / (1 + z) is s on the positive side, 1 - s on the negative one, and z / (1 + z) the other.
  const F32Vec z = detail::scale(power, parts.n);
  const F32Vec larger = hn::Div(one, hn::Add(one, z));
  const F32Vec less = hn::Mul(limited, hn::IfThenElse(negative, larger, hn::Mul(z, larger)));
  return detail::scale(hn::Mul(hn::MulAdd(larger, less, larger), hn::IfThenElse(negative, power, one)),
                       hn::IfThenElseZero(hn::RebindMask(detail::ExponentTag(), negative), parts.n));
}

/// log(1 + exp(-|x|)): what softplus and log-sigmoid add to max(x, 0) and min(x, 0).
HWY_INLINE F32Vec log1p_exp_minus_abs(F32Vec x) { return log1p(exp(hn::Neg(hn::Abs(x)))); }

/// x Phi(x), within 2 units; 0 at -infinity.
HWY_INLINE F32Vec gelu(F32Vec x) {
  const F32Vec a = hn::Min(hn::Abs(x), detail::constant(14.5f));
  const detail::NormalTail t = detail::normal_tail(a);
  // a Phi(-a), which is what the result lacks of max(x, 0).
  const F32Vec high = hn::Mul(a, t.high);
  const F32Vec low = hn::MulAdd(a, t.low, hn::MulSub(a, t.high, high));
  const F32Vec missing = detail::scale(hn::Add(high, low), t.n);
  return hn::Sub(hn::IfThenZeroElse(hn::Lt(x, hn::Zero(F32Tag())), x), missing);
}

/// The same for results of 16 bits: within 2^-20 of the result where f16 has digits, 2^-17 anywhere.
HWY_INLINE F32Vec gelu_low(F32Vec x) {
  using detail::constant;
  const F32Vec a = hn::Min(hn::Abs(x), constant(14.5f));
  const detail::ExpParts parts = detail::reduce_exp(hn::Mul(hn::Mul(a, a), constant(-0.5f)));
  const F32Vec power = hn::Add(detail::expm1_reduced(parts.r), constant(1.0f));
  const F32Vec missing = detail::scale(hn::Mul(hn::Mul(a, detail::tail_ratio_low(a)), power), parts.n);
  return hn::Sub(hn::IfThenZeroElse(hn::Lt(x, hn::Zero(F32Tag())), x), missing);
}
/// Phi(x) + x Phi'(x), its slope, within 6 units of these terms.
HWY_INLINE F32Vec gelu_slope(F32Vec x) {
  using detail::constant;
  const F32Vec half = constant(-0.5f), one = constant(1.0f);
  // From 14.55 on what is missing is below the smallest subnormal. Of a number and NaN, x86's minimum is the second
  // operand.
  const F32Vec a = hn::Min(constant(14.75f), hn::Abs(x));
  const F32Vec square = hn::Mul(a, a);
  const detail::ExpParts parts = detail::reduce_exp(hn::Mul(square, half), hn::Mul(hn::MulSub(a, a, square), half));
  const F32Vec power = hn::Add(detail::expm1_reduced(parts.r), one);
  // Phi(-a) - a Phi'(a), what either side lacks of 0 and 1.
  const F32Vec ratio = hn::NegMulAdd(a, constant(0.398942280f), detail::tail_ratio_low(a));
  const F32Vec missing = detail::scale(hn::Mul(ratio, power), parts.n);
  return hn::IfThenElse(hn::Lt(x, hn::Zero(F32Tag())), missing, hn::Sub(one, missing));
}

/// Error function, within 2 units.
HWY_INLINE F32Vec erf(F32Vec x) {
  using detail::constant;
  const F32Vec square = hn::Mul(x, x);
  const F32Vec near = hn::MulAdd(x, detail::erf_series(square), x);
  const F32Vec a = hn::Min(hn::Abs(x), constant(4.0f));  // 1 from 3.92 on
  // 1 - 2 Phi(-a sqrt(2))
  const F32Vec ratio = detail::tail_ratio(hn::Mul(a, constant(1.41421356f))).high;
  const F32Vec bell = exp_nonpositive(hn::Neg(hn::Mul(a, a)));
  const F32Vec far = hn::CopySign(hn::NegMulAdd(hn::Add(ratio, ratio), bell, constant(1.0f)), x);
  // NaN takes the side of the series.
  return hn::IfThenElse(hn::Ge(hn::Abs(x), constant(0.92f)), far, near);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#endif  // the per-target include guard
