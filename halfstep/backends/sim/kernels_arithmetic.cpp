// SPDX-License-Identifier: Apache-2.0
// Elementwise arithmetic and relu. 16-bit floats compute in float32 and are rounded once; integers wrap around.
#include "walk.h"

namespace sim {
namespace {

template <class C>
using Unsigned =
    typename std::conditional_t<std::is_same_v<C, bool>, std::type_identity<unsigned>, std::make_unsigned<C>>::type;

/// A number of the program's own.
template <class C>
C number(const halfstep_scalar& value) {
  if constexpr (std::is_same_v<C, bool>) {
    return value.kind == 2 ? value.floating != 0 : value.integer != 0;
  } else if constexpr (std::is_integral_v<C>) {
    return value.kind == 2 ? convert<C>(value.floating) : convert<C>(value.integer);
  } else {
    return static_cast<C>(value.floating);
  }
}

template <class C>
struct AddScaled {
  C factor;
  C operator()(C a, C b) const {
    if constexpr (std::is_floating_point_v<C>) {
      // One rounding, also of the product.
      return std::fma(factor, b, a);
    } else {
      using U = Unsigned<C>;
      return static_cast<C>(U(a) + U(factor) * U(b));
    }
  }
};
template <class C>
struct Add {
  C operator()(C a, C b) const {
    if constexpr (std::is_floating_point_v<C>) {
      return a + b;
    } else {
      return static_cast<C>(Unsigned<C>(a) + Unsigned<C>(b));
    }
  }
};
template <class C>
struct Sub {
  C operator()(C a, C b) const {
    if constexpr (std::is_floating_point_v<C>) {
      return a - b;
    } else {
      return static_cast<C>(Unsigned<C>(a) - Unsigned<C>(b));
    }
  }
};
template <class C>
struct Mul {
  C operator()(C a, C b) const {
    if constexpr (std::is_floating_point_v<C>) {
      return a * b;
    } else {
      return static_cast<C>(Unsigned<C>(a) * Unsigned<C>(b));
    }
  }
};

// a + factor * b, with factor = sign * alpha.
template <int kSign>
std::string add(const Call& call) {
  const auto& attributes = call.attributes<halfstep_alpha_attributes>();
  with_type(call.out[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    if constexpr (!std::is_same_v<T, Float8E4M3> && !std::is_same_v<T, Float8E5M2>) {
      C alpha;
      if constexpr (std::is_same_v<C, bool>) {
        alpha = attributes.integer_alpha != 0;
      } else if constexpr (std::is_integral_v<C>) {
        const auto product = static_cast<uint64_t>(kSign) * static_cast<uint64_t>(attributes.integer_alpha);
        alpha = static_cast<C>(product);
      } else {
        alpha = static_cast<C>(kSign * attributes.alpha);
      }
      if (alpha == C(1)) {
        map<T>(call.out[0], call.in[0], call.in[1], Add<C>{});
      } else if (!std::is_same_v<C, bool> && alpha == static_cast<C>(-1)) {
        map<T>(call.out[0], call.in[0], call.in[1], Sub<C>{});
      } else {
        map<T>(call.out[0], call.in[0], call.in[1], AddScaled<C>{alpha});
      }
    }
  });
  return {};
}

std::string mul(const Call& call) {
  with_type(call.out[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_same_v<T, Float8E4M3> && !std::is_same_v<T, Float8E5M2>) {
      map<T>(call.out[0], call.in[0], call.in[1], Mul<Compute<T>>{});
    }
  });
  return {};
}

std::string div(const Call& call) {
  with_floating(call.out[0].dtype, [&](auto zero) {
    map<decltype(zero)>(call.out[0], call.in[0], call.in[1], [](auto a, auto b) { return a / b; });
  });
  return {};
}

/// With one number: `F` is called as f(x, number).
template <class F>
std::string with_number(const Call& call, F f) {
  const halfstep_scalar& value = call.attributes<halfstep_scalar_attributes>().value;
  with_type(call.out[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_same_v<T, Float8E4M3> && !std::is_same_v<T, Float8E5M2>) {
      using C = Compute<T>;
      const C v = number<C>(value);
      map<T, T>(call.out[0], call.in[0], [&](C x) { return f(x, v); });
    }
  });
  return {};
}
std::string add_scalar(const Call& call) {
  return with_number(call, [](auto x, auto v) { return Add<decltype(x)>{}(x, v); });
}
std::string mul_scalar(const Call& call) {
  return with_number(call, [](auto x, auto v) { return Mul<decltype(x)>{}(x, v); });
}
std::string div_scalar(const Call& call) {
  const double value = call.attributes<halfstep_scalar_attributes>().value.floating;
  with_floating(call.out[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto v = static_cast<Compute<T>>(value);
    map<T, T>(call.out[0], call.in[0], [v](auto x) { return x / v; });
  });
  return {};
}

std::string neg(const Call& call) {
  with_type(call.out[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    if constexpr (std::is_floating_point_v<C>) {
      map<T, T>(call.out[0], call.in[0], [](C x) { return -x; });
    } else {
      map<T, T>(call.out[0], call.in[0],
                [](C x) { return static_cast<C>(Unsigned<C>(0) - static_cast<Unsigned<C>>(x)); });
    }
  });
  return {};
}

// Of flags; other dtypes are for the CPU.
std::string logical_not(const Call& call) {
  map<Bool, Bool>(call.out[0], call.in[0], [](bool x) { return !x; });
  return {};
}

// NaN stays: it is not "at most zero".
std::string relu(const Call& call) {
  with_type(call.out[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    map<T, T>(call.out[0], call.in[0], [](C x) { return x <= C(0) ? C(0) : x; });
  });
  return {};
}
// Inputs: the gradient, relu's output.
std::string relu_backward(const Call& call) {
  with_floating(call.out[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    map<T>(call.out[0], call.in[0], call.in[1], [](C g, C y) { return y <= C(0) ? C(0) : g; });
  });
  return {};
}

constexpr uint32_t kStrided = HALFSTEP_LAYOUT_STRIDED;
constexpr uint32_t kAlpha = sizeof(halfstep_alpha_attributes), kScalar = sizeof(halfstep_scalar_attributes);
constexpr KernelDef kAdd{
    .op = "add", .dtypes = kComputed, .layouts = kStrided, .attribute_bytes = kAlpha, .run = add<1>};
constexpr KernelDef kSub{
    .op = "sub", .dtypes = kNumeric, .layouts = kStrided, .attribute_bytes = kAlpha, .run = add<-1>};
constexpr KernelDef kMul{.op = "mul", .dtypes = kComputed, .layouts = kStrided, .attribute_bytes = 0, .run = mul};
constexpr KernelDef kDiv{.op = "div", .dtypes = kFloating, .layouts = kStrided, .attribute_bytes = 0, .run = div};
constexpr KernelDef kNeg{.op = "neg", .dtypes = kNumeric, .layouts = kStrided, .attribute_bytes = 0, .run = neg};
constexpr KernelDef kAddScalar{
    .op = "add_scalar", .dtypes = kComputed, .layouts = kStrided, .attribute_bytes = kScalar, .run = add_scalar};
constexpr KernelDef kMulScalar{
    .op = "mul_scalar", .dtypes = kComputed, .layouts = kStrided, .attribute_bytes = kScalar, .run = mul_scalar};
constexpr KernelDef kDivScalar{
    .op = "div_scalar", .dtypes = kFloating, .layouts = kStrided, .attribute_bytes = kScalar, .run = div_scalar};
constexpr KernelDef kLogicalNot{.op = "logical_not",
                                .dtypes = dtypes({HALFSTEP_BOOL}),
                                .layouts = kStrided,
                                .attribute_bytes = 0,
                                .run = logical_not};
constexpr KernelDef kRelu{.op = "relu",
                          .dtypes = kNumeric & ~dtypes({HALFSTEP_BF16}),
                          .layouts = kStrided,
                          .attribute_bytes = 0,
                          .run = relu,
                          .missing = "the activation unit takes no bf16"};
constexpr KernelDef kReluBackward{
    .op = "relu_backward", .dtypes = kFloating, .layouts = kStrided, .attribute_bytes = 0, .run = relu_backward};

}  // namespace

std::span<const Kernel> arithmetic_kernels() {
  static constexpr Kernel kKernels[] = {kernel<kAdd>,       kernel<kSub>,         kernel<kMul>,
                                        kernel<kDiv>,       kernel<kNeg>,         kernel<kAddScalar>,
                                        kernel<kMulScalar>, kernel<kDivScalar>,   kernel<kLogicalNot>,
                                        kernel<kRelu>,      kernel<kReluBackward>};
  return kKernels;
}

}  // namespace sim
