// SPDX-License-Identifier: Apache-2.0
// Keys of floats in vectors.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/sort_keys.cpp"
#include <hwy/foreach_target.h>

#include "halfstep/backends/cpu/simd-inl.h"
#include "halfstep/backends/cpu/sort_keys.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace sort_keys_detail {

using KeyTag = hn::RebindToUnsigned<F32Tag>;
using KeyVec = hn::Vec<KeyTag>;

// key_of() of sort.cpp, with the bits of `flip` changed.
HWY_INLINE KeyVec keys_of(F32Vec v, KeyVec flip) {
  const F32Tag d;
  const KeyTag dk;
  const hn::RebindToSigned<F32Tag> di;
  const auto bits = hn::BitCast(dk, hn::Add(v, hn::Zero(d)));  // -0 + 0 is 0
  const auto negative = hn::BitCast(dk, hn::ShiftRight<31>(hn::BitCast(di, bits)));
  const auto key = hn::Xor(bits, hn::Or(negative, hn::Set(dk, 0x80000000u)));
  return hn::Xor(hn::IfThenElse(hn::RebindMask(dk, hn::IsNaN(v)), hn::Set(dk, 0xffffffffu), key), flip);
}
HWY_INLINE KeyVec flip_of(bool descending) { return hn::Set(KeyTag(), descending ? 0xffffffffu : 0u); }

template <class T>
void keys(const T* values, std::int64_t count, bool descending, std::uint32_t* to) {
  const F32Tag d;
  const std::size_t lanes = hn::Lanes(d), n = static_cast<std::size_t>(count);
  const KeyVec flip = flip_of(descending);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(keys_of(load(d, values + i), flip), KeyTag(), to + i);
  if (i < n) store_n(keys_of(load_n(d, values + i, n - i), flip), KeyTag(), to + i, n - i);
}

template <class T>
void least(const T* values, std::int64_t blocks, bool descending, std::uint32_t* to) {
  const F32Tag d;
  const KeyTag dk;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const KeyVec flip = flip_of(descending);
  for (std::int64_t block = 0; block < blocks; ++block) {
    const T* x = values + block * kKeyBlock;
    KeyVec least = keys_of(load(d, x), flip);
    for (std::int64_t i = lanes; i < kKeyBlock; i += lanes) least = hn::Min(least, keys_of(load(d, x + i), flip));
    to[block] = hn::GetLane(hn::MinOfLanes(dk, least));
  }
}

// f(values) with the type of the values.
template <class F>
void visit_floats(DType dtype, const void* values, F&& f) {
  if (dtype == DType::f32) return f(static_cast<const float*>(values));
  if (dtype == DType::f16) return f(static_cast<const Half*>(values));
  return f(static_cast<const BFloat16*>(values));
}

}  // namespace sort_keys_detail

void keys_of_floats(DType dtype, const void* values, std::int64_t n, bool descending, std::uint32_t* to) {
  sort_keys_detail::visit_floats(dtype, values, [&](const auto* x) { sort_keys_detail::keys(x, n, descending, to); });
}
void least_keys_of_floats(DType dtype, const void* values, std::int64_t blocks, bool descending, std::uint32_t* to) {
  sort_keys_detail::visit_floats(dtype, values,
                                 [&](const auto* x) { sort_keys_detail::least(x, blocks, descending, to); });
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {

HWY_EXPORT(keys_of_floats);
HWY_EXPORT(least_keys_of_floats);

void float_keys(DType dtype, const void* values, std::int64_t n, bool descending, std::uint32_t* keys) {
  HWY_DYNAMIC_DISPATCH(keys_of_floats)(dtype, values, n, descending, keys);
}
void least_float_keys(DType dtype, const void* values, std::int64_t blocks, bool descending, std::uint32_t* least) {
  HWY_DYNAMIC_DISPATCH(least_keys_of_floats)(dtype, values, blocks, descending, least);
}

}  // namespace halfstep::cpu
#endif
