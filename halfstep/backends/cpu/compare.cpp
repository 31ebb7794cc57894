// SPDX-License-Identifier: Apache-2.0
// Comparisons and tests (results are bool), logic and bits.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/compare.cpp"
#include <hwy/foreach_target.h>

#include <cmath>
#include <limits>

#include "halfstep/backends/cpu/runs-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

/// Lanes of a mask as bools: all of them, or the first n.
template <class D, class M>
HWY_INLINE void store_mask(M mask, D, bool* p, std::size_t n) {
  const hn::RebindToSigned<D> di;
  const hn::Rebind<std::uint8_t, D> d8;
  const auto ones = hn::IfThenElseZero(hn::RebindMask(di, mask), hn::Set(di, 1));
  const auto bytes = hn::DemoteTo(d8, ones);
  if (n == hn::MaxLanes(D())) {
    hn::StoreU(bytes, d8, reinterpret_cast<std::uint8_t*>(p));
  } else {
    alignas(64) std::uint8_t block[hn::MaxLanes(D())];
    hn::StoreU(bytes, d8, block);
    copy_few(reinterpret_cast<std::uint8_t*>(p), block, n);
  }
}

// Each as `mask(vectors)` for float32 and `test(scalars)` for the rest.
struct Eq {
  template <class V>
  static HWY_INLINE auto mask(V a, V b) {
    return hn::Eq(a, b);
  }
  template <class C>
  static bool test(C a, C b) {
    return a == b;
  }
};
struct Ne {
  template <class V>
  static HWY_INLINE auto mask(V a, V b) {
    return hn::Not(hn::Eq(a, b));  // Highway's Ne is false for NaN on AVX-512
  }
  template <class C>
  static bool test(C a, C b) {
    return a != b;
  }
};
struct Lt {
  template <class V>
  static HWY_INLINE auto mask(V a, V b) {
    return hn::Lt(a, b);
  }
  template <class C>
  static bool test(C a, C b) {
    return a < b;
  }
};
struct Le {
  template <class V>
  static HWY_INLINE auto mask(V a, V b) {
    return hn::Le(a, b);
  }
  template <class C>
  static bool test(C a, C b) {
    return a <= b;
  }
};
struct Gt {
  template <class V>
  static HWY_INLINE auto mask(V a, V b) {
    return hn::Gt(a, b);
  }
  template <class C>
  static bool test(C a, C b) {
    return a > b;
  }
};
struct Ge {
  template <class V>
  static HWY_INLINE auto mask(V a, V b) {
    return hn::Ge(a, b);
  }
  template <class C>
  static bool test(C a, C b) {
    return a >= b;
  }
};
struct IsNan {
  template <class V>
  static HWY_INLINE auto mask(V a) {
    return hn::IsNaN(a);
  }
  template <class C>
  static bool test(C a) {
    if constexpr (std::is_floating_point_v<C>) return std::isnan(a);
    return false;
  }
};
struct IsInf {
  template <class V>
  static HWY_INLINE auto mask(V a) {
    return hn::Eq(hn::Abs(a), detail::constant(std::numeric_limits<float>::infinity()));
  }
  template <class C>
  static bool test(C a) {
    if constexpr (std::is_floating_point_v<C>) return std::isinf(a);
    return false;
  }
};
struct IsFinite {
  template <class V>
  static HWY_INLINE auto mask(V a) {
    return hn::Lt(hn::Abs(a), detail::constant(std::numeric_limits<float>::infinity()));
  }
  template <class C>
  static bool test(C a) {
    if constexpr (std::is_floating_point_v<C>) return std::isfinite(a);
    return true;
  }
};

template <class T, class F, std::size_t... K>
void compare_run(const void*, void* out, const void* const* in, std::int64_t count) {
  auto* to = static_cast<bool*>(out);
  if constexpr (std::is_same_v<ComputeTag<T>, F32Tag> && !std::is_integral_v<T>) {
    const F32Tag d;
    const auto n = static_cast<std::size_t>(count);
    const std::size_t lanes = hn::Lanes(d);
    std::size_t i = 0;
    for (; i + lanes <= n; i += lanes) {
      store_mask(F::mask(load(d, static_cast<const T*>(in[K]) + i)...), d, to + i, lanes);
    }
    if (i < n) store_mask(F::mask(load_n(d, static_cast<const T*>(in[K]) + i, n - i)...), d, to + i, n - i);
  } else {
    for (std::int64_t i = 0; i < count; ++i) to[i] = F::test(static_cast<const T*>(in[K])[i]...);
  }
}

template <class F, std::size_t... K>
constexpr std::array<Runs, kNumDTypes> compare_table(std::index_sequence<K...>) {
  return {
      Runs{compare_run<float, F, K...>},
      Runs{compare_run<double, F, K...>},
      Runs{compare_run<Half, F, K...>},
      Runs{compare_run<BFloat16, F, K...>},
      Runs{},
      Runs{},
      Runs{compare_run<std::int64_t, F, K...>},
      Runs{compare_run<std::int32_t, F, K...>},
      Runs{compare_run<std::int8_t, F, K...>},
      Runs{compare_run<std::uint8_t, F, K...>},
      Runs{compare_run<bool, F, K...>},
  };
}
template <class F, int N>
constexpr std::array<Runs, kNumDTypes> kCompareRuns = compare_table<F>(std::make_index_sequence<N>());
template <class F, int N>
constexpr ElementwiseOp compare(const char* name) {
  return {name, kComputeDTypes, N, kCompareRuns<F, N>.data()};
}
constexpr ElementwiseOp kCompareOps[] = {
    compare<Eq, 2>("eq"),       compare<Ne, 2>("ne"),       compare<Lt, 2>("lt"),
    compare<Le, 2>("le"),       compare<Gt, 2>("gt"),       compare<Ge, 2>("ge"),
    compare<IsNan, 1>("isnan"), compare<IsInf, 1>("isinf"), compare<IsFinite, 1>("isfinite"),
};

}  // namespace

const ElementwiseOp* compare_ops() { return kCompareOps; }

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
namespace {

HWY_EXPORT(compare_ops);

const ElementwiseOp* comparisons() { return HWY_DYNAMIC_DISPATCH(compare_ops)(); }
const RegisterFamily<comparisons> registered_comparisons(HWY_STATIC_DISPATCH(kCompareOps));

// --- logic on bools, and bits

template <class T, class F, std::size_t... K>
void plain_run(const void*, void* out, const void* const* in, std::int64_t n) {
  auto* to = static_cast<T*>(out);
  for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(F()(static_cast<const T*>(in[K])[i]...));
}
struct And {
  template <class T>
  auto operator()(T a, T b) const {
    return a & b;
  }
};
struct Or {
  template <class T>
  auto operator()(T a, T b) const {
    return a | b;
  }
};
struct Xor {
  template <class T>
  auto operator()(T a, T b) const {
    return a ^ b;
  }
};
struct Not {
  template <class T>
  auto operator()(T a) const {
    if constexpr (std::is_same_v<T, bool>) {
      return !a;
    } else {
      return ~a;
    }
  }
};
template <class F, std::size_t... K>
Status bitwise(KernelContext*, const TensorView* in, int, TensorView* out, int, const void*) {
  Runs runs;
  switch (out[0].dtype) {
    case DType::i64:
      runs.straight = plain_run<std::int64_t, F, K...>;
      break;
    case DType::i32:
      runs.straight = plain_run<std::int32_t, F, K...>;
      break;
    case DType::i8:
      runs.straight = plain_run<std::int8_t, F, K...>;
      break;
    case DType::u8:
      runs.straight = plain_run<std::uint8_t, F, K...>;
      break;
    case DType::boolean:
      runs.straight = plain_run<bool, F, K...>;
      break;
    default:
      return Status::unsupported;
  }
  return run_elementwise(runs, nullptr, in, sizeof...(K), out);
}

constexpr std::initializer_list<DType> kBits = {DType::i64, DType::i32, DType::i8, DType::u8, DType::boolean};
constexpr std::initializer_list<DType> kBool = {DType::boolean};

const RegisterCpuKernel compare_kernels[] = {
    {"logical_and", kBool, bitwise<And, 0, 1>, kElementwise}, {"logical_or", kBool, bitwise<Or, 0, 1>, kElementwise},
    {"logical_xor", kBool, bitwise<Xor, 0, 1>, kElementwise}, {"logical_not", kBool, bitwise<Not, 0>, kElementwise},
    {"bitwise_and", kBits, bitwise<And, 0, 1>, kElementwise}, {"bitwise_or", kBits, bitwise<Or, 0, 1>, kElementwise},
    {"bitwise_xor", kBits, bitwise<Xor, 0, 1>, kElementwise}, {"bitwise_not", kBits, bitwise<Not, 0>, kElementwise},
};

}  // namespace
}  // namespace halfstep::cpu
#endif  // HWY_ONCE
