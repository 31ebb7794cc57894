// SPDX-License-Identifier: Apache-2.0
// Activations and their gradients, each in one pass.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/activation.cpp"
#include <hwy/foreach_target.h>

#include "halfstep/backends/cpu/runs-inl.h"
#include "halfstep/backends/cpu/wide-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

template <class D, class V>
HWY_INLINE V value(D d, double x) {
  return hn::Set(d, static_cast<hn::TFromD<D>>(x));
}
/// x f where x is not -infinity (whose limit with a vanishing factor is 0, not NaN).
template <class D, class V>
HWY_INLINE V vanishing_product(D d, V x, V f) {
  const auto gone = hn::And(hn::Eq(f, hn::Zero(d)), hn::Eq(x, x));
  return hn::IfThenZeroElse(gone, hn::Mul(x, f));
}
template <class D, class V>
HWY_INLINE auto positive(D d, V x) {
  return hn::Gt(x, hn::Zero(d));
}

struct Parameters {
  double a, b;
  explicit Parameters(const void* state)
      : a(state ? static_cast<const ActivationAttributes*>(state)->a : 0),
        b(state ? static_cast<const ActivationAttributes*>(state)->b : 0) {}
};
struct Cheap : FloatingFunctor, Parameters {
  using Parameters::Parameters;
};
struct Heavy : HeavyFunctor, Parameters {
  using Parameters::Parameters;
};

// --- the functions; gradients take (grad, x), or (grad, y) where the result is enough

template <class C>
struct Relu : NumericFunctor {
  explicit Relu(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V x) const {
    return hn::IfThenZeroElse(hn::Le(x, hn::Zero(d)), x);
  }
  C scalar(C x) const { return x > 0 ? x : C{0}; }
};
template <class C>
struct ReluBackward : FloatingFunctor {
  explicit ReluBackward(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V g, V y) const {
    return hn::IfThenZeroElse(hn::Le(y, hn::Zero(d)), g);
  }
};
template <class C>
struct LeakyRelu : Cheap {
  using Cheap::Cheap;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V x) const {
    return hn::IfThenElse(positive(d, x), x, hn::Mul(x, value<D, V>(d, a)));
  }
};
template <class C>
struct LeakyReluBackward : Cheap {
  using Cheap::Cheap;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V g, V x) const {
    return hn::IfThenElse(positive(d, x), g, hn::Mul(g, value<D, V>(d, a)));
  }
};
template <class C>
struct Elu : Heavy {  // a: alpha, b: scale
  using Heavy::Heavy;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V x) const {
    const V low = hn::Mul(wide_expm1(d, x), value<D, V>(d, a * b));
    return hn::IfThenElse(positive(d, x), hn::Mul(x, value<D, V>(d, b)), low);
  }
};
template <class C>
struct EluBackward : Heavy {
  using Heavy::Heavy;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V g, V x) const {
    const V low = hn::Mul(wide_exp(d, x), value<D, V>(d, a * b));
    // At NaN the slope of the positive side, as PyTorch.
    return hn::Mul(g, hn::IfThenElse(hn::Le(x, hn::Zero(d)), low, value<D, V>(d, b)));
  }
};
template <class C>
struct Prelu : FloatingFunctor {
  explicit Prelu(const void*) {}
  template <class D, class V>
  HWY_INLINE V operator()(D d, V x, V w) const {
    return hn::IfThenElse(positive(d, x), x, hn::Mul(x, w));
  }
};
template <class C>
struct Gelu : Heavy {
  using Heavy::Heavy;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V x) const {
    return wide_gelu(d, x);
  }
};
template <class C>
struct GeluBackward : Heavy {
  using Heavy::Heavy;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V g, V x) const {
    return hn::Mul(g, wide_gelu_slope(d, x));
  }
};
template <class C>
struct GeluLow : Heavy {
  using Heavy::Heavy;
  HWY_INLINE F32Vec operator()(F32Tag, F32Vec x) const { return gelu_low(x); }
};
// 0.5 x (1 + tanh(u)) is x sigmoid(2 u): nothing cancels. u = sqrt(2 / pi) (x + 0.044715 x^3).
template <class D, class V>
HWY_INLINE V twice_inner(D d, V x) {
  const V cubic = hn::MulAdd(hn::Mul(x, x), value<D, V>(d, 0.044715), value<D, V>(d, 1));
  return hn::Mul(hn::Mul(x, value<D, V>(d, 1.59576912160573071176)), cubic);
}
template <class C>
struct GeluTanh : Heavy {
  using Heavy::Heavy;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V x) const {
    return wide_times_sigmoid(d, x, twice_inner(d, x));
  }
};
template <class C>
struct GeluTanhBackward : Heavy {
  using Heavy::Heavy;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V g, V x) const {
    const V inner = twice_inner(d, x);
    const auto s = wide_sigmoid_pair(d, inner);
    const V slope = hn::MulAdd(hn::Mul(x, x), value<D, V>(d, 3 * 0.044715 * 1.59576912160573071176),
                               value<D, V>(d, 1.59576912160573071176));
    // s + x s (1 - s) (2 u)'
    const V both = vanishing_product(d, hn::Mul(x, slope), hn::Mul(s.up, s.down));
    return hn::Mul(g, hn::Add(s.up, both));
  }
};
template <class C>
struct Silu : Heavy {
  using Heavy::Heavy;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V x) const {
    return wide_times_sigmoid(d, x, x);
  }
};
template <class C>
struct SiluBackward : Heavy {
  using Heavy::Heavy;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V g, V x) const {
    return hn::Mul(g, wide_silu_slope(d, x));
  }
};
template <class C>
struct SiluLow : Heavy {
  using Heavy::Heavy;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V x) const {
    return wide_silu_low(d, x);
  }
};
// tanh(log(1 + e^x)): with z = e^-|x|, a quotient of polynomials in z.
template <class D, class V>
HWY_INLINE V tanh_softplus(D d, V x) {
  const V one = value<D, V>(d, 1), two = value<D, V>(d, 2);
  const V z = wide_exp(d, hn::Neg(hn::Abs(x)));
  const auto negative = hn::Lt(x, hn::Zero(d));
  // z (z + 2) / (z (z + 2) + 2), and (1 + 2 z) / (1 + 2 z + 2 z^2)
  const V n = hn::IfThenElse(negative, hn::Mul(z, hn::Add(z, two)), hn::MulAdd(two, z, one));
  const V rest = hn::IfThenElse(negative, two, hn::Mul(two, hn::Mul(z, z)));
  return hn::Div(n, hn::Add(n, rest));
}
template <class C>
struct Mish : Heavy {
  using Heavy::Heavy;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V x) const {
    return vanishing_product(d, x, tanh_softplus(d, x));
  }
};
template <class C>
struct MishBackward : Heavy {
  using Heavy::Heavy;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V g, V x) const {
    const V t = tanh_softplus(d, x);
    const V steep = hn::Mul(wide_sigmoid(d, x), hn::NegMulAdd(t, t, value<D, V>(d, 1)));
    return hn::Mul(g, hn::Add(t, vanishing_product(d, x, steep)));
  }
};
template <class C>
struct Hardswish : Cheap {
  using Cheap::Cheap;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V x) const {
    const V three = value<D, V>(d, 3);
    const V middle = hn::Div(hn::Mul(x, hn::Add(x, three)), value<D, V>(d, 6));
    return hn::IfThenZeroElse(hn::Le(x, hn::Neg(three)), hn::IfThenElse(hn::Ge(x, three), x, middle));
  }
};
template <class C>
struct HardswishBackward : Cheap {
  using Cheap::Cheap;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V g, V x) const {
    const V three = value<D, V>(d, 3);
    const V middle = hn::Mul(g, hn::Add(hn::Div(x, three), value<D, V>(d, 0.5)));
    // At NaN the slope of the upper side, as PyTorch.
    return hn::IfThenZeroElse(hn::Le(x, hn::Neg(three)), hn::IfThenElse(hn::Lt(x, three), middle, g));
  }
};
template <class C>
struct Hardsigmoid : Cheap {
  using Cheap::Cheap;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V x) const {
    const V three = value<D, V>(d, 3);
    const V middle = hn::Div(hn::Add(x, three), value<D, V>(d, 6));
    return hn::IfThenZeroElse(hn::Le(x, hn::Neg(three)), hn::IfThenElse(hn::Ge(x, three), value<D, V>(d, 1), middle));
  }
};
template <class C>
struct SigmoidBackward : Cheap {
  using Cheap::Cheap;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V g, V y) const {
    return hn::Mul(g, hn::Mul(y, hn::Sub(value<D, V>(d, 1), y)));
  }
};
template <class C>
struct TanhBackward : Cheap {
  using Cheap::Cheap;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V g, V y) const {
    return hn::Mul(g, hn::NegMulAdd(y, y, value<D, V>(d, 1)));
  }
};
template <class C>
struct Logsigmoid : Heavy {
  using Heavy::Heavy;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V x) const {
    const V low = hn::IfThenElse(positive(d, x), hn::Zero(d), x);
    return hn::Sub(low, wide_log1p(d, wide_exp(d, hn::Neg(hn::Abs(x)))));
  }
};
template <class C>
struct LogsigmoidBackward : Heavy {
  using Heavy::Heavy;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V g, V x) const {
    return hn::Mul(g, wide_sigmoid(d, hn::Neg(x)));
  }
};
template <class C>
struct Softplus : Heavy {  // a: beta, b: threshold
  using Heavy::Heavy;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V x) const {
    const V beta = value<D, V>(d, a);
    const V scaled = hn::Mul(x, beta);
    const V high = hn::IfThenElse(hn::Lt(scaled, hn::Zero(d)), hn::Zero(d), scaled);
    const V y = hn::Add(high, wide_log1p(d, wide_exp(d, hn::Neg(hn::Abs(scaled)))));
    return hn::IfThenElse(hn::Gt(scaled, value<D, V>(d, b)), x, hn::Div(y, beta));
  }
};
template <class C>
struct SoftplusBackward : Heavy {
  using Heavy::Heavy;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V g, V x) const {
    const V scaled = hn::Mul(x, value<D, V>(d, a));
    return hn::IfThenElse(hn::Gt(scaled, value<D, V>(d, b)), g, hn::Mul(g, wide_sigmoid(d, scaled)));
  }
};
template <class C>
struct Threshold : Cheap {  // a: threshold, b: value
  using Cheap::Cheap;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V x) const {
    return hn::IfThenElse(hn::Le(x, value<D, V>(d, a)), value<D, V>(d, b), x);
  }
};

// --- relu in 16 bits needs no conversion: the sign bit says it. kInfinity is the format's.
template <std::int16_t kInfinity>
void relu_bits(const void*, void* out, const void* const* in, std::int64_t count) {
  const hn::ScalableTag<std::int16_t> d;
  const auto* x = static_cast<const std::int16_t*>(in[0]);
  auto* y = static_cast<std::int16_t*>(out);
  const auto n = static_cast<std::size_t>(count);
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto v = hn::LoadU(d, x + i);
    const auto nan = hn::Gt(hn::And(v, hn::Set(d, std::int16_t{0x7fff})), hn::Set(d, kInfinity));
    hn::StoreU(hn::IfThenElse(nan, v, hn::Max(v, hn::Zero(d))), d, y + i);
  }
  for (; i < n; ++i) y[i] = x[i] > 0 || (x[i] & 0x7fff) > kInfinity ? x[i] : std::int16_t{0};
}
void relu_backward_bits(const void*, void* out, const void* const* in, std::int64_t count) {
  const hn::ScalableTag<std::int16_t> d;
  const auto* g = static_cast<const std::int16_t*>(in[0]);
  const auto* y = static_cast<const std::int16_t*>(in[1]);
  auto* to = static_cast<std::int16_t*>(out);
  const auto n = static_cast<std::size_t>(count);
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto on = hn::Gt(hn::LoadU(d, y + i), hn::Zero(d));
    hn::StoreU(hn::IfThenElseZero(on, hn::LoadU(d, g + i)), d, to + i);
  }
  for (; i < n; ++i) to[i] = y[i] > 0 ? g[i] : std::int16_t{0};
}

// `runs` with those of the 16-bit dtypes replaced.
constexpr std::array<Runs, kNumDTypes> with_bits(std::array<Runs, kNumDTypes> runs, RunFn half, RunFn bfloat16) {
  runs[static_cast<int>(DType::f16)] = {half};
  runs[static_cast<int>(DType::bf16)] = {bfloat16};
  return runs;
}
constexpr auto kReluRuns = with_bits(kRuns<Relu, 1>, relu_bits<0x7c00>, relu_bits<0x7f80>);
constexpr auto kReluBackwardRuns = with_bits(kRuns<ReluBackward, 2>, relu_backward_bits, relu_backward_bits);

constexpr ElementwiseOp kActivationOps[] = {
    {"relu", kNumericDTypes, 1, kReluRuns.data()},
    {"relu_backward", kFloatingDTypes, 2, kReluBackwardRuns.data()},
    op_of<LeakyRelu, 1>("leaky_relu", kFloatingDTypes),
    op_of<LeakyReluBackward, 2>("leaky_relu_backward", kFloatingDTypes),
    op_of<Elu, 1>("elu", kFloatingDTypes),
    op_of<EluBackward, 2>("elu_backward", kFloatingDTypes),
    op_of<Prelu, 2, true>("prelu", kFloatingDTypes),
    op_with_low<Gelu, GeluLow, 1>("gelu", kFloatingDTypes),
    op_of<GeluBackward, 2>("gelu_backward", kFloatingDTypes),
    op_of<GeluTanh, 1>("gelu_tanh", kFloatingDTypes),
    op_of<GeluTanhBackward, 2>("gelu_tanh_backward", kFloatingDTypes),
    op_with_low<Silu, SiluLow, 1>("silu", kFloatingDTypes),
    op_of<SiluBackward, 2>("silu_backward", kFloatingDTypes),
    op_of<Mish, 1>("mish", kFloatingDTypes),
    op_of<MishBackward, 2>("mish_backward", kFloatingDTypes),
    op_of<Hardswish, 1>("hardswish", kFloatingDTypes),
    op_of<HardswishBackward, 2>("hardswish_backward", kFloatingDTypes),
    op_of<Hardsigmoid, 1>("hardsigmoid", kFloatingDTypes),
    op_of<SigmoidBackward, 2>("sigmoid_backward", kFloatingDTypes),
    op_of<TanhBackward, 2>("tanh_backward", kFloatingDTypes),
    op_of<Logsigmoid, 1>("logsigmoid", kFloatingDTypes),
    op_of<LogsigmoidBackward, 2>("logsigmoid_backward", kFloatingDTypes),
    op_of<Softplus, 1>("softplus", kFloatingDTypes),
    op_of<SoftplusBackward, 2>("softplus_backward", kFloatingDTypes),
    op_of<Threshold, 1>("threshold", kFloatingDTypes),
};

}  // namespace

const ElementwiseOp* activation_ops() { return kActivationOps; }

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
namespace {

HWY_EXPORT(activation_ops);
const ElementwiseOp* chosen_activation_ops() { return HWY_DYNAMIC_DISPATCH(activation_ops)(); }
const RegisterFamily<chosen_activation_ops> activation_kernels(HWY_STATIC_DISPATCH(kActivationOps));

}  // namespace
}  // namespace halfstep::cpu
#endif  // HWY_ONCE
