// SPDX-License-Identifier: Apache-2.0
// Exponentials of blocks of values that lie next to each other, for softmax and the losses built on it.
#pragma once

#include <cstdint>

namespace halfstep::cpu {

/// The largest of n values, -infinity for none; NaN where one is NaN.
float max_of(const float* x, std::int64_t n);
double max_of(const double* x, std::int64_t n);
/// The sum of exp(x[i] - shift); each term is also written to `terms[i]` unless that is null (it may be x).
double exp_sum(const float* x, std::int64_t n, float shift, float* terms);
double exp_sum(const double* x, std::int64_t n, double shift, double* terms);
/// Of n values of a row with the largest value `top` and the exponentials' sum: softmax, whose exponentials are in y,
/// or its logarithm, y = x - top - log(sum).
void softmax_part(const float* x, std::int64_t n, float top, double sum, bool logarithm, float* y);
void softmax_part(const double* x, std::int64_t n, double top, double sum, bool logarithm, double* y);
/// softmax of `rows` rows of n values, one behind the other, or its logarithm; y may be x.
void softmax_rows(const float* x, std::int64_t n, std::int64_t rows, bool logarithm, float* y);
void softmax_rows(const double* x, std::int64_t n, std::int64_t rows, bool logarithm, double* y);
/// Gradients of n values of a row from those of the results y: y (g - total), where total is the row's sum of g y, or
/// of the logarithm g - exp(y) total, where it is the sum of g. dx may be g.
void softmax_gradients(const float* g, const float* y, std::int64_t n, float total, bool logarithm, float* dx);
void softmax_gradients(const double* g, const double* y, std::int64_t n, double total, bool logarithm, double* dx);
/// The same of `rows` rows of n values, one behind the other, with their totals.
void softmax_rows_backward(const float* g, const float* y, std::int64_t n, std::int64_t rows, bool logarithm,
                           float* dx);
void softmax_rows_backward(const double* g, const double* y, std::int64_t n, std::int64_t rows, bool logarithm,
                           double* dx);
/// What the gradient by a row of logits of one class is made of, a sample each.
struct ClassRow {
  const float *shifts, *factors;
  const float* own;            ///< what the class of a sample's label has less
  const std::int32_t* labels;  ///< below 0: no gradient, whatever the logit is
  std::int32_t number;         ///< of this class
  const float* grads;          ///< null without label smoothing
  float share;
};
/// to[i] = exp(x[i] - shifts[i]) factors[i] - share grads[i] - own[i], the last where labels[i] is the class's number.
void class_gradient(const float* x, std::int64_t n, const ClassRow& row, float* to);
/// to[i] = log(1 + x[i]), within two units in the last place.
void log1p_each(const float* x, std::int64_t n, float* to);
/// sums[i] += exp(x[i] - shifts[i]), for columns that lie side by side.
void exp_add(const float* x, const float* shifts, std::int64_t n, float* sums);
/// The same with what each addition rounds away, which is added up in `lost` (Knuth's two-sum).
void exp_add(const float* x, const float* shifts, std::int64_t n, float* sums, float* lost);

}  // namespace halfstep::cpu
