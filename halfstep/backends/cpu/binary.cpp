// SPDX-License-Identifier: Apache-2.0
// Functions of two and three tensors, and clamp.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/binary.cpp"
#include <hwy/foreach_target.h>

#include "halfstep/backends/cpu/runs-inl.h"
#include "halfstep/backends/cpu/wide-inl.h"

#ifndef HALFSTEP_BACKENDS_CPU_POINTWISE_BINARY_OPS_
#define HALFSTEP_BACKENDS_CPU_POINTWISE_BINARY_OPS_
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

namespace halfstep::cpu {
/// What the runs of integer division get: where to say that a divisor was zero.
struct DivisionState {
  mutable std::atomic<bool> by_zero{false};
};

template <class C>
C floor_mod(C a, C b) {
  const C m = std::fmod(a, b);
  return m != 0 && (b < 0) != (m < 0) ? m + b : m;
}
/// floor(a / b), from the exact remainder, so that it fits a - floor_mod(a, b) where a / b rounds up to an integer.
template <class C>
C floor_div(C a, C b) {
  if (b == 0) return a / b;
  const C m = std::fmod(a, b);
  C quotient = (a - m) / b;
  if (m != 0 && (b < 0) != (m < 0)) quotient -= 1;
  if (quotient == 0) return std::copysign(C{0}, a / b);
  const C floored = std::floor(quotient);
  return quotient - floored > C{0.5} ? floored + 1 : floored;
}
/// base^exponent modulo 2^bits; a negative exponent leaves 1 and -1 only, others become 0.
template <class T>
T integer_pow(T base, T exponent) {
  if constexpr (std::is_signed_v<T>) {
    if (exponent < 0) return base == 1 ? T{1} : base == -1 ? (exponent % 2 == 0 ? T{1} : T{-1}) : T{0};
  }
  std::uint64_t result = 1, factor = static_cast<std::uint64_t>(base);
  for (auto e = static_cast<std::uint64_t>(exponent); e != 0; e >>= 1, factor *= factor) {
    if (e & 1) result *= factor;
  }
  return static_cast<T>(result);
}
}  // namespace halfstep::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

template <class C>
struct Maximum : NumericFunctor {
  static constexpr bool kBool = true;
  explicit Maximum(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D, V a, V b) const {
    return hn::IfThenElse(hn::IsNaN(a), a, hn::IfThenElse(hn::IsNaN(b), b, hn::Max(a, b)));
  }
  C scalar(C a, C b) const { return a > b ? a : b; }
};
template <class C>
struct Minimum : NumericFunctor {
  static constexpr bool kBool = true;
  explicit Minimum(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D, V a, V b) const {
    return hn::IfThenElse(hn::IsNaN(a), a, hn::IfThenElse(hn::IsNaN(b), b, hn::Min(a, b)));
  }
  C scalar(C a, C b) const { return a < b ? a : b; }
};

struct DivisionFunctor : HeavyFunctor {
  static constexpr bool kIntegers = true;
  static constexpr int kGrain = 4096;
  const DivisionState* state;
  explicit DivisionFunctor(const void* s) : state(static_cast<const DivisionState*>(s)) {}
  // The quotient cut toward zero; the smallest number by -1 wraps around as its negation does.
  template <class C>
  bool divisible(C a, C b, C& quotient, C& rest) const {
    if (b == 0) {
      state->by_zero.store(true, std::memory_order_relaxed);
      return false;
    }
    if constexpr (std::is_signed_v<C>) {
      if (b == -1) {
        quotient = static_cast<C>(unsigned_t<C>(0) - unsigned_t<C>(a));
        rest = 0;
        return true;
      }
    }
    quotient = static_cast<C>(a / b);
    rest = static_cast<C>(a % b);
    return true;
  }
};
template <class C>
struct Fmod : DivisionFunctor {
  using DivisionFunctor::DivisionFunctor;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    return wide_fmod(d, a, b);
  }
  C scalar(C a, C b) const {
    C quotient, rest;
    return divisible(a, b, quotient, rest) ? rest : C{0};
  }
};
template <class C>
struct Remainder : DivisionFunctor {
  using DivisionFunctor::DivisionFunctor;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    const auto library = [](double x, double y) { return halfstep::cpu::floor_mod<double>(x, y); };
    return in_either(
        d, [&](auto x, auto y) HWY_ATTR { return floor_mod(x, y, library); }, library, a, b);
  }
  C scalar(C a, C b) const {
    C quotient, rest;
    if (!divisible(a, b, quotient, rest)) return C{0};
    return rest != 0 && (rest < 0) != (b < 0) ? static_cast<C>(rest + b) : rest;
  }
};
template <class C>
struct FloorDivide : DivisionFunctor {
  using DivisionFunctor::DivisionFunctor;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    const auto library = [](double x, double y) { return halfstep::cpu::floor_div<double>(x, y); };
    return in_either(
        d, [&](auto x, auto y) HWY_ATTR { return floor_div(x, y, library); }, library, a, b);
  }
  C scalar(C a, C b) const {
    C quotient, rest;
    if (!divisible(a, b, quotient, rest)) return C{0};
    return rest != 0 && (rest < 0) != (b < 0) ? static_cast<C>(quotient - 1) : quotient;
  }
};

struct LibraryFunctor : HeavyFunctor {
  static constexpr int kGrain = 2048;
};
template <class C>
struct Pow : HeavyFunctor {
  static constexpr bool kIntegers = true;
  explicit Pow(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    return wide_pow(d, a, b);
  }
  C scalar(C a, C b) const { return integer_pow(a, b); }
};
template <class C>
struct Atan2 : LibraryFunctor {
  explicit Atan2(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    return wide_atan2(d, a, b);
  }
};
template <class C>
struct Hypot : LibraryFunctor {
  explicit Hypot(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    return wide_hypot(d, a, b);
  }
};
template <class C>
struct PowScalar : HeavyFunctor {
  static constexpr bool kIntegers = true;
  static constexpr bool kBool = true;
  C exponent;
  explicit PowScalar(const void* state) : exponent(number<C>(static_cast<const ScalarAttributes*>(state)->value)) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a) const {
    using T = hn::TFromD<D>;
    const V one = hn::Set(d, T(1));
    const T e = exponent;
    // The exponents of formulas, each in at most two roundings; the branch goes the same way in every turn of the loop.
    if (e == T(2)) return hn::Mul(a, a);
    if (e == T(1)) return a;
    if (e == T(0.5)) return hn::Sqrt(a);
    if (e == T(3)) return hn::Mul(hn::Mul(a, a), a);
    if (e == T(-1)) return hn::Div(one, a);
    if (e == T(-0.5)) return hn::Div(one, hn::Sqrt(a));
    if (e == T(-2)) return hn::Div(hn::Div(one, a), a);
    return wide_pow(d, a, hn::Set(d, e));
  }
  C scalar(C a) const { return integer_pow(a, exponent); }
};
template <class C>
struct ScalarPow : HeavyFunctor {
  static constexpr bool kIntegers = true;
  static constexpr bool kBool = true;
  C base;
  explicit ScalarPow(const void* state) : base(number<C>(static_cast<const ScalarAttributes*>(state)->value)) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a) const {
    return wide_pow(d, hn::Set(d, static_cast<hn::TFromD<D>>(base)), a);
  }
  C scalar(C a) const { return integer_pow(base, a); }
};

template <class C>
C bound(double floating, std::int64_t integer) {
  if constexpr (std::is_integral_v<C>) {
    // Bounds beyond the dtype don't bind; a conversion would wrap around.
    return static_cast<C>(
        std::clamp<std::int64_t>(integer, std::numeric_limits<C>::min(), std::numeric_limits<C>::max()));
  } else {
    return static_cast<C>(floating);
  }
}
template <class C>
struct Clamp : NumericFunctor {
  C low, high;
  bool undefined = false;  // a bound is NaN
  explicit Clamp(const void* state) {
    const auto& a = *static_cast<const ClampAttributes*>(state);
    low = bound<C>(a.min, a.integer_min);
    high = bound<C>(a.max, a.integer_max);
    if constexpr (std::is_floating_point_v<C>) undefined = std::isnan(low) || std::isnan(high);
  }
  template <class D, class V>
  HWY_INLINE V operator()(D d, V v) const {
    // What Max and Min make of a NaN differs between instruction sets.
    if (undefined) return hn::Set(d, std::numeric_limits<hn::TFromD<D>>::quiet_NaN());
    const V clamped = hn::Min(hn::Max(v, hn::Set(d, low)), hn::Set(d, high));
    return hn::IfThenElse(hn::IsNaN(v), v, clamped);
  }
  C scalar(C v) const { return v < low ? (low < high ? low : high) : v > high ? high : v; }
};
template <class C>
struct ClampGradient : FloatingFunctor {
  C low, high;
  explicit ClampGradient(const void* state) {
    const auto& a = *static_cast<const ClampAttributes*>(state);
    low = static_cast<C>(a.min);
    high = static_cast<C>(a.max);
  }
};
/// The gradient where the input lies inside the bounds, 0 on them and beyond, and everywhere where one is NaN. An
/// infinite bound is none: what lies there was not clamped.
template <class C>
struct ClampBackward : ClampGradient<C> {
  using ClampGradient<C>::ClampGradient;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V grad, V x) const {
    const auto bound = [&](C value) { return hn::Set(d, static_cast<hn::TFromD<D>>(value)); };
    constexpr C kInfinity = std::numeric_limits<C>::infinity(), kNever = std::numeric_limits<C>::quiet_NaN();
    const V open_low = bound(this->low == -kInfinity ? this->low : kNever);
    const V open_high = bound(this->high == kInfinity ? this->high : kNever);
    const auto above = hn::Or(hn::Gt(x, bound(this->low)), hn::Eq(x, open_low));
    const auto below = hn::Or(hn::Lt(x, bound(this->high)), hn::Eq(x, open_high));
    return hn::IfThenElseZero(hn::And(above, below), grad);
  }
};
/// 0 on the bounds and beyond, the gradient elsewhere: where the input is NaN too.
template <class C>
struct HardtanhBackward : ClampGradient<C> {
  using ClampGradient<C>::ClampGradient;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V grad, V x) const {
    const auto outside = hn::Or(hn::Le(x, hn::Set(d, this->low)), hn::Ge(x, hn::Set(d, this->high)));
    return hn::IfThenZeroElse(outside, grad);
  }
};

/// From the nearer end, so that weight 0 and 1 give the ends exactly.
template <class D, class V>
HWY_INLINE V interpolate(D d, V a, V b, V weight) {
  using T = hn::TFromD<D>;
  const V difference = hn::Sub(b, a);
  const V from_a = hn::MulAdd(weight, difference, a);
  const V from_b = hn::NegMulAdd(difference, hn::Sub(hn::Set(d, T(1)), weight), b);
  return hn::IfThenElse(hn::Lt(hn::Abs(weight), hn::Set(d, T(0.5))), from_a, from_b);
}
template <class C>
struct Lerp : FloatingFunctor {
  explicit Lerp(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b, V weight) const {
    return interpolate(d, a, b, weight);
  }
};
template <class C>
struct LerpScalar : FloatingFunctor {
  C weight;
  explicit LerpScalar(const void* state) : weight(number<C>(static_cast<const ScalarAttributes*>(state)->value)) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    return interpolate(d, a, b, hn::Set(d, weight));
  }
};
template <class C>
struct Addcmul : NumericFunctor {
  C value;
  explicit Addcmul(const void* state) : value(number<C>(static_cast<const ScalarAttributes*>(state)->value)) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V x, V a, V b) const {
    return hn::MulAdd(hn::Mul(hn::Set(d, value), a), b, x);
  }
  C scalar(C x, C a, C b) const {
    using U = unsigned_t<C>;
    return static_cast<C>(U(x) + U(value) * U(a) * U(b));
  }
};
template <class C>
struct Addcdiv : FloatingFunctor {
  C value;
  explicit Addcdiv(const void* state) : value(number<C>(static_cast<const ScalarAttributes*>(state)->value)) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V x, V a, V b) const {
    return hn::Add(hn::Div(hn::Mul(hn::Set(d, value), a), b), x);
  }
};

constexpr ElementwiseOp kPointwiseOps[] = {
    op_of<Maximum, 2, true>("maximum", kComputeDTypes),
    op_of<Minimum, 2, true>("minimum", kComputeDTypes),
    op_of<Pow, 2>("pow", kNumericDTypes),
    op_of<PowScalar, 1>("pow_scalar", kComputeDTypes),
    op_of<ScalarPow, 1>("scalar_pow", kComputeDTypes),
    op_of<Atan2, 2>("atan2", kFloatingDTypes),
    op_of<Hypot, 2>("hypot", kFloatingDTypes),
    op_of<Clamp, 1>("clamp", kNumericDTypes),
    op_of<ClampBackward, 2>("clamp_backward", kFloatingDTypes),
    op_of<Clamp, 1>("hardtanh", kFloatingDTypes),
    op_of<HardtanhBackward, 2>("hardtanh_backward", kFloatingDTypes),
    op_of<Lerp, 3>("lerp", kFloatingDTypes),
    op_of<LerpScalar, 2>("lerp_scalar", kFloatingDTypes),
    op_of<Addcmul, 3>("addcmul", kNumericDTypes),
    op_of<Addcdiv, 3>("addcdiv", kFloatingDTypes),
};
// Their runs get a DivisionState in the place of attributes.
constexpr ElementwiseOp kDivisionOps[] = {
    op_of<Fmod, 2>("fmod", kNumericDTypes),
    op_of<Remainder, 2>("remainder", kNumericDTypes),
    op_of<FloorDivide, 2>("floor_divide", kNumericDTypes),
};

}  // namespace

const ElementwiseOp* pointwise_ops() { return kPointwiseOps; }
const ElementwiseOp* division_ops() { return kDivisionOps; }

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
namespace {

HWY_EXPORT(pointwise_ops);
HWY_EXPORT(division_ops);
const ElementwiseOp* chosen_binary_ops() { return HWY_DYNAMIC_DISPATCH(pointwise_ops)(); }
const ElementwiseOp* divisions() { return HWY_DYNAMIC_DISPATCH(division_ops)(); }
Status divide(const ElementwiseOp& op, KernelContext* context, const TensorView* in, TensorView* out, const void*) {
  const DivisionState state;
  const Status status = run_elementwise(runs_for(op, in), &state, in, op.inputs, out);
  if (!state.by_zero.load(std::memory_order_relaxed)) return status;
  context->set_error(context, "an integer was divided by zero");
  return Status::failed;
}
const RegisterFamily<chosen_binary_ops> binary_kernels(HWY_STATIC_DISPATCH(kPointwiseOps));
const RegisterFamily<divisions, divide> registered_divisions(HWY_STATIC_DISPATCH(kDivisionOps));

}  // namespace
}  // namespace halfstep::cpu
#endif  // HWY_ONCE
