// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/column_sums.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>

#include "halfstep/backends/cpu/column_sums.h"
#include "halfstep/backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

// K vectors of columns; kFew: the first n lanes of one.
template <int K, bool kFew, class T>
HWY_INLINE void add_columns(const T* x, std::int64_t rows, std::int64_t step, float* sums,
                            [[maybe_unused]] std::size_t n) {
  const F32Tag d;
  constexpr std::size_t kLanes = hn::MaxLanes(F32Tag());
  F32Vec sum[K];
  for (int k = 0; k < K; ++k) {
    const float* from = sums + static_cast<std::size_t>(k) * kLanes;
    if constexpr (kFew) {
      sum[k] = load_n(d, from, n);
    } else {
      sum[k] = hn::LoadU(d, from);
    }
  }
  for (; rows > 0; --rows, x += step) {
    if constexpr (kFew) {
      sum[0] = hn::Add(sum[0], load_n(d, x, n));
    } else {
      for (int k = 0; k < K; ++k) sum[k] = hn::Add(sum[k], load(d, x + static_cast<std::size_t>(k) * kLanes));
    }
  }
  for (int k = 0; k < K; ++k) {
    float* to = sums + static_cast<std::size_t>(k) * kLanes;
    if constexpr (kFew) {
      store_n(sum[k], d, to, n);
    } else {
      hn::StoreU(sum[k], d, to);
    }
  }
}

// Some rows at a time: they are streams side by side, and sums are loaded and stored once for them.
template <class T>
void add_rows_of(const void* from, std::int64_t rows, std::int64_t step, std::int64_t columns, float* sums) {
  constexpr std::int64_t kRows = 8;
  constexpr std::size_t kLanes = hn::MaxLanes(F32Tag());
  const auto n = static_cast<std::size_t>(columns);
  const T* x = static_cast<const T*>(from);
  for (std::int64_t r = 0; r < rows; r += kRows, x += kRows * step) {
    const std::int64_t count = std::min(kRows, rows - r);
    std::size_t c = 0;
    for (; c + 4 * kLanes <= n; c += 4 * kLanes) add_columns<4, false>(x + c, count, step, sums + c, 0);
    for (; c + kLanes <= n; c += kLanes) add_columns<1, false>(x + c, count, step, sums + c, 0);
    if (c < n) add_columns<1, true>(x + c, count, step, sums + c, n - c);
  }
}

}  // namespace

void add_rows(DType dtype, const void* x, std::int64_t rows, std::int64_t step, std::int64_t columns, float* sums) {
  if (dtype == DType::f16) return add_rows_of<Half>(x, rows, step, columns, sums);
  if (dtype == DType::bf16) return add_rows_of<BFloat16>(x, rows, step, columns, sums);
  add_rows_of<float>(x, rows, step, columns, sums);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
HWY_EXPORT(add_rows);
void add_rows_to_sums(DType dtype, const void* x, std::int64_t rows, std::int64_t step, std::int64_t columns,
                      float* sums) {
  HWY_DYNAMIC_DISPATCH(add_rows)(dtype, x, rows, step, columns, sums);
}
}  // namespace halfstep::cpu
#endif
