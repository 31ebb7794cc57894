// SPDX-License-Identifier: Apache-2.0
// Functions of float32 vectors whose argument must be reduced, or whose exponent multiplied, with more digits than
// float32 has, or for which Highway has a form in float64: computed in float64 and rounded once, within 0.51 units in
// the last place (erfc: 0.56). Series of Taylor and of 2 artanh, cut where the rest is below 2^-36 of the result.

// The include guard of a header that is compiled once for each target.
#if defined(HALFSTEP_BACKENDS_CPU_MATH64_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFSTEP_BACKENDS_CPU_MATH64_INL_H_
#undef HALFSTEP_BACKENDS_CPU_MATH64_INL_H_
#else
#define HALFSTEP_BACKENDS_CPU_MATH64_INL_H_
#endif

#include <cmath>

#include "halfstep/backends/cpu/math-inl.h"
#include "halfstep/backends/cpu/simd-inl.h"
// after highway.h
#include <hwy/contrib/math/math-inl.h>

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {

namespace detail {

using I64Tag = hn::RebindToSigned<F64Tag>;

HWY_INLINE F64Vec constant64(double value) { return hn::Set(F64Tag(), value); }

/// c0 + c1 x + c2 x^2 + ..., by Horner's rule.
HWY_INLINE F64Vec polynomial64(F64Vec, double c) { return constant64(c); }
template <class... C>
HWY_INLINE F64Vec polynomial64(F64Vec x, double c, C... rest) {
  return hn::MulAdd(polynomial64(x, rest...), x, constant64(c));
}

/// f of both halves of float32 vectors in float64.
template <class F, class... V>
HWY_INLINE F32Vec by_halves(F&& f, V... v) {
  const F64Tag d;
  const hn::Half<F32Tag> half;
  const auto lower = f(hn::PromoteTo(d, hn::LowerHalf(half, v))...);
  const auto upper = f(hn::PromoteTo(d, hn::UpperHalf(half, v))...);
  return hn::Combine(F32Tag(), hn::DemoteTo(half, upper), hn::DemoteTo(half, lower));
}

/// `y`, but f(x...) in lanes where `ok` is false: rare arguments, by a function of doubles.
template <class M, class F>
HWY_INLINE F32Vec mend(M ok, F32Vec y, F&& f, F32Vec a, F32Vec b) {
  const F32Tag d;
  if (HWY_LIKELY(hn::AllTrue(d, ok))) return y;
  constexpr std::size_t kLanes = hn::MaxLanes(F32Tag());
  alignas(64) float x[kLanes], z[kLanes], to[kLanes], good[kLanes];
  hn::Store(a, d, x);
  hn::Store(b, d, z);
  hn::Store(y, d, to);
  hn::Store(hn::IfThenElseZero(ok, hn::Set(d, 1.0f)), d, good);
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) {
    if (good[i] == 0) to[i] = static_cast<float>(f(static_cast<double>(x[i]), static_cast<double>(z[i])));
  }
  return hn::Load(d, to);
}

// x = n pi / 2 + r with |r| <= pi / 4, for |x| up to 2^30; the parity of n, and of n / 2.
struct QuarterTurns {
  F64Vec r;
  hn::Mask<F64Tag> odd, beyond;
};
HWY_INLINE QuarterTurns quarter_turns(F64Vec x, std::int64_t more) {
  const F64Tag d;
  const I64Tag di;
  // Next to 1.5 * 2^52 doubles are integers, whose low bits are n's.
  const F64Vec shift = constant64(0x1.8p52);
  const F64Vec shifted = hn::MulAdd(x, constant64(0x1.45f306dc9c883p-1), shift);
  const F64Vec n = hn::Sub(shifted, shift);
  const F64Vec r =
      hn::NegMulAdd(n, constant64(0x1.1a62633145c07p-54), hn::NegMulAdd(n, constant64(0x1.921fb54442d18p0), x));
  const auto count = hn::Add(hn::BitCast(di, shifted), hn::Set(di, more));
  const auto bit = [&](std::int64_t b) { return hn::RebindMask(d, hn::TestBit(count, hn::Set(di, b))); };
  return {r, bit(1), bit(2)};
}
HWY_INLINE F64Vec sin_reduced(F64Vec r, F64Vec square) {
  const F64Vec p = polynomial64(square, -1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800);
  return hn::MulAdd(hn::Mul(r, square), p, r);
}
HWY_INLINE F64Vec cos_reduced(F64Vec square) {
  return polynomial64(square, 1.0, -0.5, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600);
}
/// The sine of x and `more` quarters of a turn.
HWY_INLINE F64Vec sin64(F64Vec x, std::int64_t more) {
  const QuarterTurns t = quarter_turns(x, more);
  const F64Vec square = hn::Mul(t.r, t.r);
  const F64Vec y = hn::IfThenElse(t.odd, cos_reduced(square), sin_reduced(t.r, square));
  return hn::IfThenElse(t.beyond, hn::Neg(y), y);
}
HWY_INLINE F64Vec tan64(F64Vec x) {
  const QuarterTurns t = quarter_turns(x, 0);
  const F64Vec square = hn::Mul(t.r, t.r);
  const F64Vec sine = sin_reduced(t.r, square), cosine = cos_reduced(square);
  return hn::Div(hn::IfThenElse(t.odd, hn::Neg(cosine), sine), hn::IfThenElse(t.odd, sine, cosine));
}
/// Where quarter_turns() serves.
HWY_INLINE hn::Mask<F32Tag> few_turns(F32Vec x) { return hn::Le(hn::Abs(x), hn::Set(F32Tag(), 0x1p30f)); }
/// Zeros keep their sign.
HWY_INLINE F32Vec keep_zero(F32Vec x, F32Vec y) { return hn::IfThenElse(hn::Eq(x, hn::Zero(F32Tag())), x, y); }

/// Of x > 0, finite and normal.
HWY_INLINE F64Vec log2_64(F64Vec x) {
  const F64Tag d;
  const I64Tag di;
  const auto bits = hn::BitCast(di, x);
  // Exponents are counted from sqrt(1/2).
  const auto e = hn::ShiftRight<52>(hn::Sub(bits, hn::Set(di, 0x3fe6a09e667f3bcd)));
  const F64Vec m = hn::BitCast(d, hn::Sub(bits, hn::ShiftLeft<52>(e)));
  const F64Vec s = hn::Div(hn::Sub(m, constant64(1)), hn::Add(m, constant64(1)));
  const F64Vec z = hn::Mul(s, s);
  const F64Vec p = polynomial64(z, 1.0 / 3, 1.0 / 5, 1.0 / 7, 1.0 / 9, 1.0 / 11, 1.0 / 13, 1.0 / 15);
  return hn::MulAdd(hn::MulAdd(hn::Mul(s, z), p, s), constant64(2 * 0x1.71547652b82fep0), hn::ConvertTo(d, e));
}
/// 2^t, 0 or infinity as float32 beyond its range.
HWY_INLINE F64Vec exp2_64(F64Vec t) {
  const F64Tag d;
  const I64Tag di;
  const F64Vec shift = constant64(0x1.8p52);
  const F64Vec within = hn::Min(hn::Max(t, constant64(-300)), constant64(300));
  const F64Vec shifted = hn::Add(within, shift);
  const F64Vec g = hn::Mul(hn::Sub(within, hn::Sub(shifted, shift)), constant64(0x1.62e42fefa39efp-1));
  const F64Vec p = polynomial64(g, 1.0, 1.0, 0.5, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320,
                                1.0 / 362880, 1.0 / 3628800);
  const auto n = hn::Sub(hn::BitCast(di, shifted), hn::BitCast(di, shift));
  return hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<52>(hn::Add(n, hn::Set(di, 1023)))));
}
/// Of finite x and y.
HWY_INLINE F64Vec pow64(F64Vec x, F64Vec y) {
  const F64Vec zero = hn::Zero(F64Tag());
  const F64Vec base = hn::Abs(x);
  const F64Vec of_zero =
      hn::IfThenElse(hn::Eq(y, zero), constant64(1), hn::IfThenElse(hn::Lt(y, zero), constant64(1e300), zero));
  const F64Vec p = hn::IfThenElse(hn::Eq(x, zero), of_zero, exp2_64(hn::Mul(y, log2_64(base))));
  const F64Vec half = hn::Mul(y, constant64(0.5));
  const auto whole = hn::Eq(hn::Round(y), y), odd = hn::AndNot(hn::Eq(hn::Round(half), half), whole);
  const F64Vec is_signed = hn::IfThenElse(odd, hn::CopySign(p, x), p);
  return hn::IfThenElse(hn::AndNot(whole, hn::Lt(x, zero)), constant64(std::nan("")), is_signed);
}

/// x - n y with n = x / y cut to an integer, exact: of floats, where |n| is at most 2^52, it fits a double. A quotient
/// that was rounded up to an integer shows in its sign.
HWY_INLINE F64Vec fmod64(F64Vec x, F64Vec y) {
  const F64Vec r = hn::NegMulAdd(hn::Trunc(hn::Div(x, y)), y, x);
  const auto beyond = hn::Lt(hn::Mul(r, x), hn::Zero(F64Tag()));
  return hn::CopySign(hn::IfThenElse(beyond, hn::Add(r, hn::CopySign(y, x)), r), x);
}
/// The same with the sign of y.
HWY_INLINE F64Vec floor_mod64(F64Vec x, F64Vec y) {
  const F64Vec m = fmod64(x, y);
  return hn::IfThenElse(hn::Lt(hn::Mul(m, y), hn::Zero(F64Tag())), hn::Add(m, y), m);
}
/// floor(x / y): what the remainder leaves is an integer but for the rounding of the division.
HWY_INLINE F64Vec floor_div64(F64Vec x, F64Vec y) {
  const F64Vec n = hn::Round(hn::Div(hn::Sub(x, floor_mod64(x, y)), y));
  return hn::CopySign(n, hn::Div(x, y));
}
/// Where these serve.
HWY_INLINE hn::Mask<F32Tag> small_quotient(F32Vec x, F32Vec y) {
  const auto small = hn::Lt(hn::Abs(x), hn::Mul(hn::Abs(y), hn::Set(F32Tag(), 0x1p52f)));
  return hn::And(small, hn::IsFinite(y));
}
/// Of finite x and y other than 0.
HWY_INLINE F64Vec atan2_64(F64Vec y, F64Vec x) {
  const F64Tag d;
  const F64Vec t = hn::Atan(d, hn::Div(hn::Abs(y), hn::Abs(x)));
  return hn::CopySign(hn::IfThenElse(hn::Lt(x, hn::Zero(d)), hn::Sub(constant64(0x1.921fb54442d18p1), t), t), y);
}
HWY_INLINE F64Vec cosh64(F64Vec x) {
  const F64Vec e = exp2_64(hn::Mul(x, constant64(0x1.71547652b82fep0)));
  return hn::Mul(hn::Add(e, hn::Div(constant64(1), e)), constant64(0.5));
}

/// erfc(x) = 2 Phi(-a) with a = sqrt(2) |x|, or 2 less that, by the polynomial of tail_ratio(), whose own error is
/// 2^-28.
HWY_INLINE F64Vec erfc64(F64Vec x) {
  const F64Vec a = hn::Min(hn::Abs(hn::Mul(x, constant64(0x1.6a09e667f3bcdp0))), constant64(14.5));
  const F64Vec inverse = hn::Div(constant64(1), hn::Add(a, constant64(TailPolynomial::kPlus)));
  const F64Vec t = hn::Mul(hn::Sub(a, constant64(TailPolynomial::kMinus)), inverse);
  const F64Vec ratio =
      hn::MulAdd(t, TailPolynomial::of(t, [](F64Vec v, auto... c) HWY_ATTR { return polynomial64(v, c...); }),
                 constant64(TailPolynomial::kFirst));
  const F64Vec bell = exp2_64(hn::Mul(hn::Mul(x, x), constant64(-0x1.71547652b82fep0)));
  const F64Vec tail = hn::Mul(hn::Add(bell, bell), hn::Mul(ratio, inverse));
  return hn::IfThenElse(hn::Lt(x, hn::Zero(F64Tag())), hn::Sub(constant64(2), tail), tail);
}
/// The inverse of erf on (-1, 1), of floats within 2^-32: x P(w) with w = -log(1 - x^2), as M. Giles, "Approximating
/// the erfinv function" (2010), divides it: a polynomial in w below 5, one in the root of w beyond. Both are Chebyshev
/// interpolations of degree 12, up to w = 5 and over roots from 2.2 to 4.1; those of floats end at 3.993.
HWY_INLINE F64Vec erfinv64(F64Vec x) {
  const F64Tag d;
  const F64Vec one = constant64(1);
  const F64Vec w = hn::Mul(log2_64(hn::Mul(hn::Sub(one, x), hn::Add(one, x))), constant64(-0x1.62e42fefa39efp-1));
  const F64Vec near =
      polynomial64(hn::Sub(w, constant64(2.5)), 1.50140935111079192, 0.246640276785267755, -0.00417731781014003476,
                   -0.00125270808362228086, 0.000218250649399950023, -4.99588144876005954e-6, -3.41711523274501038e-6,
                   4.78644824340027128e-7, 1.36914960151991517e-8, -1.08543970931123768e-8, 8.32700082103081304e-10,
                   1.23028889731208042e-10, -2.12035651318190039e-11);
  const auto beyond = hn::Ge(w, constant64(5));
  if (HWY_LIKELY(hn::AllFalse(d, beyond))) return hn::Mul(x, near);
  const F64Vec far =
      polynomial64(hn::Sub(hn::Sqrt(w), constant64(3.15)), 2.98341744109277336, 1.00406138547180502,
                   0.00666415145910822175, -0.00493713285868577809, 0.00349106665811360293, -0.00233332603005541218,
                   0.00120178866496215569, -0.000350826487411604882, -0.0000605803105864774476, 0.000135516799927517537,
                   -0.0000581658285176915223, -8.39271498922964365e-6, 0.0000104416905539484023);
  return hn::Mul(x, hn::IfThenElse(beyond, far, near));
}

/// f, of doubles, of x where `ok`, else `library`.
template <class F, class G>
HWY_INLINE F32Vec by_doubles(hn::Mask<F32Tag> ok, F32Vec x, F&& f, G&& library) {
  return mend(
      ok, by_halves(f, x), [&](double v, double) { return library(v); }, x, x);
}
HWY_INLINE hn::Mask<F32Tag> magnitude_to(F32Vec x, float most) { return hn::Le(hn::Abs(x), hn::Set(F32Tag(), most)); }
HWY_INLINE F32Vec infinity32() { return hn::Set(F32Tag(), HUGE_VALF); }
/// y inside the domain.
HWY_INLINE F32Vec or_nan(hn::Mask<F32Tag> inside, F32Vec y) {
  return hn::IfThenElse(inside, y, hn::Set(F32Tag(), std::nanf("")));
}
/// A logarithm y of x > 0, and what it is of 0, of infinity and where there is none.
HWY_INLINE F32Vec ends_of_log(F32Vec x, F32Vec y) {
  const F32Vec zero = hn::Zero(F32Tag());
  const F32Vec inner = hn::IfThenElse(hn::Eq(x, infinity32()), x, or_nan(hn::Gt(x, zero), y));
  return hn::IfThenElse(hn::Eq(x, zero), hn::Neg(infinity32()), inner);
}

}  // namespace detail

HWY_INLINE F32Vec exp2(F32Vec x) {
  return detail::by_doubles(
      hn::Eq(x, x), x, [](F64Vec v) HWY_ATTR { return detail::exp2_64(v); }, [](double v) { return std::exp2(v); });
}
HWY_INLINE F32Vec log2(F32Vec x) {
  const F32Vec y = detail::by_halves([](F64Vec v) HWY_ATTR { return detail::log2_64(v); }, x);
  return detail::ends_of_log(x, y);
}
HWY_INLINE F32Vec log10(F32Vec x) {
  const F32Vec y = detail::by_halves(
      [](F64Vec v) HWY_ATTR { return hn::Mul(detail::log2_64(v), detail::constant64(0x1.34413509f79ffp-2)); }, x);
  return detail::ends_of_log(x, y);
}
HWY_INLINE F32Vec asin(F32Vec x) {
  const F32Vec y = detail::by_halves([](F64Vec v) HWY_ATTR { return hn::Asin(F64Tag(), v); }, x);
  return detail::keep_zero(x, detail::or_nan(detail::magnitude_to(x, 1), y));
}
HWY_INLINE F32Vec acos(F32Vec x) {
  const F32Vec y = detail::by_halves([](F64Vec v) HWY_ATTR { return hn::Acos(F64Tag(), v); }, x);
  return detail::or_nan(detail::magnitude_to(x, 1), y);
}
HWY_INLINE F32Vec atan(F32Vec x) {
  const F32Vec y = detail::by_doubles(
      hn::IsFinite(x), x, [](F64Vec v) HWY_ATTR { return hn::Atan(F64Tag(), v); },
      [](double v) { return std::atan(v); });
  return detail::keep_zero(x, y);
}
HWY_INLINE F32Vec sinh(F32Vec x) {
  const F32Vec y = detail::by_doubles(
      detail::magnitude_to(x, 100), x, [](F64Vec v) HWY_ATTR { return hn::Sinh(F64Tag(), v); },
      [](double v) { return std::sinh(v); });
  return detail::keep_zero(x, y);
}
HWY_INLINE F32Vec cosh(F32Vec x) {
  return detail::by_doubles(
      detail::magnitude_to(x, 100), x, [](F64Vec v) HWY_ATTR { return detail::cosh64(v); },
      [](double v) { return std::cosh(v); });
}
HWY_INLINE F32Vec asinh(F32Vec x) {
  const F32Vec y = detail::by_doubles(
      hn::IsFinite(x), x, [](F64Vec v) HWY_ATTR { return hn::Asinh(F64Tag(), v); },
      [](double v) { return std::asinh(v); });
  return detail::keep_zero(x, y);
}
HWY_INLINE F32Vec acosh(F32Vec x) {
  const F32Vec y = detail::by_halves([](F64Vec v) HWY_ATTR { return hn::Acosh(F64Tag(), v); }, x);
  const F32Vec inner = detail::or_nan(hn::Ge(x, hn::Set(F32Tag(), 1.0f)), y);
  return hn::IfThenElse(hn::Eq(x, detail::infinity32()), x, inner);
}
HWY_INLINE F32Vec atanh(F32Vec x) {
  const F32Vec one = hn::Set(F32Tag(), 1.0f), a = hn::Abs(x);
  const F32Vec y = detail::by_halves([](F64Vec v) HWY_ATTR { return hn::Atanh(F64Tag(), v); }, x);
  const F32Vec inner = detail::keep_zero(x, detail::or_nan(hn::Lt(a, one), y));
  return hn::IfThenElse(hn::Eq(a, one), hn::CopySign(detail::infinity32(), x), inner);
}
HWY_INLINE F32Vec fmod(F32Vec x, F32Vec y) {
  const F32Vec r = detail::by_halves([](F64Vec v, F64Vec w) HWY_ATTR { return detail::fmod64(v, w); }, x, y);
  return detail::mend(
      detail::small_quotient(x, y), r, [](double v, double w) { return std::fmod(v, w); }, x, y);
}
/// The remainder with the sign of y; `library` is the same of doubles.
template <class F>
HWY_INLINE F32Vec floor_mod(F32Vec x, F32Vec y, F&& library) {
  const F32Vec r = detail::by_halves([](F64Vec v, F64Vec w) HWY_ATTR { return detail::floor_mod64(v, w); }, x, y);
  return detail::mend(detail::small_quotient(x, y), r, library, x, y);
}
/// The quotient rounded down; `library` is the same of doubles.
template <class F>
HWY_INLINE F32Vec floor_div(F32Vec x, F32Vec y, F&& library) {
  const F32Vec n = detail::by_halves([](F64Vec v, F64Vec w) HWY_ATTR { return detail::floor_div64(v, w); }, x, y);
  return detail::mend(detail::small_quotient(x, y), n, library, x, y);
}
HWY_INLINE F32Vec erfc(F32Vec x) {
  const F32Vec y = detail::by_halves([](F64Vec v) HWY_ATTR { return detail::erfc64(v); }, x);
  return hn::IfThenElse(hn::IsNaN(x), x, y);
}
HWY_INLINE F32Vec erfinv(F32Vec x) {
  const F32Tag d;
  const F32Vec one = hn::Set(d, 1.0f), a = hn::Abs(x);
  const auto inside = hn::Lt(a, one);
  // Outside the domain the logarithm would be one of negative numbers.
  const F32Vec y =
      detail::by_halves([](F64Vec v) HWY_ATTR { return detail::erfinv64(v); }, hn::IfThenElseZero(inside, x));
  const F32Vec inner = detail::keep_zero(x, detail::or_nan(inside, y));
  return hn::IfThenElse(hn::Eq(a, one), hn::CopySign(detail::infinity32(), x), inner);
}
HWY_INLINE F32Vec atan2(F32Vec y, F32Vec x) {
  const F32Vec r = detail::by_halves([](F64Vec v, F64Vec w) HWY_ATTR { return detail::atan2_64(v, w); }, y, x);
  const F32Vec zero = hn::Zero(F32Tag());
  const auto finite = hn::And(hn::IsFinite(x), hn::IsFinite(y));
  // Where one is 0: 0 or pi, or half of it.
  const auto y_zero = hn::Eq(y, zero);
  const F32Vec pi = hn::Set(F32Tag(), 0x1.921fb6p+1f), half_pi = hn::Set(F32Tag(), 0x1.921fb6p+0f);
  const F32Vec along = hn::IfNegativeThenElse(x, pi, zero);
  const F32Vec on_axis = hn::CopySign(hn::IfThenElse(y_zero, along, half_pi), y);
  const F32Vec inner = hn::IfThenElse(hn::Or(y_zero, hn::Eq(x, zero)), on_axis, r);
  return detail::mend(
      finite, inner, [](double v, double w) { return std::atan2(v, w); }, y, x);
}
HWY_INLINE F32Vec hypot(F32Vec x, F32Vec y) {
  const F32Vec r =
      detail::by_halves([](F64Vec v, F64Vec w) HWY_ATTR { return hn::Sqrt(hn::MulAdd(v, v, hn::Mul(w, w))); }, x, y);
  return detail::mend(
      hn::And(hn::IsFinite(x), hn::IsFinite(y)), r, [](double v, double w) { return std::hypot(v, w); }, x, y);
}
HWY_INLINE F32Vec sin(F32Vec x) {
  const F32Vec y = detail::by_halves([](F64Vec v) { return detail::sin64(v, 0); }, x);
  return detail::mend(
      detail::few_turns(x), detail::keep_zero(x, y), [](double v, double) { return std::sin(v); }, x, x);
}
HWY_INLINE F32Vec cos(F32Vec x) {
  const F32Vec y = detail::by_halves([](F64Vec v) { return detail::sin64(v, 1); }, x);
  return detail::mend(
      detail::few_turns(x), y, [](double v, double) { return std::cos(v); }, x, x);
}
HWY_INLINE F32Vec tan(F32Vec x) {
  const F32Vec y = detail::by_halves([](F64Vec v) { return detail::tan64(v); }, x);
  return detail::mend(
      detail::few_turns(x), detail::keep_zero(x, y), [](double v, double) { return std::tan(v); }, x, x);
}
/// x^y, with the C library's results for zeros, infinities, NaN and negative x.
HWY_INLINE F32Vec pow(F32Vec x, F32Vec y) {
  const F32Vec p = detail::by_halves([](F64Vec v, F64Vec w) { return detail::pow64(v, w); }, x, y);
  const auto finite = hn::And(hn::IsFinite(x), hn::IsFinite(y));
  return detail::mend(
      finite, p, [](double v, double w) { return std::pow(v, w); }, x, y);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#endif  // the per-target include guard
