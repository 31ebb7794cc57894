// SPDX-License-Identifier: Apache-2.0
// Functions of two and three floating tensors. As in unary.cu, one kernel serves many of them.
#include "device/elementwise.cuh"
#include "device/math.cuh"
#include "kernels/numbers.cuh"

namespace hscuda {
namespace {

enum class F2 {
  // cheap
  kMaximum,
  kMinimum,
  kClampBackward,
  kHardtanhBackward,
  kLeakyReluBackward,
  kHardswishBackward,
  kPrelu,
  kDivOrZero,
  kLerpScalar,
  // dear
  kFmod,
  kRemainder,
  kFloorDivide,
  kPow,
  kAtan2,
  kHypot,
  kMishBackward,
  kLogsigmoidBackward,
  kEluBackward,
  kSoftplusBackward
};
enum class F3 { kLerp, kAddcmul, kAddcdiv };

template <class C>
struct Cheap2 {
  F2 f;
  Numbers<C> n;
  __device__ __forceinline__ C operator()(C a, C b) const {
    switch (f) {
      case F2::kMaximum:
        return a > b || a != a ? a : b;
      case F2::kMinimum:
        return a < b || a != a ? a : b;
      case F2::kClampBackward:
        // An infinite bound is none: what lies there was not clamped.
        return (b > n.a || b == -std::numeric_limits<C>::infinity()) && b >= n.a &&
                       (b < n.b || b == std::numeric_limits<C>::infinity()) && b <= n.b
                   ? a
                   : C{0};
      case F2::kHardtanhBackward:
        return b <= n.a || b >= n.b ? C{0} : a;  // NaN passes
      case F2::kLeakyReluBackward:
        return b > 0 ? a : a * n.a;
      case F2::kHardswishBackward:
        return b <= -3 ? C{0} : b < 3 ? a * (b / C{3} + C{0.5}) : a;
      case F2::kPrelu:
        return a > 0 ? a : a * b;
      case F2::kDivOrZero:
        return b == 0 ? C{0} : a / b;
      default:
        return math::interpolate(a, b, n.a);
    }
  }
};

template <class C>
[[gnu::noinline]] __device__ C dear(F2 f, C a, C b, C p, C q) {
  switch (f) {
    case F2::kFmod:
      return std::fmod(a, b);
    case F2::kRemainder:
      return math::floor_mod(a, b);
    case F2::kFloorDivide:
      return math::floor_div(a, b);
    case F2::kPow:
      return std::pow(a, b);
    case F2::kAtan2:
      return std::atan2(a, b);
    case F2::kHypot:
      return std::hypot(a, b);
    case F2::kMishBackward: {
      const C t = math::tanh_softplus(b);
      const C steep = math::sigmoid(b) * std::fma(-t, t, C{1});
      return a * (t + math::vanishing_product(b, steep));
    }
    case F2::kLogsigmoidBackward:
      return a * math::sigmoid(-b);
    case F2::kEluBackward:  // p: alpha times scale, q: scale
      return a * (b <= 0 ? std::exp(b) * p : q);
    default: {  // kSoftplusBackward; p: beta, q: threshold
      const C scaled = b * p;
      return scaled > q ? a : a * math::sigmoid(scaled);
    }
  }
}
template <class C>
struct Dear2 {
  F2 f;
  Numbers<C> n;
  __device__ __forceinline__ C operator()(C a, C b) const { return dear(f, a, b, n.a, n.b); }
};

template <class C>
struct Three {
  F3 f;
  C value;
  __device__ __forceinline__ C operator()(C x, C a, C b) const {
    switch (f) {
      case F3::kLerp:
        return math::interpolate(x, a, b);
      case F3::kAddcmul:
        return std::fma(value * a, b, x);
      default:
        return value * a / b + x;
    }
  }
};
void run_one(Call& call, F2 f, Has has) {
  with_floating(call.in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    const auto n = numbers<C>(call, has);
    if (f < F2::kFmod) {
      map<T, T, T>(call, Cheap2<C>{f, n}, call.out[0], call.in[0], call.in[1]);
    } else {
      map<T, T, T>(call, Dear2<C>{f, n}, call.out[0], call.in[0], call.in[1]);
    }
  });
}
void run_one(Call& call, F3 f, Has has) {
  with_floating(call.in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    map<T, T, T, T>(call, Three<C>{f, numbers<C>(call, has).a}, call.out[0], call.in[0], call.in[1], call.in[2]);
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
    kernel<F2::kMaximum>("maximum"),
    kernel<F2::kMinimum>("minimum"),
    kernel<F2::kClampBackward, Has::kClamp>("clamp_backward"),
    kernel<F2::kHardtanhBackward, Has::kClamp>("hardtanh_backward"),
    kernel<F2::kLeakyReluBackward, Has::kActivation>("leaky_relu_backward"),
    kernel<F2::kHardswishBackward>("hardswish_backward"),
    kernel<F2::kPrelu>("prelu"),
    kernel<F2::kDivOrZero>("div_or_zero"),
    kernel<F2::kLerpScalar, Has::kScalar>("lerp_scalar"),
    kernel<F2::kFmod>("fmod"),
    kernel<F2::kRemainder>("remainder"),
    kernel<F2::kFloorDivide>("floor_divide"),
    kernel<F2::kPow>("pow"),
    kernel<F2::kAtan2>("atan2"),
    kernel<F2::kHypot>("hypot"),
    kernel<F2::kMishBackward>("mish_backward"),
    kernel<F2::kLogsigmoidBackward>("logsigmoid_backward"),
    kernel<F2::kEluBackward, Has::kElu>("elu_backward"),
    kernel<F2::kSoftplusBackward, Has::kActivation>("softplus_backward"),
    kernel<F3::kLerp>("lerp"),
    kernel<F3::kAddcmul, Has::kScalar>("addcmul"),
    kernel<F3::kAddcdiv, Has::kScalar>("addcdiv"),
};

}  // namespace

std::span<const KernelDef> binary_kernels() { return kKernels; }

}  // namespace hscuda
