// SPDX-License-Identifier: Apache-2.0
// Elementary functions in either width: vectors in float32, the C library for each lane in float64.

// The include guard of a header that is compiled once for each target.
#if defined(HALFSTEP_BACKENDS_CPU_WIDE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFSTEP_BACKENDS_CPU_WIDE_INL_H_
#undef HALFSTEP_BACKENDS_CPU_WIDE_INL_H_
#else
#define HALFSTEP_BACKENDS_CPU_WIDE_INL_H_
#endif

#include <cmath>

#include "halfstep/backends/cpu/math-inl.h"
#include "halfstep/backends/cpu/math64-inl.h"
#include "halfstep/backends/cpu/runs-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {

/// `vectors` of vectors in float32, `library` of each lane in float64.
template <class D, class F, class G, class... V>
HWY_INLINE hn::Vec<D> in_either(D d, F&& vectors, G&& library, V... v) {
  if constexpr (std::is_same_v<D, F32Tag>) {
    return vectors(v...);
  } else {
    return by_lane(d, library, v...);
  }
}
template <class D>
HWY_INLINE hn::Vec<D> wide_exp(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return exp(x); }, [](double x) { return std::exp(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_expm1(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return expm1(x); }, [](double x) { return std::expm1(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_log(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return log(x); }, [](double x) { return std::log(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_log1p(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return log1p(x); }, [](double x) { return std::log1p(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_tanh(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return tanh(x); }, [](double x) { return std::tanh(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_erf(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return erf(x); }, [](double x) { return std::erf(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_erfc(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return erfc(x); }, [](double x) { return std::erfc(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_sin(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return sin(x); }, [](double x) { return std::sin(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_cos(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return cos(x); }, [](double x) { return std::cos(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_tan(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return tan(x); }, [](double x) { return std::tan(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_pow(D d, hn::Vec<D> v, hn::Vec<D> w) {
  return in_either(
      d, [](auto x, auto y) HWY_ATTR { return pow(x, y); }, [](double x, double y) { return std::pow(x, y); }, v, w);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_exp2(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return exp2(x); }, [](double x) { return std::exp2(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_log2(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return log2(x); }, [](double x) { return std::log2(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_log10(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return log10(x); }, [](double x) { return std::log10(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_asin(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return asin(x); }, [](double x) { return std::asin(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_acos(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return acos(x); }, [](double x) { return std::acos(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_atan(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return atan(x); }, [](double x) { return std::atan(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_sinh(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return sinh(x); }, [](double x) { return std::sinh(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_cosh(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return cosh(x); }, [](double x) { return std::cosh(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_asinh(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return asinh(x); }, [](double x) { return std::asinh(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_acosh(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return acosh(x); }, [](double x) { return std::acosh(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_atanh(D d, hn::Vec<D> v) {
  return in_either(
      d, [](auto x) HWY_ATTR { return atanh(x); }, [](double x) { return std::atanh(x); }, v);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_fmod(D d, hn::Vec<D> v, hn::Vec<D> w) {
  return in_either(
      d, [](auto x, auto y) HWY_ATTR { return fmod(x, y); }, [](double x, double y) { return std::fmod(x, y); }, v, w);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_atan2(D d, hn::Vec<D> v, hn::Vec<D> w) {
  return in_either(
      d, [](auto x, auto y) HWY_ATTR { return atan2(x, y); }, [](double x, double y) { return std::atan2(x, y); }, v,
      w);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_hypot(D d, hn::Vec<D> v, hn::Vec<D> w) {
  return in_either(
      d, [](auto x, auto y) HWY_ATTR { return hypot(x, y); }, [](double x, double y) { return std::hypot(x, y); }, v,
      w);
}
template <class D>
HWY_INLINE hn::Vec<D> wide_sigmoid(D d, hn::Vec<D> v) {
  if constexpr (std::is_same_v<D, F32Tag>) {
    return sigmoid(v);
  } else {
    const auto one = hn::Set(d, 1.0);
    const auto z = wide_exp(d, hn::Neg(hn::Abs(v)));
    return hn::Div(hn::IfThenElse(hn::Lt(v, hn::Zero(d)), z, one), hn::Add(one, z));
  }
}
/// sigmoid(v) and sigmoid(-v).
template <class D>
HWY_INLINE SigmoidPair<hn::Vec<D>> wide_sigmoid_pair(D d, hn::Vec<D> v) {
  if constexpr (std::is_same_v<D, F32Tag>) {
    return sigmoid_pair(v);
  } else {
    return {wide_sigmoid(d, v), wide_sigmoid(d, hn::Neg(v))};
  }
}
/// f sigmoid(v) for f of v's sign; 0 where sigmoid(v) is, f infinite or not.
template <class D>
HWY_INLINE hn::Vec<D> wide_times_sigmoid(D d, hn::Vec<D> f, hn::Vec<D> v) {
  if constexpr (std::is_same_v<D, F32Tag>) {
    return times_sigmoid(f, v);
  } else {
    const auto s = wide_sigmoid(d, v);
    return hn::IfThenZeroElse(hn::Eq(s, hn::Zero(d)), hn::Mul(f, s));
  }
}
/// v sigmoid(v) for results of 16 bits.
template <class D>
HWY_INLINE hn::Vec<D> wide_silu_low(D d, hn::Vec<D> v) {
  if constexpr (std::is_same_v<D, F32Tag>) {
    return silu_low(v);
  } else {
    return wide_times_sigmoid(d, v, v);
  }
}
/// The slope of v sigmoid(v).
template <class D>
HWY_INLINE hn::Vec<D> wide_silu_slope(D d, hn::Vec<D> v) {
  if constexpr (std::is_same_v<D, F32Tag>) {
    return silu_slope(v);
  } else {
    const auto up = wide_sigmoid(d, v), both = hn::Mul(up, wide_sigmoid(d, hn::Neg(v)));
    const auto gone = hn::And(hn::Eq(both, hn::Zero(d)), hn::Eq(v, v));
    return hn::Add(up, hn::IfThenZeroElse(gone, hn::Mul(v, both)));
  }
}
/// v Phi(v); 0 at -infinity.
template <class D>
HWY_INLINE hn::Vec<D> wide_gelu(D d, hn::Vec<D> v) {
  if constexpr (std::is_same_v<D, F32Tag>) {
    return gelu(v);
  } else {
    const auto phi = by_lane(
        d, [](double x) { return 0.5 * std::erfc(x * -0.70710678118654752440); }, v);
    return hn::IfThenZeroElse(hn::Eq(phi, hn::Zero(d)), hn::Mul(v, phi));
  }
}
/// Its slope, Phi(v) + v Phi'(v).
template <class D>
HWY_INLINE hn::Vec<D> wide_gelu_slope(D d, hn::Vec<D> v) {
  if constexpr (std::is_same_v<D, F32Tag>) {
    return gelu_slope(v);
  } else {
    return by_lane(
        d,
        [](double x) {
          // What the square's rounding took away would be multiplied by the square.
          const double square = x * x, lost = std::fma(x, x, -square);
          const double power = std::exp(square * -0.5), bell = power == 0 ? 0 : power * (1 - lost / 2);
          const double rest = bell == 0 ? 0 : x * bell * 0.39894228040143267794;
          return 0.5 * std::erfc(x * -0.70710678118654752440) + rest;
        },
        v);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#endif  // the per-target include guard
