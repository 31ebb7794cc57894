// SPDX-License-Identifier: Apache-2.0
// Passes over one row for layer_norm, rms_norm and group_norm, in vectors. Rows are of f64, f32, f16 or bf16 and next
// to each other; parameters, statistics and sums over rows are of the dtype that is computed in, float64 for f64 and
// else float32. Sums over a row add at most 64 terms in float32 before they go on in float64.
#pragma once

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

/// to[i] = the sum over r < rows of from[r * stride + i], added in float64 in that order. f64 or f32.
void column_sums(DType dtype, const void* from, std::int64_t rows, std::int64_t stride, std::int64_t n, void* to);

}  // namespace halfstep::cpu
