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
/// terms[i] = exp(x[i] - shifts[i]), for columns that lie side by side; `terms` may be x.
void exp_each(const float* x, const float* shifts, std::int64_t n, float* terms);
/// sums[i] += exp(x[i] - shifts[i]).
void exp_add(const float* x, const float* shifts, std::int64_t n, float* sums);

}  // namespace halfstep::cpu
