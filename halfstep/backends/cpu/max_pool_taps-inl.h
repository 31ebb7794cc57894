// SPDX-License-Identifier: Apache-2.0
// What both passes of max pooling share: numbers of places as vectors, and how channels are cut into vectors.

// The include guard of a header that is compiled once for each target.
#if defined(HALFSTEP_BACKENDS_CPU_MAX_POOL_TAPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFSTEP_BACKENDS_CPU_MAX_POOL_TAPS_INL_H_
#undef HALFSTEP_BACKENDS_CPU_MAX_POOL_TAPS_INL_H_
#else
#define HALFSTEP_BACKENDS_CPU_MAX_POOL_TAPS_INL_H_
#endif

#include "halfstep/backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {

/// Numbers of places in lanes of D, signed integers of 16 or 32 bits.
template <class D>
HWY_INLINE void store_numbers(hn::Vec<D> v, D, std::uint8_t* p) {
  const hn::Rebind<std::uint8_t, D> d8;
  hn::StoreU(hn::DemoteTo(d8, v), d8, p);
}
template <class D>
HWY_INLINE void store_numbers(hn::Vec<D> v, D d, std::int32_t* p) {
  hn::StoreU(v, d, p);
}

/// The lanes of D, float32, whose number is `number`.
template <class D>
HWY_INLINE hn::Mask<D> numbered(D d, const std::uint8_t* p, std::int32_t number) {
  const hn::Rebind<std::uint8_t, D> d8;
#if HWY_TARGET <= HWY_AVX3
  // Bytes compare to a mask as they are.
  const auto hit = hn::Eq(hn::LoadU(d8, p), hn::Set(d8, static_cast<std::uint8_t>(number)));
  std::uint8_t bits[8];
  hn::StoreMaskBits(d8, hit, bits);
  return hn::LoadMaskBits(d, bits);
#else
  const hn::RebindToSigned<D> di;
  return hn::RebindMask(d, hn::Eq(hn::PromoteTo(di, hn::LoadU(d8, p)), hn::Set(di, number)));
#endif
}
template <class D>
HWY_INLINE hn::Mask<D> numbered(D d, const std::int32_t* p, std::int32_t number) {
  const hn::RebindToSigned<D> di;
  return hn::RebindMask(d, hn::Eq(hn::LoadU(di, p), hn::Set(di, number)));
}

/// f(tag) with vectors of T that `channels`, at least 4, fill.
template <class T, class F>
HWY_INLINE void with_lanes_for(std::size_t channels, F&& f) {
  if (channels >= hn::Lanes(hn::ScalableTag<T>())) return f(hn::ScalableTag<T>());
  if (channels >= 16) return f(hn::CappedTag<T, 16>());
  if (channels >= 8) return f(hn::CappedTag<T, 8>());
  f(hn::CappedTag<T, 4>());
}

/// f(vectors, c) for the channels c < n, four and two vectors of D at once, then one by one. The last one overlaps the
/// one before where n is no multiple: what it computes again is the same.
template <class D, class F>
HWY_INLINE void each_few_vectors(D d, std::size_t n, F&& f) {
  const std::size_t lanes = hn::Lanes(d);
  std::size_t c = 0;
  if constexpr (std::is_same_v<D, hn::ScalableTag<hn::TFromD<D>>>) {  // others are taken where there is one vector
    for (; c + 4 * lanes <= n; c += 4 * lanes) f(std::integral_constant<int, 4>(), c);
    for (; c + 2 * lanes <= n; c += 2 * lanes) f(std::integral_constant<int, 2>(), c);
  }
  for (; c + lanes <= n; c += lanes) f(std::integral_constant<int, 1>(), c);
  if (c < n) f(std::integral_constant<int, 1>(), n - lanes);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#endif  // the per-target include guard
