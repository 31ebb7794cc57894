// SPDX-License-Identifier: Apache-2.0
// Functions of one tensor. In float32 what networks use much has a vector form; the rest, and everything in float64,
// calls the C library for each lane.
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
enum class UnaryOp {
  abs,
  sign,
  square,
  floor,
  ceil,
  round,
  trunc,
  sqrt,
  rsqrt,
  reciprocal,
  exp,
  exp2,
  expm1,
  log,
  log2,
  log10,
  log1p,
  sin,
  cos,
  tan,
  asin,
  acos,
  atan,
  sinh,
  cosh,
  asinh,
  acosh,
  atanh,
  tanh,
  erf,
  erfc,
  erfinv,
  sigmoid,
  nan_to_num
};

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

template <class C>
struct Exp : HeavyFunctor {
  explicit Exp(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a) const {
    return wide_exp(d, a);
  }
};
template <class C>
struct Expm1 : HeavyFunctor {
  explicit Expm1(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a) const {
    return wide_expm1(d, a);
  }
};
template <class C>
struct Log : HeavyFunctor {
  explicit Log(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a) const {
    return wide_log(d, a);
  }
};
template <class C>
struct Log1p : HeavyFunctor {
  explicit Log1p(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a) const {
    return wide_log1p(d, a);
  }
};
template <class C>
struct Tanh : HeavyFunctor {
  explicit Tanh(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a) const {
    return wide_tanh(d, a);
  }
};
template <class C>
struct Sigmoid : HeavyFunctor {
  explicit Sigmoid(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a) const {
    return wide_sigmoid(d, a);
  }
};
template <class C>
struct Erf : HeavyFunctor {
  explicit Erf(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a) const {
    return wide_erf(d, a);
  }
};

// --- the C library's, in float or double

using Exp2 = decltype([](auto x) { return std::exp2(x); });
using Log2 = decltype([](auto x) { return std::log2(x); });
using Log10 = decltype([](auto x) { return std::log10(x); });
using Sin = decltype([](auto x) { return std::sin(x); });
using Cos = decltype([](auto x) { return std::cos(x); });
using Tan = decltype([](auto x) { return std::tan(x); });
using Asin = decltype([](auto x) { return std::asin(x); });
using Acos = decltype([](auto x) { return std::acos(x); });
using Atan = decltype([](auto x) { return std::atan(x); });
// In double: the library's float forms of these err by two units and more.
using Sinh = decltype([](double x) { return std::sinh(x); });
using Cosh = decltype([](double x) { return std::cosh(x); });
using Asinh = decltype([](double x) { return std::asinh(x); });
using Acosh = decltype([](double x) { return std::acosh(x); });
using Atanh = decltype([](double x) { return std::atanh(x); });
using Erfc = decltype([](double x) { return std::erfc(x); });
using Erfinv = decltype([](double x) { return erfinv(x); });

template <class F>
struct Library {
  template <class C>
  struct Functor : HeavyFunctor {
    static constexpr int kGrain = 2048;
    explicit Functor(const void*) {}
    template <class D, class V>
    HWY_INLINE V operator()(D d, V a) const {
      return by_lane(
          d, [](hn::TFromD<D> x) { return static_cast<hn::TFromD<D>>(F()(x)); }, a);
    }
  };
};

}  // namespace

const Runs& unary_runs(UnaryOp op, DType dtype) {
  switch (op) {
    case UnaryOp::abs:
      return runs_of<Abs, 1>(dtype);
    case UnaryOp::sign:
      return runs_of<Sign, 1>(dtype);
    case UnaryOp::square:
      return runs_of<Square, 1>(dtype);
    case UnaryOp::floor:
      return runs_of<Floor, 1>(dtype);
    case UnaryOp::ceil:
      return runs_of<Ceil, 1>(dtype);
    case UnaryOp::round:
      return runs_of<Round, 1>(dtype);
    case UnaryOp::trunc:
      return runs_of<Trunc, 1>(dtype);
    case UnaryOp::sqrt:
      return runs_of<Sqrt, 1>(dtype);
    case UnaryOp::rsqrt:
      return runs_of<Rsqrt, 1>(dtype);
    case UnaryOp::reciprocal:
      return runs_of<Reciprocal, 1>(dtype);
    case UnaryOp::exp:
      return runs_of<Exp, 1>(dtype);
    case UnaryOp::exp2:
      return runs_of<Library<Exp2>::Functor, 1>(dtype);
    case UnaryOp::expm1:
      return runs_of<Expm1, 1>(dtype);
    case UnaryOp::log:
      return runs_of<Log, 1>(dtype);
    case UnaryOp::log2:
      return runs_of<Library<Log2>::Functor, 1>(dtype);
    case UnaryOp::log10:
      return runs_of<Library<Log10>::Functor, 1>(dtype);
    case UnaryOp::log1p:
      return runs_of<Log1p, 1>(dtype);
    case UnaryOp::sin:
      return runs_of<Library<Sin>::Functor, 1>(dtype);
    case UnaryOp::cos:
      return runs_of<Library<Cos>::Functor, 1>(dtype);
    case UnaryOp::tan:
      return runs_of<Library<Tan>::Functor, 1>(dtype);
    case UnaryOp::asin:
      return runs_of<Library<Asin>::Functor, 1>(dtype);
    case UnaryOp::acos:
      return runs_of<Library<Acos>::Functor, 1>(dtype);
    case UnaryOp::atan:
      return runs_of<Library<Atan>::Functor, 1>(dtype);
    case UnaryOp::sinh:
      return runs_of<Library<Sinh>::Functor, 1>(dtype);
    case UnaryOp::cosh:
      return runs_of<Library<Cosh>::Functor, 1>(dtype);
    case UnaryOp::asinh:
      return runs_of<Library<Asinh>::Functor, 1>(dtype);
    case UnaryOp::acosh:
      return runs_of<Library<Acosh>::Functor, 1>(dtype);
    case UnaryOp::atanh:
      return runs_of<Library<Atanh>::Functor, 1>(dtype);
    case UnaryOp::tanh:
      return runs_of<Tanh, 1>(dtype);
    case UnaryOp::erf:
      return runs_of<Erf, 1>(dtype);
    case UnaryOp::erfc:
      return runs_of<Library<Erfc>::Functor, 1>(dtype);
    case UnaryOp::erfinv:
      return runs_of<Library<Erfinv>::Functor, 1>(dtype);
    case UnaryOp::sigmoid:
      return runs_of<Sigmoid, 1>(dtype);
    case UnaryOp::nan_to_num:
      break;
  }
  return runs_of<NanToNum, 1>(dtype);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
namespace {

HWY_EXPORT(unary_runs);
const Runs& runs(UnaryOp op, DType dtype) { return HWY_DYNAMIC_DISPATCH(unary_runs)(op, dtype); }
template <UnaryOp op, int N = 1>
constexpr KernelFn kernel = elementwise_kernel<op, N, runs>;

const RegisterCpuKernel registered[] = {
    {"abs", kNumericDTypes, kernel<UnaryOp::abs>},
    {"sign", kComputeDTypes, kernel<UnaryOp::sign>},
    {"square", kNumericDTypes, kernel<UnaryOp::square>},
    {"floor", kNumericDTypes, kernel<UnaryOp::floor>},
    {"ceil", kNumericDTypes, kernel<UnaryOp::ceil>},
    {"round", kNumericDTypes, kernel<UnaryOp::round>},
    {"trunc", kNumericDTypes, kernel<UnaryOp::trunc>},
    {"sqrt", kFloatingDTypes, kernel<UnaryOp::sqrt>},
    {"rsqrt", kFloatingDTypes, kernel<UnaryOp::rsqrt>},
    {"reciprocal", kFloatingDTypes, kernel<UnaryOp::reciprocal>},
    {"exp", kFloatingDTypes, kernel<UnaryOp::exp>},
    {"exp2", kFloatingDTypes, kernel<UnaryOp::exp2>},
    {"expm1", kFloatingDTypes, kernel<UnaryOp::expm1>},
    {"log", kFloatingDTypes, kernel<UnaryOp::log>},
    {"log2", kFloatingDTypes, kernel<UnaryOp::log2>},
    {"log10", kFloatingDTypes, kernel<UnaryOp::log10>},
    {"log1p", kFloatingDTypes, kernel<UnaryOp::log1p>},
    {"sin", kFloatingDTypes, kernel<UnaryOp::sin>},
    {"cos", kFloatingDTypes, kernel<UnaryOp::cos>},
    {"tan", kFloatingDTypes, kernel<UnaryOp::tan>},
    {"asin", kFloatingDTypes, kernel<UnaryOp::asin>},
    {"acos", kFloatingDTypes, kernel<UnaryOp::acos>},
    {"atan", kFloatingDTypes, kernel<UnaryOp::atan>},
    {"sinh", kFloatingDTypes, kernel<UnaryOp::sinh>},
    {"cosh", kFloatingDTypes, kernel<UnaryOp::cosh>},
    {"asinh", kFloatingDTypes, kernel<UnaryOp::asinh>},
    {"acosh", kFloatingDTypes, kernel<UnaryOp::acosh>},
    {"atanh", kFloatingDTypes, kernel<UnaryOp::atanh>},
    {"tanh", kFloatingDTypes, kernel<UnaryOp::tanh>},
    {"erf", kFloatingDTypes, kernel<UnaryOp::erf>},
    {"erfc", kFloatingDTypes, kernel<UnaryOp::erfc>},
    {"erfinv", kFloatingDTypes, kernel<UnaryOp::erfinv>},
    {"sigmoid", kFloatingDTypes, kernel<UnaryOp::sigmoid>},
    {"nan_to_num", kFloatingDTypes, kernel<UnaryOp::nan_to_num>},
};

}  // namespace
}  // namespace halfstep::cpu
#endif  // HWY_ONCE
