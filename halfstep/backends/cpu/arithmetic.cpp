// SPDX-License-Identifier: Apache-2.0
// The four operations, between tensors and with a number. 16-bit types compute in float32 and are rounded once.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/arithmetic.cpp"
#include <hwy/foreach_target.h>

#include "halfstep/backends/cpu/runs-inl.h"

#ifndef HALFSTEP_BACKENDS_CPU_ARITHMETIC_OPS_
#define HALFSTEP_BACKENDS_CPU_ARITHMETIC_OPS_
namespace halfstep::cpu {
enum class ArithmeticOp { add, sub, mul, div, neg, add_scalar, mul_scalar, div_scalar, rdiv_scalar };
}  // namespace halfstep::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

template <class C>
C alpha_of(const void* state) {
  const auto& a = *static_cast<const AlphaAttributes*>(state);
  if constexpr (std::is_integral_v<C>) {
    return convert<C>(a.integer_alpha);
  } else {
    return convert<C>(a.alpha);
  }
}

// Integers wrap around, as PyTorch's do.
template <class C>
struct Add : NumericFunctor {
  static constexpr bool kBool = true;
  C alpha;
  explicit Add(const void* state) : alpha(alpha_of<C>(state)) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    return hn::MulAdd(hn::Set(d, alpha), b, a);
  }
  C scalar(C a, C b) const {
    using U = unsigned_t<C>;
    return static_cast<C>(U(a) + U(alpha) * U(b));
  }
};
template <class C>
struct Sub : NumericFunctor {
  C alpha;
  explicit Sub(const void* state) : alpha(alpha_of<C>(state)) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    return hn::NegMulAdd(hn::Set(d, alpha), b, a);
  }
  C scalar(C a, C b) const {
    using U = unsigned_t<C>;
    return static_cast<C>(U(a) - U(alpha) * U(b));
  }
};
template <class C>
struct Mul : NumericFunctor {
  static constexpr bool kBool = true;
  explicit Mul(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D, V a, V b) const {
    return hn::Mul(a, b);
  }
  C scalar(C a, C b) const { return static_cast<C>(unsigned_t<C>(a) * unsigned_t<C>(b)); }
};
template <class C>
struct Div : FloatingFunctor {
  explicit Div(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D, V a, V b) const {
    return hn::Div(a, b);
  }
};
template <class C>
struct Neg : NumericFunctor {
  explicit Neg(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D, V a) const {
    return hn::Neg(a);
  }
  C scalar(C a) const { return static_cast<C>(unsigned_t<C>(0) - unsigned_t<C>(a)); }
};

template <class C>
C value_of(const void* state) {
  return number<C>(static_cast<const ScalarAttributes*>(state)->value);
}
template <class C>
struct AddScalar : NumericFunctor {
  static constexpr bool kBool = true;
  C value;
  explicit AddScalar(const void* state) : value(value_of<C>(state)) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a) const {
    return hn::Add(a, hn::Set(d, value));
  }
  C scalar(C a) const { return static_cast<C>(unsigned_t<C>(a) + unsigned_t<C>(value)); }
};
template <class C>
struct MulScalar : NumericFunctor {
  static constexpr bool kBool = true;
  C value;
  explicit MulScalar(const void* state) : value(value_of<C>(state)) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a) const {
    return hn::Mul(a, hn::Set(d, value));
  }
  C scalar(C a) const { return static_cast<C>(unsigned_t<C>(a) * unsigned_t<C>(value)); }
};
template <class C>
struct DivScalar : FloatingFunctor {
  C value;
  explicit DivScalar(const void* state) : value(value_of<C>(state)) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a) const {
    return hn::Div(a, hn::Set(d, value));
  }
};
template <class C>
struct RdivScalar : FloatingFunctor {
  C value;
  explicit RdivScalar(const void* state) : value(value_of<C>(state)) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a) const {
    return hn::Div(hn::Set(d, value), a);
  }
};

}  // namespace

const Runs& arithmetic_runs(ArithmeticOp op, DType dtype) {
  switch (op) {
    case ArithmeticOp::add:
      return runs_of<Add, 2, true>(dtype);
    case ArithmeticOp::sub:
      return runs_of<Sub, 2, true>(dtype);
    case ArithmeticOp::mul:
      return runs_of<Mul, 2, true>(dtype);
    case ArithmeticOp::div:
      return runs_of<Div, 2, true>(dtype);
    case ArithmeticOp::neg:
      return runs_of<Neg, 1>(dtype);
    case ArithmeticOp::add_scalar:
      return runs_of<AddScalar, 1>(dtype);
    case ArithmeticOp::mul_scalar:
      return runs_of<MulScalar, 1>(dtype);
    case ArithmeticOp::div_scalar:
      return runs_of<DivScalar, 1>(dtype);
    case ArithmeticOp::rdiv_scalar:
      break;
  }
  return runs_of<RdivScalar, 1>(dtype);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
namespace {

HWY_EXPORT(arithmetic_runs);
const Runs& runs(ArithmeticOp op, DType dtype) { return HWY_DYNAMIC_DISPATCH(arithmetic_runs)(op, dtype); }
template <ArithmeticOp op, int N>
constexpr KernelFn kernel = elementwise_kernel<op, N, runs>;

const RegisterCpuKernel registered[] = {
    {"add", kComputeDTypes, kernel<ArithmeticOp::add, 2>},
    {"sub", kNumericDTypes, kernel<ArithmeticOp::sub, 2>},
    {"mul", kComputeDTypes, kernel<ArithmeticOp::mul, 2>},
    {"div", kFloatingDTypes, kernel<ArithmeticOp::div, 2>},
    {"neg", kNumericDTypes, kernel<ArithmeticOp::neg, 1>},
    {"add_scalar", kComputeDTypes, kernel<ArithmeticOp::add_scalar, 1>},
    {"mul_scalar", kComputeDTypes, kernel<ArithmeticOp::mul_scalar, 1>},
    {"div_scalar", kFloatingDTypes, kernel<ArithmeticOp::div_scalar, 1>},
    {"rdiv_scalar", kFloatingDTypes, kernel<ArithmeticOp::rdiv_scalar, 1>},
};

}  // namespace
}  // namespace halfstep::cpu
#endif  // HWY_ONCE
