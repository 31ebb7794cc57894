// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/exp_block.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "halfstep/backends/cpu/exp_block.h"
#include "halfstep/backends/cpu/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {

float max_floats(const float* x, std::int64_t count) {
  const F32Tag d;
  const std::size_t lanes = hn::Lanes(d), n = static_cast<std::size_t>(count);
  const F32Vec lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  F32Vec top = lowest, nan = hn::Zero(d);
  std::size_t i = 0;
  const auto take = [&](F32Vec v) {
    top = hn::Max(v, top);
    nan = hn::IfThenElse(hn::IsNaN(v), v, nan);  // Max may drop one
  };
  for (; i + lanes <= n; i += lanes) take(hn::LoadU(d, x + i));
  if (i < n) take(hn::IfThenElse(hn::FirstN(d, n - i), load_n(d, x + i, n - i), lowest));
  if (!hn::AllFalse(d, hn::IsNaN(nan))) return std::numeric_limits<float>::quiet_NaN();
  return hn::GetLane(hn::MaxOfLanes(d, top));
}

double exp_sum_floats(const float* x, std::int64_t count, float shift, float* terms) {
  const F32Tag d;
  const std::size_t lanes = hn::Lanes(d), n = static_cast<std::size_t>(count);
  const F32Vec s = hn::Set(d, shift);
  double total = 0;
  for (std::size_t block = 0; block < n;) {
    // Blocks of 64 vectors in float32, their sums in float64.
    const std::size_t end = std::min(n, block + 64 * lanes);
    F32Vec sum = hn::Zero(d);
    std::size_t i = block;
    for (; i + lanes <= end; i += lanes) {
      const F32Vec e = exp(hn::Sub(hn::LoadU(d, x + i), s));
      if (terms) hn::StoreU(e, d, terms + i);
      sum = hn::Add(sum, e);
    }
    if (i < end) {
      const F32Vec e = exp(hn::Sub(load_n(d, x + i, end - i), s));
      if (terms) store_n(e, d, terms + i, end - i);
      sum = hn::Add(sum, hn::IfThenElseZero(hn::FirstN(d, end - i), e));
    }
    total += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
    block = end;
  }
  return total;
}

void exp_each_float(const float* x, const float* shifts, std::int64_t n, float* terms) {
  map_run(
      F32Tag(), terms, n, [](F32Vec v, F32Vec s) HWY_ATTR { return exp(hn::Sub(v, s)); }, Run(x), Run(shifts));
}
void exp_add_floats(const float* x, const float* shifts, std::int64_t n, float* sums) {
  map_run(
      F32Tag(), sums, n, [](F32Vec sum, F32Vec v, F32Vec s) HWY_ATTR { return hn::Add(sum, exp(hn::Sub(v, s))); },
      Run(sums), Run(x), Run(shifts));
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {

HWY_EXPORT(max_floats);
HWY_EXPORT(exp_sum_floats);
HWY_EXPORT(exp_each_float);
HWY_EXPORT(exp_add_floats);

float max_of(const float* x, std::int64_t n) { return HWY_DYNAMIC_DISPATCH(max_floats)(x, n); }
double exp_sum(const float* x, std::int64_t n, float shift, float* terms) {
  return HWY_DYNAMIC_DISPATCH(exp_sum_floats)(x, n, shift, terms);
}
void exp_each(const float* x, const float* shifts, std::int64_t n, float* terms) {
  HWY_DYNAMIC_DISPATCH(exp_each_float)(x, shifts, n, terms);
}
void exp_add(const float* x, const float* shifts, std::int64_t n, float* sums) {
  HWY_DYNAMIC_DISPATCH(exp_add_floats)(x, shifts, n, sums);
}

double max_of(const double* x, std::int64_t n) {
  double top = -std::numeric_limits<double>::infinity();
  for (std::int64_t i = 0; i < n; ++i) {
    if (std::isnan(x[i])) return x[i];
    top = std::max(top, x[i]);
  }
  return top;
}
double exp_sum(const double* x, std::int64_t n, double shift, double* terms) {
  double total = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const double e = std::exp(x[i] - shift);
    if (terms) terms[i] = e;
    total += e;
  }
  return total;
}

}  // namespace halfstep::cpu
#endif
