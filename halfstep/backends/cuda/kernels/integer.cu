// SPDX-License-Identifier: Apache-2.0
// Arithmetic of integers, which wraps around, and of flags.
#include "device/elementwise.cuh"
#include "device/fault.cuh"
#include "device/math.cuh"

namespace hscuda {
namespace {

enum class I1 { kNeg, kAddScalar, kMulScalar, kRelu, kAbs, kSquare, kSame, kSign, kClamp, kPowScalar, kScalarPow };
enum class I2 { kAdd, kMul, kMaximum, kMinimum, kFmod, kRemainder, kFloorDivide, kPow };

/// What C wraps around in.
template <class C>
struct Wrapping : std::make_unsigned<C> {};
template <>
struct Wrapping<bool> : std::type_identity<unsigned> {};
template <class C>
using Unsigned = typename Wrapping<C>::type;

template <class C>
__device__ __forceinline__ bool negative(C x) {
  if constexpr (std::is_signed_v<C>) return x < 0;
  return false;
}

// What takes a hundred instructions is called, not repeated for each element of a pack.
template <class C>
[[gnu::noinline]] __device__ C power(C a, C b) {
  return math::integer_pow(a, b);
}

template <class C>
struct OneInteger {
  I1 f;
  C a, b;
  __device__ __forceinline__ C operator()(C x) const {
    using U = Unsigned<C>;
    switch (f) {
      case I1::kNeg:
        return static_cast<C>(U{0} - U(x));
      case I1::kAddScalar:
        return static_cast<C>(U(x) + U(a));
      case I1::kMulScalar:
        return static_cast<C>(U(x) * U(a));
      case I1::kRelu:
        return x > 0 ? x : C{0};
      case I1::kAbs:
        return negative(x) ? static_cast<C>(U{0} - U(x)) : x;
      case I1::kSquare:
        return static_cast<C>(U(x) * U(x));
      case I1::kSame:
        return x;
      case I1::kSign:
        return negative(x) ? static_cast<C>(-1) : static_cast<C>(x != 0);
      case I1::kClamp:
        return x < a ? (a < b ? a : b) : x > b ? b : x;
      case I1::kPowScalar:
        return power(x, a);
      default:
        return power(a, x);
    }
  }
};

/// The quotient cut towards zero, and the rest; the smallest number by -1 wraps around as its negation does.
template <class C>
struct Quotient {
  C quotient, rest;
};
template <class C>
__device__ __forceinline__ Quotient<C> divide(C a, C b) {
  if constexpr (std::is_signed_v<C>) {
    if (b == -1) return {static_cast<C>(Unsigned<C>{0} - Unsigned<C>(a)), C{0}};
  }
  return {static_cast<C>(a / b), static_cast<C>(a % b)};
}

template <class C>
[[gnu::noinline]] __device__ C dear(I2 f, C a, C b) {
  const auto [quotient, rest] = divide(a, b);
  const bool differ = rest != 0 && negative(rest) != negative(b);
  if (f == I2::kFmod) return rest;
  if (f == I2::kRemainder) return differ ? static_cast<C>(rest + b) : rest;
  return differ ? static_cast<C>(quotient - 1) : quotient;
}

template <class C>
struct TwoIntegers {
  I2 f;
  C alpha;
  Fault* fault;
  unsigned long long call;
  __device__ __forceinline__ C operator()(C a, C b) const {
    using U = Unsigned<C>;
    switch (f) {
      case I2::kAdd:
        return static_cast<C>(U(a) + U(alpha) * U(b));
      case I2::kMul:
        return static_cast<C>(U(a) * U(b));
      case I2::kMaximum:
        return a > b ? a : b;
      case I2::kMinimum:
        return a < b ? a : b;
      default:
        if constexpr (!std::is_same_v<C, bool>) {
          if (f == I2::kPow) return power(a, b);
          if (b != 0) return dear(f, a, b);
          report(fault, call, kDivisionByZero);
        }
        return C{0};
    }
  }
};

/// x + value a b.
template <class C>
struct AddProduct {
  C value;
  __device__ __forceinline__ C operator()(C x, C a, C b) const {
    using U = Unsigned<C>;
    return static_cast<C>(U(x) + U(value) * U(a) * U(b));
  }
};

/// Calls f(zero) for integers and flags.
template <class F>
void with_integer(int dtype, F&& f) {
  with_computed(dtype, [&](auto zero) {
    if constexpr (std::is_integral_v<Compute<decltype(zero)>>) f(zero);
  });
}

template <I1 f>
halfstep_status one(Call& call) {
  with_integer(call.in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    OneInteger<C> function{f, C{0}, C{0}};
    if constexpr (f == I1::kClamp) {
      // Bounds beyond the dtype don't bind; a conversion would wrap around.
      using Limits = std::numeric_limits<C>;
      const auto& a = call.attributes<halfstep_clamp_attributes>();
      const auto bound = [](int64_t v) {
        return static_cast<C>(std::clamp(v, static_cast<int64_t>(Limits::min()), static_cast<int64_t>(Limits::max())));
      };
      function.a = bound(a.integer_min), function.b = bound(a.integer_max);
    } else if constexpr (f == I1::kAddScalar || f == I1::kMulScalar || f == I1::kPowScalar || f == I1::kScalarPow) {
      function.a = number<C>(call.attributes<halfstep_scalar_attributes>().value);
    }
    map<T, T>(call, function, call.out[0], call.in[0]);
  });
  return call.launched();
}
template <I2 f, bool subtract = false>
halfstep_status two(Call& call) {
  with_integer(call.in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    TwoIntegers<C> function{f, C{0}, call.fault(), call.number()};
    if constexpr (f == I2::kAdd) {
      const auto alpha = static_cast<uint64_t>(call.attributes<halfstep_alpha_attributes>().integer_alpha);
      function.alpha = static_cast<C>(subtract ? uint64_t{0} - alpha : alpha);
    }
    map<T, T, T>(call, function, call.out[0], call.in[0], call.in[1]);
  });
  return call.launched();
}
halfstep_status addcmul(Call& call) {
  with_integer(call.in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    const AddProduct<C> f{number<C>(call.attributes<halfstep_scalar_attributes>().value)};
    map<T, T, T, T>(call, f, call.out[0], call.in[0], call.in[1], call.in[2]);
  });
  return call.launched();
}

constexpr KernelDef kernel(const char* op, uint32_t dtypes, bool attributes, halfstep_status (*run)(Call&)) {
  return {.op = op, .dtypes = dtypes, .layouts = kStrided, .attributes = attributes, .run = run};
}
constexpr uint32_t kFlagsToo = kIntegers | kFlag;
constexpr KernelDef kKernels[] = {
    kernel("add", kFlagsToo, true, two<I2::kAdd>),
    kernel("sub", kIntegers, true, two<I2::kAdd, true>),
    kernel("mul", kFlagsToo, false, two<I2::kMul>),
    kernel("maximum", kFlagsToo, false, two<I2::kMaximum>),
    kernel("minimum", kFlagsToo, false, two<I2::kMinimum>),
    kernel("fmod", kIntegers, false, two<I2::kFmod>),
    kernel("remainder", kIntegers, false, two<I2::kRemainder>),
    kernel("floor_divide", kIntegers, false, two<I2::kFloorDivide>),
    kernel("pow", kIntegers, false, two<I2::kPow>),
    kernel("neg", kIntegers, false, one<I1::kNeg>),
    kernel("add_scalar", kFlagsToo, true, one<I1::kAddScalar>),
    kernel("mul_scalar", kFlagsToo, true, one<I1::kMulScalar>),
    kernel("relu", kIntegers, false, one<I1::kRelu>),
    kernel("abs", kIntegers, false, one<I1::kAbs>),
    kernel("square", kIntegers, false, one<I1::kSquare>),
    kernel("floor", kIntegers, false, one<I1::kSame>),
    kernel("ceil", kIntegers, false, one<I1::kSame>),
    kernel("round", kIntegers, false, one<I1::kSame>),
    kernel("trunc", kIntegers, false, one<I1::kSame>),
    kernel("sign", kFlagsToo, false, one<I1::kSign>),
    kernel("clamp", kIntegers, true, one<I1::kClamp>),
    kernel("pow_scalar", kFlagsToo, true, one<I1::kPowScalar>),
    kernel("scalar_pow", kFlagsToo, true, one<I1::kScalarPow>),
    kernel("addcmul", kIntegers, true, addcmul),
};

}  // namespace

std::span<const KernelDef> integer_kernels() { return kKernels; }

}  // namespace hscuda
