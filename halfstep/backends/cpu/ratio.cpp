// SPDX-License-Identifier: Apache-2.0
// Gradients that are a gradient times a ratio. Formulas of several ops leave the range of the dtype between them, where
// the result is well inside.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/ratio.cpp"
#include <hwy/foreach_target.h>

#include "halfstep/backends/cpu/runs-inl.h"

#ifndef HALFSTEP_BACKENDS_CPU_RATIO_OPS_
#define HALFSTEP_BACKENDS_CPU_RATIO_OPS_
#include <algorithm>
#include <cmath>
#include <limits>

namespace halfstep::cpu {
/// Whether a number that came of float64 ones kept all its digits.
inline bool far_from_limits(double v) { return std::abs(v) > 1e-290 && std::abs(v) < 1e290; }
/// g a / d 2^e, whatever the factors are.
inline double scaled_product(double g, double a, double d, int e) {
  int eg = 0, ea = 0, ed = 0;
  if (std::isfinite(g) && std::isfinite(a) && std::isfinite(d)) {
    g = std::frexp(g, &eg);
    a = std::frexp(a, &ea);
    d = std::frexp(d, &ed);
  }
  return std::ldexp(g * (a / d), eg + ea - ed + e);
}
/// The sum of the squares of a and b, divided by 2^(2 e).
struct ScaledSquares {
  double sum;
  int e = 0;
  ScaledSquares(double a, double b) {
    const double larger = std::fmax(std::abs(a), std::abs(b));
    if (larger > 0 && std::isfinite(a) && std::isfinite(b)) e = std::ilogb(larger);
    a = std::ldexp(a, -e);
    b = std::ldexp(b, -e);
    sum = a * a + b * b;
  }
};

// Each in float64: `near` holds for float32 and less, whose products and squares it has room for; `far` for all.
struct ScaledRatio {
  static double near(double g, double a, double b) { return g * (a / b); }
  static double far(double g, double a, double b) {
    return far_from_limits(a / b) ? near(g, a, b) : scaled_product(g, a, b, 0);
  }
};
struct DivBackward {
  static double near(double g, double a, double b) { return -(g * a) / (b * b); }
  static double far(double g, double a, double b) {
    if (far_from_limits(g * a) && far_from_limits(b * b)) return near(g, a, b);
    int e = 0;
    if (std::isfinite(b)) b = std::frexp(b, &e);
    return -scaled_product(g, a, b * b, -2 * e);
  }
};
struct HypotBackward {
  static double near(double g, double a, double b) { return g * (a / std::sqrt(a * a + b * b)); }
  static double far(double g, double a, double b) {
    const double square = a * a + b * b, ratio = a / std::sqrt(square);
    if (far_from_limits(square) && far_from_limits(ratio)) return g * ratio;
    const ScaledSquares squares(a, b);
    return scaled_product(g, a, std::sqrt(squares.sum), -squares.e);
  }
};
struct Atan2Backward {
  static double near(double g, double a, double b) {
    const double square = a * a + b * b;
    return square == 0 ? 0.0 : g * (b / square);
  }
  static double far(double g, double a, double b) {
    const double square = a * a + b * b;
    if (far_from_limits(square) && far_from_limits(b / square)) return g * (b / square);
    const ScaledSquares squares(a, b);
    return squares.sum == 0 ? 0.0 : scaled_product(g, b, squares.sum, -2 * squares.e);
  }
};
}  // namespace halfstep::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

template <class F, class D, class V>
HWY_INLINE V ratio(D d, V g, V a, V b) {
  using C = hn::TFromD<D>;
  constexpr std::size_t kLanes = hn::MaxLanes(D());
  alignas(64) C x[kLanes];
  alignas(64) C y[kLanes];
  alignas(64) C z[kLanes];
  hn::Store(g, d, x);
  hn::Store(a, d, y);
  hn::Store(b, d, z);
  for (std::size_t i = 0; i < kLanes; ++i) {
    if constexpr (std::is_same_v<C, float>) {
      x[i] = static_cast<float>(F::near(x[i], y[i], z[i]));
    } else {
      x[i] = F::far(x[i], y[i], z[i]);
    }
  }
  return hn::Load(d, x);
}
template <class F>
struct Ratio {
  template <class C>
  struct Functor : HeavyFunctor {
    explicit Functor(const void*) {}
    template <class D, class V>
    HWY_INLINE V operator()(D d, V g, V a, V b) const {
      return ratio<F>(d, g, a, b);
    }
  };
};
// The factor in float32 where that holds it, which is nearly always.
bool fits(double factor) {
  using Limits = std::numeric_limits<float>;
  const double magnitude = std::abs(factor);
  return ((magnitude >= double{Limits::min()}) & (magnitude <= double{Limits::max()})) | (factor == 0);
}
// By factors that lie `step` apart, each as if it were alone.
template <class T>
void multiply(T* to, const T* x, const double* factor, std::int64_t step, std::int64_t n) {
  using C = ComputeScalar<T>;
  for (std::int64_t i = 0; i < n; ++i) {
    const double f = factor[i * step], wide = convert<double>(x[i]) * f;
    to[i] = fits(f) ? convert<T>(convert<C>(x[i]) * static_cast<C>(f)) : convert<T>(wide);
  }
}
template <class T>
void multiply(T* to, const T* x, const float* factor, std::int64_t n) {
  const auto product = [](auto a, auto b) { return hn::Mul(a, b); };
  map_run(F32Tag(), to, n, product, Run<T>{x}, Run<float>{factor});
}
template <class T>
void mul_wide_run(const void*, void* out, const void* const* in, std::int64_t n) {
  const auto* factor = static_cast<const double*>(in[1]);
  const auto* from = static_cast<const T*>(in[0]);
  auto* to = static_cast<T*>(out);
  if constexpr (std::is_same_v<T, double>) {
    multiply(to, from, factor, 1, n);
  } else {
    constexpr std::int64_t kBlock = 256;
    float narrow[kBlock];
    for (std::int64_t at = 0; at < n; at += kBlock) {
      const std::int64_t m = std::min(kBlock, n - at);
      int all = 1;
      for (std::int64_t i = 0; i < m; ++i) {
        narrow[i] = static_cast<float>(factor[at + i]);
        all &= fits(factor[at + i]);
      }
      if (all) {
        multiply(to + at, from + at, narrow, m);
      } else {
        multiply(to + at, from + at, factor + at, 1, m);
      }
    }
  }
}
template <class T>
void mul_wide_by_one(const void*, void* out, const void* const* in, std::int64_t n) {
  const double factor = *static_cast<const double*>(in[1]);
  const auto* from = static_cast<const T*>(in[0]);
  auto* to = static_cast<T*>(out);
  if constexpr (!std::is_same_v<T, double>) {
    if (fits(factor)) {
      const auto product = [](auto a, auto b) { return hn::Mul(a, b); };
      return map_run(F32Tag(), to, n, product, Run<T>{from}, Same<float>{static_cast<float>(factor)});
    }
  }
  multiply(to, from, &factor, 0, n);
}
template <class T>
constexpr Runs kMulWide{.straight = mul_wide_run<T>, .repeated = {nullptr, mul_wide_by_one<T>}};

template <class D, class V>
HWY_INLINE hn::Mask<D> normal(D d, V v) {
  using Limits = std::numeric_limits<hn::TFromD<D>>;
  return hn::And(hn::Ge(hn::Abs(v), hn::Set(d, Limits::min())), hn::Le(hn::Abs(v), hn::Set(d, Limits::max())));
}
// The cheap ones stay in the vectors' own type where that holds what comes between: a zero too, if it is one of the
// factors and no underflow. Which way an element goes doesn't depend on its neighbours.
template <class C>
struct Scaled : HeavyFunctor {
  explicit Scaled(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V g, V a, V b) const {
    const V quotient = hn::Div(a, b), result = hn::Mul(g, quotient);
    const auto held = hn::Or(normal(d, quotient), hn::Eq(a, hn::Zero(d)));
    if (HWY_LIKELY(hn::AllTrue(d, held))) return result;
    return hn::IfThenElse(held, result, ratio<ScaledRatio>(d, g, a, b));
  }
};
template <class C>
struct Div : HeavyFunctor {
  explicit Div(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V g, V a, V b) const {
    const V product = hn::Mul(g, a), square = hn::Mul(b, b);
    const auto zero = hn::Or(hn::Eq(g, hn::Zero(d)), hn::Eq(a, hn::Zero(d)));
    const auto held = hn::And(hn::Or(normal(d, product), zero), normal(d, square));
    const V result = hn::Neg(hn::Div(product, square));
    if (HWY_LIKELY(hn::AllTrue(d, held))) return result;
    return hn::IfThenElse(held, result, ratio<DivBackward>(d, g, a, b));
  }
};

constexpr std::array<Runs, kNumDTypes> kMulWideRuns = {kMulWide<float>, kMulWide<double>, kMulWide<Half>,
                                                       kMulWide<BFloat16>};

constexpr ElementwiseOp kRatioOps[] = {
    {"mul_wide", kFloatingDTypes, 2, kMulWideRuns.data()},
    op_of<Scaled, 3>("scaled_ratio", kFloatingDTypes),
    op_of<Div, 3>("div_backward", kFloatingDTypes),
    op_of<Ratio<HypotBackward>::Functor, 3>("hypot_backward", kFloatingDTypes),
    op_of<Ratio<Atan2Backward>::Functor, 3>("atan2_backward", kFloatingDTypes),
};

}  // namespace

const ElementwiseOp* ratio_ops() { return kRatioOps; }

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
namespace {

HWY_EXPORT(ratio_ops);
const ElementwiseOp* chosen_ratio_ops() { return HWY_DYNAMIC_DISPATCH(ratio_ops)(); }
const RegisterFamily<chosen_ratio_ops> ratio_kernels(HWY_STATIC_DISPATCH(kRatioOps));

}  // namespace
}  // namespace halfstep::cpu
#endif  // HWY_ONCE
