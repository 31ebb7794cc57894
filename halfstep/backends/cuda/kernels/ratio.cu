// SPDX-License-Identifier: Apache-2.0
// Products and quotients whose parts leave the range of what they are computed in, and gradients made of such.
#include "device/elementwise.cuh"
#include "device/math.cuh"

namespace hscuda {
namespace {

enum class Ratio { kScaledRatio, kDivBackward, kHypotBackward, kAtan2Backward };

/// x times a factor that may be out of its range.
template <class C>
struct MulWide {
  __device__ __forceinline__ C operator()(C x, double factor) const {
    if constexpr (std::is_same_v<C, float>) {
      const auto narrow = static_cast<float>(factor);
      if (math::is_normal(narrow) || factor == 0) return x * narrow;
    }
    return static_cast<C>(static_cast<double>(x) * factor);
  }
};
template <class C>
[[gnu::noinline]] __device__ C dear(Ratio f, C g, C a, C b) {
  switch (f) {
    case Ratio::kScaledRatio:
      return math::scaled_ratio(g, a, b);
    case Ratio::kDivBackward:
      return math::div_backward(g, a, b);
    case Ratio::kHypotBackward:
      return math::hypot_backward(g, a, b);
    default:
      return math::atan2_backward(g, a, b);
  }
}
template <class C>
struct Dear3 {
  Ratio f;
  __device__ __forceinline__ C operator()(C g, C a, C b) const { return dear(f, g, a, b); }
};

halfstep_status mul_wide(Call& call) {
  with_floating(call.in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    map<T, T, double>(call, MulWide<Compute<T>>{}, call.out[0], call.in[0], call.in[1]);
  });
  return call.launched();
}

template <Ratio f>
halfstep_status run(Call& call) {
  with_floating(call.in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    map<T, T, T, T>(call, Dear3<Compute<T>>{f}, call.out[0], call.in[0], call.in[1], call.in[2]);
  });
  return call.launched();
}

constexpr KernelDef kernel(const char* op, halfstep_status (*run)(Call&)) {
  return {.op = op, .dtypes = kFloating, .layouts = kStrided, .attributes = false, .run = run};
}
constexpr KernelDef kKernels[] = {
    kernel("mul_wide", mul_wide),
    kernel("scaled_ratio", run<Ratio::kScaledRatio>),
    kernel("div_backward", run<Ratio::kDivBackward>),
    kernel("hypot_backward", run<Ratio::kHypotBackward>),
    kernel("atan2_backward", run<Ratio::kAtan2Backward>),
};

}  // namespace

std::span<const KernelDef> ratio_kernels() { return kKernels; }

}  // namespace hscuda
