// SPDX-License-Identifier: Apache-2.0
// Vectors for the CPU's kernels: loads that widen 16-bit floats to float32, stores that round once to nearest even,
// ends of runs, and a loop over contiguous runs. Included after foreach_target.h, once for each instruction set.
//
// Highway's own conversion to bfloat16 cuts bits off instead of rounding, so stores go through here.

// The include guard of a header that is compiled once for each target.
#if defined(HALFSTEP_BACKENDS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFSTEP_BACKENDS_CPU_SIMD_INL_H_
#undef HALFSTEP_BACKENDS_CPU_SIMD_INL_H_
#else
#define HALFSTEP_BACKENDS_CPU_SIMD_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "halfstep/core/float16.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// Full vectors of float32 and float64.
using F32Tag = hn::ScalableTag<float>;
using F64Tag = hn::ScalableTag<double>;
using F32Vec = hn::Vec<F32Tag>;
using F64Vec = hn::Vec<F64Tag>;

/// The tag of the vectors that storage type T computes in: float64 for double, float32 for float, Half and BFloat16.
template <class T>
using ComputeTag = std::conditional_t<std::is_same_v<T, double>, F64Tag, F32Tag>;
/// The scalar of ComputeTag<T>.
template <class T>
using ComputeScalar = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// Float32 lanes, none of them NaN, whose upper halves are rounded to nearest even as bfloat16; the lower ones have any
/// value. (Without masks: on current processors they are what takes longest.)
template <class D>
HWY_INLINE auto round_upper_half([[maybe_unused]] D d, hn::Vec<D> v) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  return hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), odd);
}
/// The upper halves of float32 lanes, rounded to nearest even as bfloat16, in the lower 16 bits of 32-bit lanes. NaN
/// stays NaN, with its sign and the upper bits of its payload.
template <class D>
HWY_INLINE auto round_to_bfloat16(D d, hn::Vec<D> v) {
  const hn::RebindToUnsigned<D> du;
  const auto quiet = hn::Or(hn::BitCast(du, v), hn::Set(du, 0x400000u));
  return hn::ShiftRight<16>(hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), quiet, round_upper_half(d, v)));
}

// --- whole vectors; memory need not be aligned

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const hn::TFromD<D>* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE hn::Vec<D> load(D d, const Half* p) {
  const hn::Rebind<hwy::float16_t, D> dh;
  return hn::PromoteTo(d, hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(p)));
}
template <class D>
HWY_INLINE hn::Vec<D> load(D d, const BFloat16* p) {
  const hn::Rebind<std::uint16_t, D> d16;
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(p));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, bits)));
}

template <class D>
HWY_INLINE void store(hn::Vec<D> v, D d, hn::TFromD<D>* p) {
  hn::StoreU(v, d, p);
}
template <class D>
HWY_INLINE void store(hn::Vec<D> v, D, Half* p) {
  // VCVTPS2PH with rounding to nearest even; subnormals are kept whatever MXCSR says.
  const hn::Rebind<hwy::float16_t, D> dh;
  hn::StoreU(hn::DemoteTo(dh, v), dh, reinterpret_cast<hwy::float16_t*>(p));
}
template <class D>
HWY_INLINE void store(hn::Vec<D> v, D d, BFloat16* p) {
  const hn::Rebind<std::uint16_t, D> d16;
  const hn::RebindToSigned<D> di;
  // Signed lanes up to 65535: the saturating conversion is exact.
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, round_to_bfloat16(d, v))), d16, reinterpret_cast<std::uint16_t*>(p));
}

/// Lanes as they are after they have been stored as T and loaded again.
template <class T, class D>
HWY_INLINE hn::Vec<D> rounded_to([[maybe_unused]] D d, hn::Vec<D> v) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return hn::BitCast(d, hn::ShiftLeft<16>(round_to_bfloat16(d, v)));
  } else if constexpr (std::is_same_v<T, Half>) {
    return hn::PromoteTo(d, hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), v));
  } else {
    return v;
  }
}

/// Two vectors, none of their lanes NaN, rounded to nearest even as bfloat16, one after the other.
template <class D>
HWY_INLINE auto round_two(D d, hn::Vec<D> v0, hn::Vec<D> v1) {
  const hn::Repartition<std::uint16_t, D> d16;
#if HWY_TARGET <= HWY_AVX3
  // The upper halves of both vectors are one instruction, and so are the lower ones, which carry into the upper ones
  // where they exceed a half, or are one and the upper half is odd: where lower + 0x7fff + odd has a 17th bit.
  const auto upper = hn::ConcatOdd(d16, hn::BitCast(d16, v1), hn::BitCast(d16, v0));
  const auto lower = hn::ConcatEven(d16, hn::BitCast(d16, v1), hn::BitCast(d16, v0));
  const auto odd = hn::OrAnd(hn::Set(d16, std::uint16_t{0x7ffe}), upper, hn::Set(d16, std::uint16_t{1}));
  return hn::Add(upper, hn::ShiftRight<15>(hn::AverageRound(lower, odd)));
#else
  return hn::ConcatOdd(d16, hn::BitCast(d16, round_upper_half(d, v1)), hn::BitCast(d16, round_upper_half(d, v0)));
#endif
}

/// Two vectors to memory one after the other.
template <class D, class T>
HWY_INLINE void store_two(hn::Vec<D> v0, hn::Vec<D> v1, D d, T* p) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (HWY_LIKELY(hn::AllFalse(d, hn::IsNaN(hn::Add(v0, v1))))) {
      hn::StoreU(round_two(d, v0, v1), hn::Repartition<std::uint16_t, D>(), reinterpret_cast<std::uint16_t*>(p));
      return;
    }
  }
  store(v0, d, p);
  store(v1, d, p + hn::Lanes(d));
}

// --- the first n lanes, 0 < n <= Lanes(d); the other lanes load as zero. Nothing beyond them is touched.

/// Copies n < 64 elements without a call.
template <class T>
HWY_INLINE void copy_few(T* to, const T* from, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) to[i] = from[i];
}

template <class D>
HWY_INLINE hn::Vec<D> load_n(D d, const hn::TFromD<D>* p, std::size_t n) {
  return hn::MaskedLoad(hn::FirstN(d, n), d, p);
}
template <class D, class T, std::enable_if_t<sizeof(T) == 2>* = nullptr>
HWY_INLINE hn::Vec<D> load_n(D d, const T* p, std::size_t n) {
  // A masked load of 16-bit lanes exists in AVX-512 only.
  alignas(64) T block[hn::MaxLanes(D())] = {};
  copy_few(block, p, std::min<std::size_t>(n, hn::MaxLanes(D())));  // which n is anyway, but compilers warn
  return load(d, block);
}

template <class D>
HWY_INLINE void store_n(hn::Vec<D> v, D d, hn::TFromD<D>* p, std::size_t n) {
  hn::BlendedStore(v, hn::FirstN(d, n), d, p);
}
template <class D, class T, std::enable_if_t<sizeof(T) == 2>* = nullptr>
HWY_INLINE void store_n(hn::Vec<D> v, D d, T* p, std::size_t n) {
  alignas(64) T block[hn::MaxLanes(D())];
  store(v, d, block);
  copy_few(p, block, n);
}

// --- operands of map_run

/// A contiguous operand.
template <class T>
struct Run {
  const T* p;
  template <class D>
  HWY_INLINE hn::Vec<D> get(D d, std::size_t i) const {
    return load(d, p + i);
  }
  template <class D>
  HWY_INLINE hn::Vec<D> get_n(D d, std::size_t i, std::size_t n) const {
    return load_n(d, p + i, n);
  }
};
template <class T>
Run(const T*) -> Run<T>;
template <class T>
Run(T*) -> Run<T>;

/// One value for all elements.
template <class C>
struct Same {
  C value;
  template <class D>
  HWY_INLINE hn::Vec<D> get(D d, std::size_t) const {
    return hn::Set(d, value);
  }
  template <class D>
  HWY_INLINE hn::Vec<D> get_n(D d, std::size_t, std::size_t) const {
    return hn::Set(d, value);
  }
};

/// out[i] = f(in[i]...) for i < n, in vectors of tag `d`; `f` takes and returns vectors. An operand may be `out`
/// itself, exactly. kUnroll (1 or 2) vectors are in flight in one turn of the loop.
template <int kUnroll = 2, class D, class Out, class F, class... In>
HWY_INLINE void map_run(D d, Out* out, std::int64_t count, F&& f, const In&... in) {
  const std::size_t lanes = hn::Lanes(d);
  const auto n = static_cast<std::size_t>(count);
  std::size_t i = 0;
  if constexpr (kUnroll == 2) {
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
      const auto v0 = f(in.get(d, i)...);
      const auto v1 = f(in.get(d, i + lanes)...);
      store_two(v0, v1, d, out + i);
    }
  }
  for (; i + lanes <= n; i += lanes) store(f(in.get(d, i)...), d, out + i);
  if (i < n) store_n(f(in.get_n(d, i, n - i)...), d, out + i, n - i);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#endif  // the per-target include guard
