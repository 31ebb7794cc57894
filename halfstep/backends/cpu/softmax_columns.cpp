// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/softmax_columns.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "halfstep/backends/cpu/math-inl.h"
#include "halfstep/backends/cpu/softmax_columns.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

constexpr std::int64_t kTerms = 64;

// Sums of columns.
struct ColumnSums {
  alignas(64) float part[kSoftmaxColumns] = {};
  double whole[kSoftmaxColumns] = {};

  void flush(std::int64_t width) {
    for (std::int64_t j = 0; j < width; ++j) {
      whole[j] += static_cast<double>(part[j]);
      part[j] = 0;
    }
  }
};

template <class T>
void forward_columns(const T* x, T* y, std::int64_t n, std::int64_t stride, std::int64_t width, bool logarithm) {
  const F32Tag d;
  alignas(64) float top[kSoftmaxColumns], rest[kSoftmaxColumns];
  std::fill_n(top, width, -std::numeric_limits<float>::infinity());
  for (std::int64_t r = 0; r < n; ++r) {
    map_run(
        d, top, width,
        [&](F32Vec t, F32Vec v) HWY_ATTR {
          // NaN wins, and stays: Max may drop one.
          return hn::IfThenElse(hn::IsNaN(t), t, hn::IfThenElse(hn::IsNaN(v), v, hn::Max(t, v)));
        },
        Run<float>{top}, Run<T>{x + r * stride});
  }
  ColumnSums sums;
  for (std::int64_t r = 0; r < n; ++r) {
    map_run(
        d, sums.part, width, [&](F32Vec sum, F32Vec v, F32Vec t) HWY_ATTR { return hn::Add(sum, exp(hn::Sub(v, t))); },
        Run<float>{sums.part}, Run<T>{x + r * stride}, Run<float>{top});
    if (r % kTerms == kTerms - 1) sums.flush(width);
  }
  sums.flush(width);
  for (std::int64_t j = 0; j < width; ++j)
    rest[j] = static_cast<float>(logarithm ? std::log(sums.whole[j]) : sums.whole[j]);
  for (std::int64_t r = 0; r < n; ++r) {
    if (logarithm) {
      map_run(
          d, y + r * stride, width, [&](F32Vec v, F32Vec t, F32Vec l) HWY_ATTR { return hn::Sub(hn::Sub(v, t), l); },
          Run<T>{x + r * stride}, Run<float>{top}, Run<float>{rest});
    } else {
      map_run(
          d, y + r * stride, width,
          [&](F32Vec v, F32Vec t, F32Vec s) HWY_ATTR { return hn::Div(exp(hn::Sub(v, t)), s); }, Run<T>{x + r * stride},
          Run<float>{top}, Run<float>{rest});
    }
  }
}

// softmax: dx = y (g - sum(g y)); log_softmax: dx = g - exp(y) sum(g).
template <class T>
void backward_columns(const T* g, const T* y, T* dx, std::int64_t n, std::int64_t stride, std::int64_t width,
                      bool logarithm) {
  const F32Tag d;
  ColumnSums sums;
  for (std::int64_t r = 0; r < n; ++r) {
    if (logarithm) {
      map_run(
          d, sums.part, width, [&](F32Vec sum, F32Vec gv) HWY_ATTR { return hn::Add(sum, gv); }, Run<float>{sums.part},
          Run<T>{g + r * stride});
    } else {
      map_run(
          d, sums.part, width, [&](F32Vec sum, F32Vec gv, F32Vec v) HWY_ATTR { return hn::MulAdd(gv, v, sum); },
          Run<float>{sums.part}, Run<T>{g + r * stride}, Run<T>{y + r * stride});
    }
    if (r % kTerms == kTerms - 1) sums.flush(width);
  }
  sums.flush(width);
  alignas(64) float total[kSoftmaxColumns];
  for (std::int64_t j = 0; j < width; ++j) total[j] = static_cast<float>(sums.whole[j]);
  for (std::int64_t r = 0; r < n; ++r) {
    if (logarithm) {
      map_run(
          d, dx + r * stride, width,
          [&](F32Vec gv, F32Vec v, F32Vec t) HWY_ATTR { return hn::NegMulAdd(exp(v), t, gv); }, Run<T>{g + r * stride},
          Run<T>{y + r * stride}, Run<float>{total});
    } else {
      map_run(
          d, dx + r * stride, width, [&](F32Vec gv, F32Vec v, F32Vec t) HWY_ATTR { return hn::Mul(v, hn::Sub(gv, t)); },
          Run<T>{g + r * stride}, Run<T>{y + r * stride}, Run<float>{total});
    }
  }
}

// f(a number of the storage type).
template <class F>
HWY_INLINE void visit_columns(DType dtype, F&& f) {
  if (dtype == DType::f16) return f(Half());
  if (dtype == DType::bf16) return f(BFloat16());
  f(float());
}

}  // namespace

void columns_forward(DType dtype, const void* x, void* y, std::int64_t n, std::int64_t stride, std::int64_t width,
                     bool logarithm) {
  visit_columns(dtype, [&](auto t) {
    using T = decltype(t);
    forward_columns(static_cast<const T*>(x), static_cast<T*>(y), n, stride, width, logarithm);
  });
}
void columns_backward(DType dtype, const void* g, const void* y, void* dx, std::int64_t n, std::int64_t stride,
                      std::int64_t width, bool logarithm) {
  visit_columns(dtype, [&](auto t) {
    using T = decltype(t);
    backward_columns(static_cast<const T*>(g), static_cast<const T*>(y), static_cast<T*>(dx), n, stride, width,
                     logarithm);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {

HWY_EXPORT(columns_forward);
HWY_EXPORT(columns_backward);

void softmax_columns(DType dtype, const void* x, void* y, std::int64_t n, std::int64_t stride, std::int64_t width,
                     bool logarithm) {
  HWY_DYNAMIC_DISPATCH(columns_forward)(dtype, x, y, n, stride, width, logarithm);
}
void softmax_columns_backward(DType dtype, const void* g, const void* y, void* dx, std::int64_t n, std::int64_t stride,
                              std::int64_t width, bool logarithm) {
  HWY_DYNAMIC_DISPATCH(columns_backward)(dtype, g, y, dx, n, stride, width, logarithm);
}

}  // namespace halfstep::cpu
#endif
