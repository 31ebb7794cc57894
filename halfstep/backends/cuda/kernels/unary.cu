// SPDX-License-Identifier: Apache-2.0
// Functions of one floating tensor that no network spends its time in. Kernels are few: the cheap functions of a dtype
// share one that chooses between them for each element, the dear ones share one that calls a function which chooses.
#include "device/elementwise.cuh"
#include "device/math.cuh"
#include "kernels/numbers.cuh"

namespace hscuda {
namespace {

enum class F1 {
  // cheap
  kAbs,
  kSquare,
  kLeakyRelu,
  kThreshold,
  kClamp,
  kHardswish,
  kHardsigmoid,
  kSign,
  kFloor,
  kCeil,
  kRound,
  kTrunc,
  kNanToNum,
  kSqrt,
  kRsqrt,
  // dear
  kExp,
  kExp2,
  kExpm1,
  kLog,
  kLog2,
  kLog10,
  kLog1p,
  kSin,
  kCos,
  kTan,
  kAsin,
  kAcos,
  kAtan,
  kSinh,
  kCosh,
  kAsinh,
  kAcosh,
  kAtanh,
  kErf,
  kErfc,
  kErfinv,
  kMish,
  kLogsigmoid,
  kElu,
  kSoftplus,
  kPowScalar,
  kScalarPow,
  kSignedPow
};
/// A function of double for a C: CUDA's float form errs by more than two units.
#define HSCUDA_IN_DOUBLE(f) static_cast<C>(f(static_cast<double>(x)))

template <class C>
struct Cheap1 {
  F1 f;
  Numbers<C> n;
  __device__ __forceinline__ C operator()(C x) const {
    switch (f) {
      case F1::kAbs:
        return std::fabs(x);
      case F1::kSquare:
        return x * x;
      case F1::kLeakyRelu:
        return x > 0 ? x : x * n.a;
      case F1::kThreshold:
        return x <= n.a ? n.b : x;
      case F1::kClamp: {
        // A NaN stays, and a bound that is one makes all elements NaN.
        const C raised = x >= n.a || x != x ? x : n.a;
        return raised <= n.b || raised != raised ? raised : n.b;
      }
      case F1::kHardswish:
        return x <= -3 ? C{0} : x >= 3 ? x : x * (x + C{3}) / C{6};
      case F1::kHardsigmoid:
        return x <= -3 ? C{0} : x >= 3 ? C{1} : (x + C{3}) / C{6};
      case F1::kSign:
        return x > 0 ? C{1} : x < 0 ? C{-1} : C{0};
      case F1::kFloor:
        return std::floor(x);
      case F1::kCeil:
        return std::ceil(x);
      case F1::kRound:
        return std::rint(x);
      case F1::kTrunc:
        return std::trunc(x);
      case F1::kNanToNum:
        if (x != x) return n.a;
        return std::fabs(x) <= std::numeric_limits<C>::max() ? x : x > 0 ? n.b : n.c;
      case F1::kSqrt:
        return std::sqrt(x);
      default:
        return C{1} / std::sqrt(x);
    }
  }
};

template <class C>
[[gnu::noinline]] __device__ C dear(F1 f, C x, C a, C b) {
  switch (f) {
    case F1::kExp:
      return math::exp(x);
    case F1::kExp2:
      return std::exp2(x);
    case F1::kExpm1:
      return std::expm1(x);
    case F1::kLog:
      return std::log(x);
    case F1::kLog2:
      return std::log2(x);
    case F1::kLog10:
      return std::log10(x);
    case F1::kLog1p:
      return std::log1p(x);
    case F1::kSin:
      return std::sin(x);
    case F1::kCos:
      return std::cos(x);
    case F1::kTan:
      return HSCUDA_IN_DOUBLE(std::tan);
    case F1::kAsin:
      return std::asin(x);
    case F1::kAcos:
      return std::acos(x);
    case F1::kAtan:
      return std::atan(x);
    case F1::kSinh:
      return HSCUDA_IN_DOUBLE(std::sinh);
    case F1::kCosh:
      return HSCUDA_IN_DOUBLE(std::cosh);
    case F1::kAsinh:
      return HSCUDA_IN_DOUBLE(std::asinh);
    case F1::kAcosh:
      return HSCUDA_IN_DOUBLE(std::acosh);
    case F1::kAtanh:
      return HSCUDA_IN_DOUBLE(std::atanh);
    case F1::kErf:
      return HSCUDA_IN_DOUBLE(std::erf);
    case F1::kErfc:
      return HSCUDA_IN_DOUBLE(std::erfc);
    case F1::kErfinv:
      return HSCUDA_IN_DOUBLE(math::inverse_erf);
    case F1::kMish:
      return math::vanishing_product(x, math::tanh_softplus(x));
    case F1::kLogsigmoid:
      return (x > 0 ? C{0} : x) - std::log1p(std::exp(-std::fabs(x)));
    case F1::kElu:  // a: alpha times scale, b: scale
      return x > 0 ? x * b : std::expm1(x) * a;
    case F1::kSoftplus: {  // a: beta, b: threshold
      const C scaled = x * a;
      const C y = (scaled < 0 ? C{0} : scaled) + std::log1p(std::exp(-std::fabs(scaled)));
      return scaled > b ? x : y / a;
    }
    case F1::kPowScalar:
      // The exponents of formulas, each in at most two roundings.
      if (a == C{2}) return x * x;
      if (a == C{1}) return x;
      if (a == C{0.5}) return std::sqrt(x);
      if (a == C{3}) return x * x * x;
      if (a == C{-1}) return C{1} / x;
      if (a == C{-0.5}) return C{1} / std::sqrt(x);
      if (a == C{-2}) return C{1} / x / x;
      return std::pow(x, a);
    case F1::kScalarPow:
      return std::pow(a, x);
    default: {  // kSignedPow
      const C magnitude = a == 0 ? (x != x ? x : C{1}) : std::pow(std::fabs(x), a);
      return x == 0 ? C{0} : std::copysign(magnitude, x);
    }
  }
}
template <class C>
struct Dear1 {
  F1 f;
  Numbers<C> n;
  __device__ __forceinline__ C operator()(C x) const { return dear(f, x, n.a, n.b); }
};
#undef HSCUDA_IN_DOUBLE

void run_one(Call& call, F1 f, Has has) {
  with_floating(call.in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    const auto n = numbers<C>(call, has);
    if (f < F1::kExp) {
      map<T, T>(call, Cheap1<C>{f, n}, call.out[0], call.in[0]);
    } else {
      map<T, T>(call, Dear1<C>{f, n}, call.out[0], call.in[0]);
    }
  });
}
template <auto f, Has has>
halfstep_status run(Call& call) {
  run_one(call, f, has);
  return call.launched();
}
template <auto f, Has has = Has::kNothing>
constexpr KernelDef kernel(const char* op) {
  return {.op = op, .dtypes = kFloating, .layouts = kStrided, .attributes = has != Has::kNothing, .run = run<f, has>};
}
constexpr KernelDef kKernels[] = {
    kernel<F1::kAbs>("abs"),
    kernel<F1::kSquare>("square"),
    kernel<F1::kLeakyRelu, Has::kActivation>("leaky_relu"),
    kernel<F1::kThreshold, Has::kActivation>("threshold"),
    kernel<F1::kClamp, Has::kClamp>("clamp"),
    kernel<F1::kClamp, Has::kClamp>("hardtanh"),
    kernel<F1::kHardswish>("hardswish"),
    kernel<F1::kHardsigmoid>("hardsigmoid"),
    kernel<F1::kSign>("sign"),
    kernel<F1::kFloor>("floor"),
    kernel<F1::kCeil>("ceil"),
    kernel<F1::kRound>("round"),
    kernel<F1::kTrunc>("trunc"),
    kernel<F1::kNanToNum, Has::kNanToNum>("nan_to_num"),
    kernel<F1::kSqrt>("sqrt"),
    kernel<F1::kRsqrt>("rsqrt"),
    kernel<F1::kExp>("exp"),
    kernel<F1::kExp2>("exp2"),
    kernel<F1::kExpm1>("expm1"),
    kernel<F1::kLog>("log"),
    kernel<F1::kLog2>("log2"),
    kernel<F1::kLog10>("log10"),
    kernel<F1::kLog1p>("log1p"),
    kernel<F1::kSin>("sin"),
    kernel<F1::kCos>("cos"),
    kernel<F1::kTan>("tan"),
    kernel<F1::kAsin>("asin"),
    kernel<F1::kAcos>("acos"),
    kernel<F1::kAtan>("atan"),
    kernel<F1::kSinh>("sinh"),
    kernel<F1::kCosh>("cosh"),
    kernel<F1::kAsinh>("asinh"),
    kernel<F1::kAcosh>("acosh"),
    kernel<F1::kAtanh>("atanh"),
    kernel<F1::kErf>("erf"),
    kernel<F1::kErfc>("erfc"),
    kernel<F1::kErfinv>("erfinv"),
    kernel<F1::kMish>("mish"),
    kernel<F1::kLogsigmoid>("logsigmoid"),
    kernel<F1::kElu, Has::kElu>("elu"),
    kernel<F1::kSoftplus, Has::kActivation>("softplus"),
    kernel<F1::kPowScalar, Has::kScalar>("pow_scalar"),
    kernel<F1::kScalarPow, Has::kScalar>("scalar_pow"),
    kernel<F1::kSignedPow, Has::kScalar>("signed_pow"),
};

}  // namespace

std::span<const KernelDef> unary_kernels() { return kKernels; }

}  // namespace hscuda
