// SPDX-License-Identifier: Apache-2.0
// Activations that networks spend their time in, and their gradients, each a kernel of its own. The others are in
// unary.cu.
#include "device/elementwise.cuh"
#include "device/math.cuh"

namespace hscuda {
namespace {

// T is the element type; results of 16 bits take the cheaper forms.

template <class T>
struct Relu {
  using C = Compute<T>;
  __device__ __forceinline__ C operator()(C x) const { return x <= 0 ? C{0} : x; }
};
template <class T>
struct ReluBackward {
  using C = Compute<T>;
  __device__ __forceinline__ C operator()(C g, C y) const { return y <= 0 ? C{0} : g; }
};

template <class T>
__device__ __forceinline__ Compute<T> sigmoid_of(Compute<T> x) {
  if constexpr (kSixteenBits<T>) {
    return math::quick_sigmoid(x);
  } else {
    return math::sigmoid(x);
  }
}
template <class T>
__device__ __forceinline__ Compute<T> times_sigmoid_of(Compute<T> f, Compute<T> x) {
  if constexpr (kSixteenBits<T>) {
    return math::quick_times_sigmoid(f, x);
  } else {
    return math::times_sigmoid(f, x);
  }
}

/// sigmoid(x) sigmoid(-x), its slope, as well.
template <class C>
struct WithSlope {
  C value, slope;
};
template <class T>
__device__ __forceinline__ WithSlope<Compute<T>> sigmoid_with_slope(Compute<T> x) {
  if constexpr (kSixteenBits<T>) {
    const float z = std::exp(-std::fabs(x));
    const float inverse = math::reciprocal(1.0f + z), other = z * inverse;
    return {x < 0 ? other : inverse, inverse * other};
  } else {
    const auto s = math::sigmoid(x);
    return {s, s * math::sigmoid(-x)};
  }
}

template <class T>
struct Sigmoid {
  using C = Compute<T>;
  __device__ __forceinline__ C operator()(C x) const { return sigmoid_of<T>(x); }
};
template <class T>
struct SigmoidBackward {
  using C = Compute<T>;
  __device__ __forceinline__ C operator()(C g, C y) const { return g * (y * (C{1} - y)); }
};
template <class T>
struct Tanh {
  using C = Compute<T>;
  __device__ __forceinline__ C operator()(C x) const {
    if constexpr (kSixteenBits<T>) {
      return math::quick_tanh(x);
    } else {
      return math::tanh(x);
    }
  }
};
template <class T>
struct TanhBackward {
  using C = Compute<T>;
  __device__ __forceinline__ C operator()(C g, C y) const { return g * std::fma(-y, y, C{1}); }
};
template <class T>
struct Silu {
  using C = Compute<T>;
  __device__ __forceinline__ C operator()(C x) const { return times_sigmoid_of<T>(x, x); }
};
template <class T>
struct SiluBackward {
  using C = Compute<T>;
  __device__ __forceinline__ C operator()(C g, C x) const {
    const WithSlope<C> s = sigmoid_with_slope<T>(x);
    return g * (s.value + math::vanishing_product(x, s.slope));
  }
};
template <class T>
struct Gelu {
  using C = Compute<T>;
  __device__ __forceinline__ C operator()(C x) const {
    if constexpr (kSixteenBits<T>) {
      return math::quick_gelu(x);
    } else {
      return math::gelu(x);
    }
  }
};
template <class T>
struct GeluBackward {
  using C = Compute<T>;
  __device__ __forceinline__ C operator()(C g, C x) const {
    math::NormalParts<C> parts;
    if constexpr (kSixteenBits<T>) {
      parts = math::quick_normal_parts(x);
    } else {
      parts = math::normal_parts(x);
    }
    return g * (parts.phi + math::vanishing_product(x, parts.bell) * static_cast<C>(0.39894228040143267794));
  }
};
// 0.5 x (1 + tanh(u)) is x sigmoid(2 u): nothing cancels. u = sqrt(2 / pi) (x + 0.044715 x^3).
inline constexpr double kTwice = 1.59576912160573071176, kCubic = 0.044715;
template <class C>
__device__ __forceinline__ C twice_inner(C x) {
  return (x * static_cast<C>(kTwice)) * std::fma(x * x, static_cast<C>(kCubic), C{1});
}
template <class T>
struct GeluTanh {
  using C = Compute<T>;
  __device__ __forceinline__ C operator()(C x) const { return times_sigmoid_of<T>(x, twice_inner(x)); }
};
template <class T>
struct GeluTanhBackward {
  using C = Compute<T>;
  __device__ __forceinline__ C operator()(C g, C x) const {
    // s + x s (1 - s) (2 u)'
    const WithSlope<C> s = sigmoid_with_slope<T>(twice_inner(x));
    const C slope = std::fma(x * x, static_cast<C>(3 * kCubic * kTwice), static_cast<C>(kTwice));
    return g * (s.value + math::vanishing_product(x * slope, s.slope));
  }
};

template <template <class> class F>
halfstep_status unary(Call& call) {
  with_floating(call.in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    map<T, T>(call, F<T>{}, call.out[0], call.in[0]);
  });
  return call.launched();
}
template <template <class> class F>
halfstep_status binary(Call& call) {
  with_floating(call.in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    map<T, T, T>(call, F<T>{}, call.out[0], call.in[0], call.in[1]);
  });
  return call.launched();
}

constexpr KernelDef kernel(const char* op, halfstep_status (*run)(Call&)) {
  return {.op = op, .dtypes = kFloating, .layouts = kStrided, .attributes = false, .run = run};
}
constexpr KernelDef kKernels[] = {
    kernel("relu", unary<Relu>),          kernel("relu_backward", binary<ReluBackward>),
    kernel("gelu", unary<Gelu>),          kernel("gelu_backward", binary<GeluBackward>),
    kernel("gelu_tanh", unary<GeluTanh>), kernel("gelu_tanh_backward", binary<GeluTanhBackward>),
    kernel("silu", unary<Silu>),          kernel("silu_backward", binary<SiluBackward>),
    kernel("sigmoid", unary<Sigmoid>),    kernel("sigmoid_backward", binary<SigmoidBackward>),
    kernel("tanh", unary<Tanh>),          kernel("tanh_backward", binary<TanhBackward>),
};

}  // namespace

std::span<const KernelDef> activation_kernels() { return kKernels; }

}  // namespace hscuda
