// SPDX-License-Identifier: Apache-2.0
// Pieces of rows to and from float32 (float64 for float64), and sums over them.
#pragma once

#include <cstdint>
#include <limits>

#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/backends/cpu/reduce_plan.h"

namespace halfstep::cpu {

/// Elements of any floating dtype and stride: loops for each, compiled once.
void read_strided(const TensorView& x, std::int64_t at, std::int64_t stride, std::int64_t n, float* to);
void read_strided(const TensorView& x, std::int64_t at, std::int64_t stride, std::int64_t n, double* to);
void write_strided(TensorView& x, std::int64_t at, std::int64_t stride, std::int64_t n, const float* from);
void write_strided(TensorView& x, std::int64_t at, std::int64_t stride, std::int64_t n, const double* from);

/// Whether n elements, `stride` apart, are converted in vectors: fewer take less time one by one than that call.
inline bool in_vectors(std::int64_t stride, std::int64_t n) { return stride == 1 && n >= 8; }

/// `n` elements of `x` from element `at` on, `stride` apart (a floating dtype).
inline void read_row(const TensorView& x, std::int64_t at, std::int64_t stride, std::int64_t n, float* to) {
  if (x.dtype != DType::f64 && in_vectors(stride, n)) return load_floats(x.dtype, x.data, at, n, to);
  read_strided(x, at, stride, n, to);
}
inline void read_row(const TensorView& x, std::int64_t at, std::int64_t stride, std::int64_t n, double* to) {
  const void* const from = element(x.dtype, static_cast<const void*>(x.data), at);
  if (in_vectors(stride, n)) return load_doubles(x.dtype, from, n, to);
  read_strided(x, at, stride, n, to);
}
/// The reverse, rounded once.
inline void write_row(TensorView& x, std::int64_t at, std::int64_t stride, std::int64_t n, const float* from) {
  if (x.dtype != DType::f64 && in_vectors(stride, n)) return store_floats(x.dtype, x.data, at, n, from);
  write_strided(x, at, stride, n, from);
}
inline void write_row(TensorView& x, std::int64_t at, std::int64_t stride, std::int64_t n, const double* from) {
  if (in_vectors(stride, n)) return store_doubles(x.dtype, element(x.dtype, x.data, at), n, from);
  write_strided(x, at, stride, n, from);
}

/// The sum of f(i) for i < n: 16 sums side by side, at most 64 terms in each before they are added in float64.
template <class C, class F>
double sum_terms(std::int64_t n, F&& f) {
  constexpr int kSide = 16;
  double total = 0;
  std::int64_t i = 0;
  while (i + kSide <= n) {
    const std::int64_t end = i + (n - i < 64 * kSide ? (n - i) / kSide * kSide : 64 * kSide);
    C side[kSide] = {};
    for (; i < end; i += kSide) {
      for (int j = 0; j < kSide; ++j) side[j] += f(i + j);
    }
    for (int j = 0; j < kSide; ++j) total += static_cast<double>(side[j]);
  }
  C rest = 0;
  for (; i < n; ++i) rest += f(i);
  return total + static_cast<double>(rest);
}
template <class C>
double sum_of(const C* x, std::int64_t n) {
  return sum_terms<C>(n, [x](std::int64_t i) { return x[i]; });
}
template <class C>
double dot_of(const C* x, const C* y, std::int64_t n) {
  return sum_terms<C>(n, [x, y](std::int64_t i) { return x[i] * y[i]; });
}

}  // namespace halfstep::cpu
