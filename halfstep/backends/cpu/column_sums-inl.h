// SPDX-License-Identifier: Apache-2.0
// Sums of rows whose columns lie side by side, in vectors.

// The include guard of a header that is compiled once for each target.
#if defined(HALFSTEP_BACKENDS_CPU_COLUMN_SUMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFSTEP_BACKENDS_CPU_COLUMN_SUMS_INL_H_
#undef HALFSTEP_BACKENDS_CPU_COLUMN_SUMS_INL_H_
#else
#define HALFSTEP_BACKENDS_CPU_COLUMN_SUMS_INL_H_
#endif

#include "halfstep/backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {

namespace detail {

// K vectors of columns; kFew: the first n lanes of one.
template <bool kApart, int K, bool kFew, class T>
HWY_INLINE void add_some_columns(const T* x, std::int64_t rows, std::int64_t step, float* sums,
                                 [[maybe_unused]] std::size_t n) {
  const F32Tag d;
  constexpr std::size_t kLanes = hn::MaxLanes(F32Tag());
  const auto load_sum = [&](int k) HWY_ATTR {
    const float* from = sums + static_cast<std::size_t>(k) * kLanes;
    if constexpr (kFew) {
      return load_n(d, from, n);
    } else {
      return hn::LoadU(d, from);
    }
  };
  F32Vec sum[K];
  for (int k = 0; k < K; ++k) sum[k] = kApart ? hn::Zero(d) : load_sum(k);
  for (; rows > 0; --rows, x += step) {
    if constexpr (kFew) {
      sum[0] = hn::Add(sum[0], load_n(d, x, n));
    } else {
      for (int k = 0; k < K; ++k) sum[k] = hn::Add(sum[k], load(d, x + static_cast<std::size_t>(k) * kLanes));
    }
  }
  for (int k = 0; k < K; ++k) {
    if (kApart) sum[k] = hn::Add(load_sum(k), sum[k]);
    float* to = sums + static_cast<std::size_t>(k) * kLanes;
    if constexpr (kFew) {
      store_n(sum[k], d, to, n);
    } else {
      hn::StoreU(sum[k], d, to);
    }
  }
}

}  // namespace detail

/// Adds rows x[r * step + c], r = 0, 1, ... < rows, of float32 or 16 bits to sums[c], c < columns, in float32. kApart:
/// adds their sum, made apart.
template <bool kApart, class T>
HWY_INLINE void add_columns(const T* x, std::int64_t rows, std::int64_t step, std::int64_t columns, float* sums) {
  constexpr std::size_t kLanes = hn::MaxLanes(F32Tag());
  const auto n = static_cast<std::size_t>(columns);
  std::size_t c = 0;
  for (; c + 4 * kLanes <= n; c += 4 * kLanes) {
    detail::add_some_columns<kApart, 4, false>(x + c, rows, step, sums + c, 0);
  }
  for (; c + kLanes <= n; c += kLanes) detail::add_some_columns<kApart, 1, false>(x + c, rows, step, sums + c, 0);
  if (c < n) detail::add_some_columns<kApart, 1, true>(x + c, rows, step, sums + c, n - c);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#endif  // the per-target include guard
