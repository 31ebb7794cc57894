// SPDX-License-Identifier: Apache-2.0
// The four operations, between tensors and with a number. 16-bit types compute in float32 and are rounded once.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/arithmetic.cpp"
#include <hwy/foreach_target.h>

#include "halfstep/backends/cpu/runs-inl.h"

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

constexpr ElementwiseOp kArithmeticOps[] = {
    op_of<Add, 2, true>("add", kComputeDTypes),
    op_of<Sub, 2, true>("sub", kNumericDTypes),
    op_of<Mul, 2, true>("mul", kComputeDTypes),
    op_of<Div, 2, true>("div", kFloatingDTypes),
    op_of<Neg, 1>("neg", kNumericDTypes),
    op_of<AddScalar, 1>("add_scalar", kComputeDTypes),
    op_of<MulScalar, 1>("mul_scalar", kComputeDTypes),
    op_of<DivScalar, 1>("div_scalar", kFloatingDTypes),
    op_of<RdivScalar, 1>("rdiv_scalar", kFloatingDTypes),
};

}  // namespace

const ElementwiseOp* arithmetic_ops() { return kArithmeticOps; }

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
namespace {

HWY_EXPORT(arithmetic_ops);
const ElementwiseOp* chosen_arithmetic_ops() { return HWY_DYNAMIC_DISPATCH(arithmetic_ops)(); }
const RegisterFamily<chosen_arithmetic_ops> arithmetic_kernels(HWY_STATIC_DISPATCH(kArithmeticOps));

}  // namespace
}  // namespace halfstep::cpu
#endif  // HWY_ONCE
