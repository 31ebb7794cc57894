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
#include "halfstep/backends/cpu/row_block.h"

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

HWY_INLINE void softmax_part_inline(const float* x, std::int64_t n, float top, double sum, bool logarithm, float* y) {
  const F32Tag d;
  if (logarithm) {
    const F32Vec t = hn::Set(d, top), l = hn::Set(d, static_cast<float>(std::log(sum)));
    map_run(
        d, y, n, [&](F32Vec v) HWY_ATTR { return hn::Sub(hn::Sub(v, t), l); }, Run(x));
  } else {
    const F32Vec divisor = hn::Set(d, static_cast<float>(sum));
    map_run(
        d, y, n, [&](F32Vec v) HWY_ATTR { return hn::Div(v, divisor); }, Run(y));
  }
}

void softmax_part_of_floats(const float* x, std::int64_t n, float top, double sum, bool logarithm, float* y) {
  softmax_part_inline(x, n, top, sum, logarithm, y);
}
void softmax_rows_of_floats(const float* x, std::int64_t n, std::int64_t rows, bool logarithm, float* y) {
  for (std::int64_t r = 0; r < rows; ++r, x += n, y += n) {
    const float top = max_floats(x, n);
    const double sum = exp_sum_floats(x, n, top, logarithm ? nullptr : y);
    softmax_part_inline(x, n, top, sum, logarithm, y);
  }
}

namespace {

// The sum of f(vectors of a, of b), which is 0 for zeros: blocks of 64 vectors in float32, their sums in float64.
template <class F>
HWY_INLINE double sum_of_two(const float* a, const float* b, std::int64_t count, F&& f) {
  const F32Tag d;
  const std::size_t lanes = hn::Lanes(d), n = static_cast<std::size_t>(count);
  double total = 0;
  for (std::size_t i = 0; i < n;) {
    const std::size_t end = std::min(n, i + 64 * lanes);
    F32Vec sum = hn::Zero(d);
    for (; i + lanes <= end; i += lanes) sum = f(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum);
    if (i < end) sum = f(load_n(d, a + i, end - i), load_n(d, b + i, end - i), sum);
    i = end;
    total += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
  }
  return total;
}

}  // namespace

HWY_INLINE void softmax_gradients_inline(const float* g, const float* y, std::int64_t n, float total, bool logarithm,
                                         float* dx) {
  const F32Tag d;
  const F32Vec t = hn::Set(d, total);
  if (logarithm) {
    map_run(
        d, dx, n, [&](F32Vec gv, F32Vec v) HWY_ATTR { return hn::NegMulAdd(exp(v), t, gv); }, Run(g), Run(y));
  } else {
    map_run(
        d, dx, n, [&](F32Vec gv, F32Vec v) HWY_ATTR { return hn::Mul(v, hn::Sub(gv, t)); }, Run(g), Run(y));
  }
}

void softmax_gradients_of_floats(const float* g, const float* y, std::int64_t n, float total, bool logarithm,
                                 float* dx) {
  softmax_gradients_inline(g, y, n, total, logarithm, dx);
}
void softmax_rows_backward_of_floats(const float* g, const float* y, std::int64_t n, std::int64_t rows, bool logarithm,
                                     float* dx) {
  for (std::int64_t r = 0; r < rows; ++r, g += n, y += n, dx += n) {
    const double total =
        logarithm ? sum_of_two(g, g, n, [](F32Vec v, F32Vec, F32Vec sum) HWY_ATTR { return hn::Add(v, sum); })
                  : sum_of_two(g, y, n, [](F32Vec v, F32Vec w, F32Vec sum) HWY_ATTR { return hn::MulAdd(v, w, sum); });
    softmax_gradients_inline(g, y, n, static_cast<float>(total), logarithm, dx);
  }
}

namespace {

// Operands of map_run: own[i] where labels[i] is the number, else 0; all bits where labels[i] isn't below 0.
struct OwnOf {
  const float* own;
  const std::int32_t* labels;
  std::int32_t number;
  template <class D>
  HWY_INLINE hn::Vec<D> get(D d, std::size_t i) const {
    const hn::RebindToSigned<D> di;
    const auto same = hn::Eq(hn::LoadU(di, labels + i), hn::Set(di, number));
    return hn::IfThenElseZero(hn::RebindMask(d, same), hn::LoadU(d, own + i));
  }
  template <class D>
  HWY_INLINE hn::Vec<D> get_n(D d, std::size_t i, std::size_t n) const {
    const hn::RebindToSigned<D> di;
    const auto same = hn::Eq(hn::MaskedLoad(hn::FirstN(di, n), di, labels + i), hn::Set(di, number));
    return hn::IfThenElseZero(hn::RebindMask(d, same), load_n(d, own + i, n));
  }
};
struct Counted {
  const std::int32_t* labels;
  template <class D>
  HWY_INLINE hn::Vec<D> get(D d, std::size_t i) const {
    const hn::RebindToSigned<D> di;
    return hn::BitCast(d, hn::Not(hn::BroadcastSignBit(hn::LoadU(di, labels + i))));
  }
  template <class D>
  HWY_INLINE hn::Vec<D> get_n(D d, std::size_t i, std::size_t n) const {
    const hn::RebindToSigned<D> di;
    return hn::BitCast(d, hn::Not(hn::BroadcastSignBit(hn::MaskedLoad(hn::FirstN(di, n), di, labels + i))));
  }
};

}  // namespace

void class_gradient_of_floats(const float* x, std::int64_t n, const ClassRow& row, float* to) {
  const F32Tag d;
  const Run shifts(row.shifts), factors(row.factors);
  const OwnOf own{row.own, row.labels, row.number};
  const Counted counted{row.labels};
  if (!row.grads) {
    return map_run(
        d, to, n,
        [](F32Vec v, F32Vec s, F32Vec f, F32Vec o, F32Vec c)
            HWY_ATTR { return hn::And(c, hn::Sub(hn::Mul(exp(hn::Sub(v, s)), f), o)); },
        Run(x), shifts, factors, own, counted);
  }
  map_run(
      d, to, n,
      [share = row.share](F32Vec v, F32Vec s, F32Vec f, F32Vec o, F32Vec c, F32Vec g) HWY_ATTR {
        const F32Vec all = hn::Mul(hn::Set(F32Tag(), share), g);
        return hn::And(c, hn::Sub(hn::Sub(hn::Mul(exp(hn::Sub(v, s)), f), all), o));
      },
      Run(x), shifts, factors, own, counted, Run(row.grads));
}
void log1p_each_float(const float* x, std::int64_t n, float* to) {
  map_run<1>(
      F32Tag(), to, n, [](F32Vec v) HWY_ATTR { return log1p(v); }, Run(x));
}
void exp_add_floats(const float* x, const float* shifts, std::int64_t n, float* sums) {
  map_run(
      F32Tag(), sums, n, [](F32Vec sum, F32Vec v, F32Vec s) HWY_ATTR { return hn::Add(sum, exp(hn::Sub(v, s))); },
      Run(sums), Run(x), Run(shifts));
}
void exp_add_exactly(const float* x, const float* shifts, std::int64_t count, float* sums, float* lost) {
  const F32Tag d;
  const std::size_t lanes = hn::Lanes(d), n = static_cast<std::size_t>(count);
  const auto add = [&](F32Vec v, F32Vec shift, F32Vec& sum, F32Vec& rest) HWY_ATTR {
    const F32Vec term = exp(hn::Sub(v, shift)), total = hn::Add(sum, term);
    const F32Vec of_term = hn::Sub(total, sum), of_sum = hn::Sub(total, of_term);
    rest = hn::Add(rest, hn::Add(hn::Sub(sum, of_sum), hn::Sub(term, of_term)));
    sum = total;
  };
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    F32Vec sum = hn::LoadU(d, sums + i), rest = hn::LoadU(d, lost + i);
    add(hn::LoadU(d, x + i), hn::LoadU(d, shifts + i), sum, rest);
    hn::StoreU(sum, d, sums + i);
    hn::StoreU(rest, d, lost + i);
  }
  if (i < n) {
    F32Vec sum = load_n(d, sums + i, n - i), rest = load_n(d, lost + i, n - i);
    add(load_n(d, x + i, n - i), load_n(d, shifts + i, n - i), sum, rest);
    store_n(sum, d, sums + i, n - i);
    store_n(rest, d, lost + i, n - i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {

HWY_EXPORT(max_floats);
HWY_EXPORT(exp_sum_floats);
HWY_EXPORT(softmax_part_of_floats);
HWY_EXPORT(softmax_rows_of_floats);
HWY_EXPORT(softmax_gradients_of_floats);
HWY_EXPORT(softmax_rows_backward_of_floats);
HWY_EXPORT(class_gradient_of_floats);
HWY_EXPORT(log1p_each_float);
HWY_EXPORT(exp_add_floats);
HWY_EXPORT(exp_add_exactly);

float max_of(const float* x, std::int64_t n) { return HWY_DYNAMIC_DISPATCH(max_floats)(x, n); }
double exp_sum(const float* x, std::int64_t n, float shift, float* terms) {
  return HWY_DYNAMIC_DISPATCH(exp_sum_floats)(x, n, shift, terms);
}
void softmax_part(const float* x, std::int64_t n, float top, double sum, bool logarithm, float* y) {
  HWY_DYNAMIC_DISPATCH(softmax_part_of_floats)(x, n, top, sum, logarithm, y);
}
void softmax_gradients(const float* g, const float* y, std::int64_t n, float total, bool logarithm, float* dx) {
  HWY_DYNAMIC_DISPATCH(softmax_gradients_of_floats)(g, y, n, total, logarithm, dx);
}
void softmax_rows(const float* x, std::int64_t n, std::int64_t rows, bool logarithm, float* y) {
  HWY_DYNAMIC_DISPATCH(softmax_rows_of_floats)(x, n, rows, logarithm, y);
}
void softmax_rows_backward(const float* g, const float* y, std::int64_t n, std::int64_t rows, bool logarithm,
                           float* dx) {
  HWY_DYNAMIC_DISPATCH(softmax_rows_backward_of_floats)(g, y, n, rows, logarithm, dx);
}
void class_gradient(const float* x, std::int64_t n, const ClassRow& row, float* to) {
  HWY_DYNAMIC_DISPATCH(class_gradient_of_floats)(x, n, row, to);
}
void log1p_each(const float* x, std::int64_t n, float* to) { HWY_DYNAMIC_DISPATCH(log1p_each_float)(x, n, to); }
void exp_add(const float* x, const float* shifts, std::int64_t n, float* sums) {
  HWY_DYNAMIC_DISPATCH(exp_add_floats)(x, shifts, n, sums);
}
void exp_add(const float* x, const float* shifts, std::int64_t n, float* sums, float* lost) {
  HWY_DYNAMIC_DISPATCH(exp_add_exactly)(x, shifts, n, sums, lost);
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
void softmax_part(const double* x, std::int64_t n, double top, double sum, bool logarithm, double* y) {
  const double of_sum = logarithm ? std::log(sum) : sum;
  for (std::int64_t i = 0; i < n; ++i) y[i] = logarithm ? (x[i] - top) - of_sum : y[i] / of_sum;
}
void softmax_rows(const double* x, std::int64_t n, std::int64_t rows, bool logarithm, double* y) {
  for (std::int64_t r = 0; r < rows; ++r, x += n, y += n) {
    const double top = max_of(x, n);
    const double sum = exp_sum(x, n, top, logarithm ? nullptr : y);
    softmax_part(x, n, top, sum, logarithm, y);
  }
}
void softmax_gradients(const double* g, const double* y, std::int64_t n, double total, bool logarithm, double* dx) {
  for (std::int64_t i = 0; i < n; ++i) dx[i] = logarithm ? g[i] - std::exp(y[i]) * total : y[i] * (g[i] - total);
}
void softmax_rows_backward(const double* g, const double* y, std::int64_t n, std::int64_t rows, bool logarithm,
                           double* dx) {
  for (std::int64_t r = 0; r < rows; ++r, g += n, y += n, dx += n) {
    softmax_gradients(g, y, n, logarithm ? sum_of(g, n) : dot_of(g, y, n), logarithm, dx);
  }
}

}  // namespace halfstep::cpu
#endif
