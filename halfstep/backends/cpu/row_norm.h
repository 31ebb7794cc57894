// SPDX-License-Identifier: Apache-2.0
// Passes over one row for layer_norm, rms_norm and group_norm, in vectors. Rows are of f64, f32, f16 or bf16 and next
// to each other; parameters, statistics and sums over rows are of the dtype that is computed in, float64 for f64 and
// else float32. Sums over a row add at most 64 terms in float32 before they go on in float64.
#pragma once

#include <cmath>
#include <cstdint>

#include "halfstep/core/dtype.h"

namespace halfstep::cpu {

/// The sum of n values.
double row_sum(DType dtype, const void* x, std::int64_t n);

/// Adds the sums of (x - mean)^2 and of x - mean. `mean` has the precision that is computed in.
struct RowDeviations {
  double squares = 0, rest = 0;
};
void add_deviations(DType dtype, const void* x, std::int64_t n, double mean, RowDeviations& sums);

/// y = ((x - mean) - shift) * rstd * weight + bias; `weight` and `bias` may be null. y may be x.
struct RowScale {
  double mean, shift, rstd;
};
void normalize_row(DType dtype, const void* x, std::int64_t n, const RowScale& scale, const void* weight,
                   const void* bias, void* y);

/// All of that for `rows` rows of n elements behind each other, with the same weight and bias: mean + shift and rstd go
/// to `means` and `rstds`, of the dtype that is computed in. `centre`: whether the mean is taken away; else both are 0.
struct RowsNorm {
  std::int64_t n;
  bool centre;
  double epsilon;
  const void *weight, *bias;
};
void normalize_rows(DType dtype, const void* x, std::int64_t rows, const RowsNorm& norm, void* y, void* means,
                    void* rstds);
/// The scale of a row whose sums are known. Where all elements are nearly the same, rounding may leave a variance below
/// 0. NaN stays.
template <class C>
RowScale row_scale(const RowDeviations& sums, double mean, double n, bool centre, double epsilon) {
  const double shift = centre ? sums.rest / n : 0;  // what rounding the mean lost
  const double difference = sums.squares / n - shift * shift;
  const C rstd = static_cast<C>(1 / std::sqrt((difference < 0 ? 0 : difference) + epsilon));
  return {mean, shift, static_cast<double>(rstd)};
}

/// With z = (x - mean) * rstd and h = g * weight: adds the sums of h and h z over the row, and g z and g to each
/// element of `dweight` and `dbias`. `weight` may be null, and so may `dweight` and `dbias` together.
struct RowGradientSums {
  double h = 0, hz = 0;
};
void add_gradient_sums(DType dtype, const void* g, const void* x, std::int64_t n, double mean, double rstd,
                       const void* weight, void* dweight, void* dbias, RowGradientSums& sums);

/// dx = rstd * (h - mean_h - z * mean_hz); `weight` may be null. dx may be g or x.
void row_gradient(DType dtype, const void* g, const void* x, std::int64_t n, double mean, double rstd,
                  const void* weight, double mean_h, double mean_hz, void* dx);

/// Both of these for `rows` rows of n elements behind each other, with one weight. dx may be null.
struct RowsGradient {
  std::int64_t n;
  bool centre;  ///< whether the mean was taken away; else mean_h is 0
  const void* weight;
  void *dweight, *dbias;
};
void gradient_rows(DType dtype, const void* g, const void* x, std::int64_t rows, const void* means, const void* rstds,
                   const RowsGradient& norm, void* dx);

/// to[i] = the sum over r < rows of from[r * stride + i], added in float64 in that order. f64 or f32.
void column_sums(DType dtype, const void* from, std::int64_t rows, std::int64_t stride, std::int64_t n, void* to);

}  // namespace halfstep::cpu
