// SPDX-License-Identifier: Apache-2.0
// The four operations on floating tensors, and between a tensor and a number. One kernel serves several ops where the
// same instructions do; integers are in integer.cu.
#include "device/elementwise.cuh"
#include "device/math.cuh"

namespace hscuda {
namespace {

/// a + alpha b, rounded once.
template <class C>
struct AddScaled {
  C alpha;
  __device__ __forceinline__ C operator()(C a, C b) const { return std::fma(alpha, b, a); }
};
template <class C>
struct Multiply {
  __device__ __forceinline__ C operator()(C a, C b) const { return a * b; }
};
template <class C>
struct Divide {
  __device__ __forceinline__ C operator()(C a, C b) const { return a / b; }
};
/// x factor + term: a sum with a factor of 1, a product with a term of -0, which changes nothing, a zero's sign
/// neither.
template <class C>
struct Affine {
  C factor, term;
  __device__ __forceinline__ C operator()(C x) const { return std::fma(x, factor, term); }
};
/// x / value, or value / x.
template <class C>
struct DivideNumber {
  C value;
  bool turned;
  __device__ __forceinline__ C operator()(C x) const { return (turned ? value : x) / (turned ? x : value); }
};

template <bool subtract>
halfstep_status add(Call& call) {
  const double alpha = call.attributes<halfstep_alpha_attributes>().alpha;
  with_floating(call.in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    map<T, T, T>(call, AddScaled<C>{static_cast<C>(subtract ? -alpha : alpha)}, call.out[0], call.in[0], call.in[1]);
  });
  return call.launched();
}
template <template <class> class F>
halfstep_status binary(Call& call) {
  with_floating(call.in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    map<T, T, T>(call, F<Compute<T>>{}, call.out[0], call.in[0], call.in[1]);
  });
  return call.launched();
}

enum class With { kSum, kProduct, kNegative };
template <With what>
halfstep_status affine(Call& call) {
  with_floating(call.in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    Affine<C> f{C{-1}, -C{0}};
    if constexpr (what != With::kNegative) {
      const C value = number<C>(call.attributes<halfstep_scalar_attributes>().value);
      f = what == With::kSum ? Affine<C>{C{1}, value} : Affine<C>{value, -C{0}};
    }
    map<T, T>(call, f, call.out[0], call.in[0]);
  });
  return call.launched();
}
enum class Quotient { kByNumber, kOfNumber, kReciprocal };
template <Quotient what>
halfstep_status divide_number(Call& call) {
  with_floating(call.in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    C value = 1;
    if constexpr (what != Quotient::kReciprocal) {
      value = number<C>(call.attributes<halfstep_scalar_attributes>().value);
    }
    map<T, T>(call, DivideNumber<C>{value, what != Quotient::kByNumber}, call.out[0], call.in[0]);
  });
  return call.launched();
}

constexpr KernelDef kernel(const char* op, bool attributes, halfstep_status (*run)(Call&)) {
  return {.op = op, .dtypes = kFloating, .layouts = kStrided, .attributes = attributes, .run = run};
}
constexpr KernelDef kKernels[] = {
    kernel("add", true, add<false>),
    kernel("sub", true, add<true>),
    kernel("mul", false, binary<Multiply>),
    kernel("div", false, binary<Divide>),
    kernel("neg", false, affine<With::kNegative>),
    kernel("add_scalar", true, affine<With::kSum>),
    kernel("mul_scalar", true, affine<With::kProduct>),
    kernel("div_scalar", true, divide_number<Quotient::kByNumber>),
    kernel("rdiv_scalar", true, divide_number<Quotient::kOfNumber>),
    kernel("reciprocal", false, divide_number<Quotient::kReciprocal>),
};

}  // namespace

std::span<const KernelDef> arithmetic_kernels() { return kKernels; }

}  // namespace hscuda
