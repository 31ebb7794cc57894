// SPDX-License-Identifier: Apache-2.0
// Functions of one tensor: in float32 in vectors, in float64 the elementary ones by the C library for each lane.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/unary.cpp"
#include <hwy/foreach_target.h>

#include "halfstep/backends/cpu/runs-inl.h"
#include "halfstep/backends/cpu/wide-inl.h"

#ifndef HALFSTEP_BACKENDS_CPU_POINTWISE_OPS_
#define HALFSTEP_BACKENDS_CPU_POINTWISE_OPS_
#include <cmath>
#include <limits>

namespace halfstep::cpu {
/// The inverse of the error function: Winitzki's closed form ("A handy approximation for the error function and its
/// inverse", 2008), then Halley's steps on erf or erfc.
inline double erfinv(double y) {
  if (!(std::fabs(y) < 1)) return y == 1 ? HUGE_VAL : y == -1 ? -HUGE_VAL : std::nan("");
  if (y == 0) return y;
  const double a = std::fabs(y);
  constexpr double kPi = 3.14159265358979323846;
  constexpr double kC = 0.147;
  const double l = std::log1p(-a * a);
  const double b = 2 / (kPi * kC) + l / 2;
  double x = std::sqrt(std::sqrt(b * b - l / kC) - b);
  const double k = std::sqrt(kPi) / 2;
  for (int i = 0; i < 3; ++i) {
    // erfc keeps its digits near 1, where erf has none left.
    const double error = a < 0.5 ? std::erf(x) - a : (1 - a) - std::erfc(x);
    const double step = error * k * std::exp(x * x);
    x -= step / (1 + x * step);
  }
  return std::copysign(x, y);
}
}  // namespace halfstep::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

// --- cheap ones, in vectors of either width

template <class C>
struct Abs : NumericFunctor {
  explicit Abs(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D, V a) const {
    return hn::Abs(a);
  }
  C scalar(C a) const { return a < 0 ? static_cast<C>(unsigned_t<C>(0) - unsigned_t<C>(a)) : a; }
};
template <class C>
struct Sign : NumericFunctor {
  static constexpr bool kBool = true;
  explicit Sign(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a) const {
    // 0 for zeros of both signs; NaN gives 0 as in PyTorch.
    const V zero = hn::Zero(d);
    const V up = hn::IfThenElseZero(hn::Gt(a, zero), hn::Set(d, hn::TFromD<D>(1)));
    return hn::IfThenElse(hn::Lt(a, zero), hn::Set(d, hn::TFromD<D>(-1)), up);
  }
  C scalar(C a) const {
    if constexpr (std::is_same_v<C, bool>) {
      return a;
    } else {
      return static_cast<C>((a > 0) - (a < 0));
    }
  }
};
template <class C>
struct Square : NumericFunctor {
  explicit Square(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D, V a) const {
    return hn::Mul(a, a);
  }
  C scalar(C a) const { return static_cast<C>(unsigned_t<C>(a) * unsigned_t<C>(a)); }
};
struct IntegerIdentity : NumericFunctor {
  template <class C>
  C scalar(C a) const {
    return a;
  }
};
template <class C>
struct Floor : IntegerIdentity {
  explicit Floor(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D, V a) const {
    return hn::Floor(a);
  }
};
template <class C>
struct Ceil : IntegerIdentity {
  explicit Ceil(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D, V a) const {
    return hn::Ceil(a);
  }
};
template <class C>
struct Round : IntegerIdentity {
  explicit Round(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D, V a) const {
    return hn::Round(a);  // half to even
  }
};
template <class C>
struct Trunc : IntegerIdentity {
  explicit Trunc(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D, V a) const {
    return hn::Trunc(a);
  }
};
template <class C>
struct Sqrt : FloatingFunctor {
  explicit Sqrt(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D, V a) const {
    return hn::Sqrt(a);
  }
};
template <class C>
struct Rsqrt : FloatingFunctor {
  explicit Rsqrt(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a) const {
    return hn::Div(hn::Set(d, hn::TFromD<D>(1)), hn::Sqrt(a));
  }
};
template <class C>
struct Reciprocal : FloatingFunctor {
  explicit Reciprocal(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a) const {
    return hn::Div(hn::Set(d, hn::TFromD<D>(1)), a);
  }
};
template <class C>
struct NanToNum : FloatingFunctor {
  NanToNumAttributes a;
  explicit NanToNum(const void* state) : a(*static_cast<const NanToNumAttributes*>(state)) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V v) const {
    using T = hn::TFromD<D>;
    const V infinity = hn::Set(d, std::numeric_limits<T>::infinity());
    V y = hn::IfThenElse(hn::Eq(v, infinity), hn::Set(d, static_cast<T>(a.posinf)), v);
    y = hn::IfThenElse(hn::Eq(v, hn::Neg(infinity)), hn::Set(d, static_cast<T>(a.neginf)), y);
    return hn::IfThenElse(hn::IsNaN(v), hn::Set(d, static_cast<T>(a.nan)), y);
  }
};

// --- with a vector form in float32

using Exp = decltype([](auto d, auto v) HWY_ATTR { return wide_exp(d, v); });
using Expm1 = decltype([](auto d, auto v) HWY_ATTR { return wide_expm1(d, v); });
using Log = decltype([](auto d, auto v) HWY_ATTR { return wide_log(d, v); });
using Log1p = decltype([](auto d, auto v) HWY_ATTR { return wide_log1p(d, v); });
using Tanh = decltype([](auto d, auto v) HWY_ATTR { return wide_tanh(d, v); });
using Sigmoid = decltype([](auto d, auto v) HWY_ATTR { return wide_sigmoid(d, v); });
using Erf = decltype([](auto d, auto v) HWY_ATTR { return wide_erf(d, v); });
using Erfc = decltype([](auto d, auto v) HWY_ATTR { return wide_erfc(d, v); });
using Erfinv = decltype([](auto d, auto v) HWY_ATTR {
  return in_either(
      d, [](auto x) HWY_ATTR { return erfinv(x); }, [](double x) { return halfstep::cpu::erfinv(x); }, v);
});
using Sin = decltype([](auto d, auto v) HWY_ATTR { return wide_sin(d, v); });
using Cos = decltype([](auto d, auto v) HWY_ATTR { return wide_cos(d, v); });
using Tan = decltype([](auto d, auto v) HWY_ATTR { return wide_tan(d, v); });
using Exp2 = decltype([](auto d, auto v) HWY_ATTR { return wide_exp2(d, v); });
using Log2 = decltype([](auto d, auto v) HWY_ATTR { return wide_log2(d, v); });
using Log10 = decltype([](auto d, auto v) HWY_ATTR { return wide_log10(d, v); });
using Asin = decltype([](auto d, auto v) HWY_ATTR { return wide_asin(d, v); });
using Acos = decltype([](auto d, auto v) HWY_ATTR { return wide_acos(d, v); });
using Atan = decltype([](auto d, auto v) HWY_ATTR { return wide_atan(d, v); });
using Sinh = decltype([](auto d, auto v) HWY_ATTR { return wide_sinh(d, v); });
using Cosh = decltype([](auto d, auto v) HWY_ATTR { return wide_cosh(d, v); });
using Asinh = decltype([](auto d, auto v) HWY_ATTR { return wide_asinh(d, v); });
using Acosh = decltype([](auto d, auto v) HWY_ATTR { return wide_acosh(d, v); });
using Atanh = decltype([](auto d, auto v) HWY_ATTR { return wide_atanh(d, v); });

template <class F>
struct Wide {
  template <class C>
  struct Functor : HeavyFunctor {
    explicit Functor(const void*) {}
    template <class D, class V>
    HWY_INLINE V operator()(D d, V a) const {
      return F()(d, a);
    }
  };
};

constexpr ElementwiseOp kUnaryOps[] = {
    op_of<Abs, 1>("abs", kNumericDTypes),
    op_of<Sign, 1>("sign", kComputeDTypes),
    op_of<Square, 1>("square", kNumericDTypes),
    op_of<Floor, 1>("floor", kNumericDTypes),
    op_of<Ceil, 1>("ceil", kNumericDTypes),
    op_of<Round, 1>("round", kNumericDTypes),
    op_of<Trunc, 1>("trunc", kNumericDTypes),
    op_of<Sqrt, 1>("sqrt", kFloatingDTypes),
    op_of<Rsqrt, 1>("rsqrt", kFloatingDTypes),
    op_of<Reciprocal, 1>("reciprocal", kFloatingDTypes),
    op_of<Wide<Exp>::Functor, 1>("exp", kFloatingDTypes),
    op_of<Wide<Exp2>::Functor, 1>("exp2", kFloatingDTypes),
    op_of<Wide<Expm1>::Functor, 1>("expm1", kFloatingDTypes),
    op_of<Wide<Log>::Functor, 1>("log", kFloatingDTypes),
    op_of<Wide<Log2>::Functor, 1>("log2", kFloatingDTypes),
    op_of<Wide<Log10>::Functor, 1>("log10", kFloatingDTypes),
    op_of<Wide<Log1p>::Functor, 1>("log1p", kFloatingDTypes),
    op_of<Wide<Sin>::Functor, 1>("sin", kFloatingDTypes),
    op_of<Wide<Cos>::Functor, 1>("cos", kFloatingDTypes),
    op_of<Wide<Tan>::Functor, 1>("tan", kFloatingDTypes),
    op_of<Wide<Asin>::Functor, 1>("asin", kFloatingDTypes),
    op_of<Wide<Acos>::Functor, 1>("acos", kFloatingDTypes),
    op_of<Wide<Atan>::Functor, 1>("atan", kFloatingDTypes),
    op_of<Wide<Sinh>::Functor, 1>("sinh", kFloatingDTypes),
    op_of<Wide<Cosh>::Functor, 1>("cosh", kFloatingDTypes),
    op_of<Wide<Asinh>::Functor, 1>("asinh", kFloatingDTypes),
    op_of<Wide<Acosh>::Functor, 1>("acosh", kFloatingDTypes),
    op_of<Wide<Atanh>::Functor, 1>("atanh", kFloatingDTypes),
    op_of<Wide<Tanh>::Functor, 1>("tanh", kFloatingDTypes),
    op_of<Wide<Erf>::Functor, 1>("erf", kFloatingDTypes),
    op_of<Wide<Erfc>::Functor, 1>("erfc", kFloatingDTypes),
    op_of<Wide<Erfinv>::Functor, 1>("erfinv", kFloatingDTypes),
    op_of<Wide<Sigmoid>::Functor, 1>("sigmoid", kFloatingDTypes),
    op_of<NanToNum, 1>("nan_to_num", kFloatingDTypes),
};

}  // namespace

const ElementwiseOp* unary_ops() { return kUnaryOps; }

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
namespace {

HWY_EXPORT(unary_ops);
const ElementwiseOp* chosen_unary_ops() { return HWY_DYNAMIC_DISPATCH(unary_ops)(); }
const RegisterFamily<chosen_unary_ops> unary_kernels(HWY_STATIC_DISPATCH(kUnaryOps));

}  // namespace
}  // namespace halfstep::cpu
#endif  // HWY_ONCE
