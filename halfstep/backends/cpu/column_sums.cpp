// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/column_sums.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>

#include "halfstep/backends/cpu/column_sums-inl.h"
#include "halfstep/backends/cpu/column_sums.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

// Some rows at a time: they are streams side by side, and sums are loaded and stored once for them.
template <class T>
void add_rows_of(const void* from, std::int64_t rows, std::int64_t step, std::int64_t columns, float* sums) {
  constexpr std::int64_t kRows = 8;
  const T* x = static_cast<const T*>(from);
  for (std::int64_t r = 0; r < rows; r += kRows, x += kRows * step) {
    add_columns<false>(x, std::min(kRows, rows - r), step, columns, sums);
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
