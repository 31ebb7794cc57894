// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/row_norm.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>

#include "halfstep/backends/cpu/row_norm.h"
#include "halfstep/backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

// The lanes of a vector, in float64.
HWY_INLINE F64Vec widened(F64Vec v) { return v; }
HWY_INLINE F64Vec widened(F32Vec v) {
  const F64Tag d64;
  const hn::Rebind<float, F64Tag> half;
  return hn::Add(hn::PromoteTo(d64, hn::LowerHalf(half, v)), hn::PromoteTo(d64, hn::UpperHalf(half, v)));
}

// body(i, first) adds the terms of the vector at i to the sums of its own chain (`first`: the first of two); `last`
// those of the n - i elements that are left; `flush` brings the sums to float64.
template <class D, class Body, class Last, class Flush>
HWY_INLINE void in_two_chains(D d, std::size_t n, Body&& body, Last&& last, Flush&& flush) {
  const std::size_t lanes = hn::Lanes(d), block = 2 * 63 * lanes;
  std::size_t i = 0;
  while (i < n) {
    const std::size_t end = std::min(n, i + block);
    for (; i + 2 * lanes <= end; i += 2 * lanes) {
      body(i, std::true_type());
      body(i + lanes, std::false_type());
    }
    if (end == n) {
      if (i + lanes <= n) {
        body(i, std::true_type());
        i += lanes;
      }
      if (i < n) last(i);
      i = n;
    }
    flush();
  }
}

template <class T>
double sum_of_row(const T* x, std::size_t n) {
  using D = ComputeTag<T>;
  const D d;
  hn::Vec<D> s0 = hn::Zero(d), s1 = s0;
  F64Vec total = hn::Zero(F64Tag());
  in_two_chains(
      d, n,
      [&](std::size_t i, auto first) {
        if constexpr (decltype(first)::value) {
          s0 = hn::Add(s0, load(d, x + i));
        } else {
          s1 = hn::Add(s1, load(d, x + i));
        }
      },
      [&](std::size_t i) { s1 = hn::Add(s1, load_n(d, x + i, n - i)); },
      [&] {
        total = hn::Add(total, hn::Add(widened(s0), widened(s1)));
        s0 = s1 = hn::Zero(d);
      });
  return hn::GetLane(hn::SumOfLanes(F64Tag(), total));
}

template <class T>
void deviations_of_row(const T* x, std::size_t n, double mean, RowDeviations& sums) {
  using D = ComputeTag<T>;
  const D d;
  const auto m = hn::Set(d, static_cast<ComputeScalar<T>>(mean));
  hn::Vec<D> s0 = hn::Zero(d), s1 = s0, r0 = s0, r1 = s0;
  F64Vec squares = hn::Zero(F64Tag()), rest = squares;
  in_two_chains(
      d, n,
      [&](std::size_t i, auto first) {
        const auto v = hn::Sub(load(d, x + i), m);
        if constexpr (decltype(first)::value) {
          s0 = hn::MulAdd(v, v, s0);
          r0 = hn::Add(r0, v);
        } else {
          s1 = hn::MulAdd(v, v, s1);
          r1 = hn::Add(r1, v);
        }
      },
      [&](std::size_t i) {
        const auto v = hn::IfThenElseZero(hn::FirstN(d, n - i), hn::Sub(load_n(d, x + i, n - i), m));
        s1 = hn::MulAdd(v, v, s1);
        r1 = hn::Add(r1, v);
      },
      [&] {
        squares = hn::Add(squares, hn::Add(widened(s0), widened(s1)));
        rest = hn::Add(rest, hn::Add(widened(r0), widened(r1)));
        s0 = s1 = r0 = r1 = hn::Zero(d);
      });
  sums.squares += hn::GetLane(hn::SumOfLanes(F64Tag(), squares));
  sums.rest += hn::GetLane(hn::SumOfLanes(F64Tag(), rest));
}

template <class T, class C>
void normalize(const T* x, std::int64_t n, const RowScale& scale, const C* w, const C* b, T* y) {
  const ComputeTag<T> d;
  const auto mean = hn::Set(d, static_cast<C>(scale.mean)), shift = hn::Set(d, static_cast<C>(scale.shift)),
             rstd = hn::Set(d, static_cast<C>(scale.rstd));
  const auto z = [&](auto v) HWY_ATTR { return hn::Mul(hn::Sub(hn::Sub(v, mean), shift), rstd); };
  if (w && b) {
    map_run(
        d, y, n, [&](auto v, auto f, auto o) HWY_ATTR { return hn::MulAdd(z(v), f, o); }, Run(x), Run(w), Run(b));
  } else if (w) {
    map_run(
        d, y, n, [&](auto v, auto f) HWY_ATTR { return hn::Mul(z(v), f); }, Run(x), Run(w));
  } else if (b) {
    map_run(
        d, y, n, [&](auto v, auto o) HWY_ATTR { return hn::Add(z(v), o); }, Run(x), Run(b));
  } else {
    map_run(d, y, n, z, Run(x));
  }
}

template <class T, class C>
void normalize_rows_of(const T* x, std::int64_t rows, const RowsNorm& norm, T* y, C* means, C* rstds) {
  const auto n = static_cast<std::size_t>(norm.n);
  const auto count = static_cast<double>(norm.n);
  for (std::int64_t r = 0; r < rows; ++r, x += n, y += n) {
    const C mean = norm.centre ? static_cast<C>(sum_of_row(x, n) / count) : C(0);
    RowDeviations sums;
    deviations_of_row(x, n, static_cast<double>(mean), sums);
    const RowScale scale = row_scale<C>(sums, static_cast<double>(mean), count, norm.centre, norm.epsilon);
    means[r] = mean + static_cast<C>(scale.shift);
    rstds[r] = static_cast<C>(scale.rstd);
    normalize(x, norm.n, scale, static_cast<const C*>(norm.weight), static_cast<const C*>(norm.bias), y);
  }
}

template <bool kWeight, bool kParameters, class T, class C>
void gradient_sums(const T* g, const T* x, std::size_t n, double mean, double rstd, const C* w, C* dw, C* db,
                   RowGradientSums& sums) {
  using D = ComputeTag<T>;
  const D d;
  const auto m = hn::Set(d, static_cast<C>(mean)), s = hn::Set(d, static_cast<C>(rstd));
  hn::Vec<D> h0 = hn::Zero(d), h1 = h0, z0 = h0, z1 = h0;
  F64Vec sum_h = hn::Zero(F64Tag()), sum_hz = sum_h;
  in_two_chains(
      d, n,
      [&](std::size_t i, auto first) {
        const auto gv = load(d, g + i), z = hn::Mul(hn::Sub(load(d, x + i), m), s);
        auto h = gv;
        if constexpr (kWeight) h = hn::Mul(gv, load(d, w + i));
        if constexpr (kParameters) {
          store(hn::MulAdd(gv, z, load(d, dw + i)), d, dw + i);
          store(hn::Add(gv, load(d, db + i)), d, db + i);
        }
        if constexpr (decltype(first)::value) {
          h0 = hn::Add(h0, h);
          z0 = hn::MulAdd(h, z, z0);
        } else {
          h1 = hn::Add(h1, h);
          z1 = hn::MulAdd(h, z, z1);
        }
      },
      [&](std::size_t i) {
        const std::size_t left = n - i;
        // Lanes behind the end would hold -mean * rstd, which may be infinite.
        const auto gv = load_n(d, g + i, left),
                   z = hn::IfThenElseZero(hn::FirstN(d, left), hn::Mul(hn::Sub(load_n(d, x + i, left), m), s));
        auto h = gv;
        if constexpr (kWeight) h = hn::Mul(gv, load_n(d, w + i, left));
        if constexpr (kParameters) {
          store_n(hn::MulAdd(gv, z, load_n(d, dw + i, left)), d, dw + i, left);
          store_n(hn::Add(gv, load_n(d, db + i, left)), d, db + i, left);
        }
        h1 = hn::Add(h1, h);
        z1 = hn::MulAdd(h, z, z1);
      },
      [&] {
        sum_h = hn::Add(sum_h, hn::Add(widened(h0), widened(h1)));
        sum_hz = hn::Add(sum_hz, hn::Add(widened(z0), widened(z1)));
        h0 = h1 = z0 = z1 = hn::Zero(d);
      });
  sums.h += hn::GetLane(hn::SumOfLanes(F64Tag(), sum_h));
  sums.hz += hn::GetLane(hn::SumOfLanes(F64Tag(), sum_hz));
}

template <class T, class C>
void gradient(const T* g, const T* x, std::int64_t n, double mean, double rstd, const C* w, double mean_h,
              double mean_hz, T* dx) {
  const ComputeTag<T> d;
  const auto m = hn::Set(d, static_cast<C>(mean)), s = hn::Set(d, static_cast<C>(rstd)),
             mh = hn::Set(d, static_cast<C>(mean_h)), mhz = hn::Set(d, static_cast<C>(mean_hz));
  const auto result = [&](auto h, auto v) HWY_ATTR {
    const auto z = hn::Mul(hn::Sub(v, m), s);
    return hn::Mul(s, hn::NegMulAdd(z, mhz, hn::Sub(h, mh)));
  };
  if (w) {
    map_run(
        d, dx, n, [&](auto gv, auto v, auto f) HWY_ATTR { return result(hn::Mul(gv, f), v); }, Run(g), Run(x), Run(w));
  } else {
    map_run(d, dx, n, result, Run(g), Run(x));
  }
}

template <bool kWeight, bool kParameters, class T, class C>
void gradient_rows_of(const T* g, const T* x, std::int64_t rows, const C* means, const C* rstds,
                      const RowsGradient& norm, T* dx) {
  const auto n = static_cast<std::size_t>(norm.n);
  const auto count = static_cast<double>(norm.n);
  const C* w = static_cast<const C*>(norm.weight);
  for (std::int64_t r = 0; r < rows; ++r, g += n, x += n) {
    const double mean = static_cast<double>(means[r]), rstd = static_cast<double>(rstds[r]);
    RowGradientSums sums;
    gradient_sums<kWeight, kParameters>(g, x, n, mean, rstd, w, static_cast<C*>(norm.dweight),
                                        static_cast<C*>(norm.dbias), sums);
    if (!dx) continue;
    gradient(g, x, norm.n, mean, rstd, w, norm.centre ? sums.h / count : 0, sums.hz / count, dx);
    dx += n;
  }
}

// f(whether there is a weight, whether there are sums over rows), as types.
template <class F>
HWY_INLINE void visit_parameters(const void* weight, const void* dweight, F&& f) {
  if (weight && dweight) return f(std::true_type(), std::true_type());
  if (weight) return f(std::true_type(), std::false_type());
  if (dweight) return f(std::false_type(), std::true_type());
  f(std::false_type(), std::false_type());
}

// f(zero of the storage type, zero of the type that is computed in).
template <class F>
HWY_INLINE void visit_rows(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f64:
      return f(double(), double());
    case DType::f16:
      return f(Half(), float());
    case DType::bf16:
      return f(BFloat16(), float());
    default:
      return f(float(), float());
  }
}

template <class C>
void column_sums_of(const C* from, std::int64_t rows, std::int64_t stride, std::int64_t n, C* to) {
  constexpr std::int64_t kBlock = 64;
  for (std::int64_t at = 0; at < n; at += kBlock) {
    const std::int64_t count = std::min(kBlock, n - at);
    double total[kBlock] = {};
    for (std::int64_t r = 0; r < rows; ++r) {
      const C* row = from + r * stride + at;
      for (std::int64_t i = 0; i < count; ++i) total[i] += static_cast<double>(row[i]);
    }
    for (std::int64_t i = 0; i < count; ++i) to[at + i] = static_cast<C>(total[i]);
  }
}

}  // namespace

void row_sum_kernel(DType dtype, const void* x, std::int64_t n, double* sum) {
  visit_rows(dtype, [&](auto t, auto) {
    using T = decltype(t);
    *sum = sum_of_row(static_cast<const T*>(x), static_cast<std::size_t>(n));
  });
}
void deviations_kernel(DType dtype, const void* x, std::int64_t n, double mean, RowDeviations& sums) {
  visit_rows(dtype, [&](auto t, auto) {
    using T = decltype(t);
    deviations_of_row(static_cast<const T*>(x), static_cast<std::size_t>(n), mean, sums);
  });
}
void normalize_kernel(DType dtype, const void* x, std::int64_t n, const RowScale& scale, const void* weight,
                      const void* bias, void* y) {
  visit_rows(dtype, [&](auto t, auto c) {
    using T = decltype(t);
    using C = decltype(c);
    normalize(static_cast<const T*>(x), n, scale, static_cast<const C*>(weight), static_cast<const C*>(bias),
              static_cast<T*>(y));
  });
}
void normalize_rows_kernel(DType dtype, const void* x, std::int64_t rows, const RowsNorm& norm, void* y, void* means,
                           void* rstds) {
  visit_rows(dtype, [&](auto t, auto c) {
    using T = decltype(t);
    using C = decltype(c);
    normalize_rows_of(static_cast<const T*>(x), rows, norm, static_cast<T*>(y), static_cast<C*>(means),
                      static_cast<C*>(rstds));
  });
}
void gradient_sums_kernel(DType dtype, const void* g, const void* x, std::int64_t n, double mean, double rstd,
                          const void* weight, void* dweight, void* dbias, RowGradientSums& sums) {
  visit_rows(dtype, [&](auto t, auto c) {
    using T = decltype(t);
    using C = decltype(c);
    visit_parameters(weight, dweight, [&](auto has_weight, auto has_parameters) {
      gradient_sums<decltype(has_weight)::value, decltype(has_parameters)::value>(
          static_cast<const T*>(g), static_cast<const T*>(x), static_cast<std::size_t>(n), mean, rstd,
          static_cast<const C*>(weight), static_cast<C*>(dweight), static_cast<C*>(dbias), sums);
    });
  });
}
void gradient_rows_kernel(DType dtype, const void* g, const void* x, std::int64_t rows, const void* means,
                          const void* rstds, const RowsGradient& norm, void* dx) {
  visit_rows(dtype, [&](auto t, auto c) {
    using T = decltype(t);
    using C = decltype(c);
    visit_parameters(norm.weight, norm.dweight, [&](auto has_weight, auto has_parameters) {
      gradient_rows_of<decltype(has_weight)::value, decltype(has_parameters)::value>(
          static_cast<const T*>(g), static_cast<const T*>(x), rows, static_cast<const C*>(means),
          static_cast<const C*>(rstds), norm, static_cast<T*>(dx));
    });
  });
}
void gradient_kernel(DType dtype, const void* g, const void* x, std::int64_t n, double mean, double rstd,
                     const void* weight, double mean_h, double mean_hz, void* dx) {
  visit_rows(dtype, [&](auto t, auto c) {
    using T = decltype(t);
    using C = decltype(c);
    gradient(static_cast<const T*>(g), static_cast<const T*>(x), n, mean, rstd, static_cast<const C*>(weight), mean_h,
             mean_hz, static_cast<T*>(dx));
  });
}
void column_sums_kernel(DType dtype, const void* from, std::int64_t rows, std::int64_t stride, std::int64_t n,
                        void* to) {
  if (dtype == DType::f64) {
    column_sums_of(static_cast<const double*>(from), rows, stride, n, static_cast<double*>(to));
  } else {
    column_sums_of(static_cast<const float*>(from), rows, stride, n, static_cast<float*>(to));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {

HWY_EXPORT(row_sum_kernel);
HWY_EXPORT(deviations_kernel);
HWY_EXPORT(normalize_kernel);
HWY_EXPORT(normalize_rows_kernel);
HWY_EXPORT(gradient_sums_kernel);
HWY_EXPORT(gradient_kernel);
HWY_EXPORT(gradient_rows_kernel);
HWY_EXPORT(column_sums_kernel);

double row_sum(DType dtype, const void* x, std::int64_t n) {
  double sum = 0;
  HWY_DYNAMIC_DISPATCH(row_sum_kernel)(dtype, x, n, &sum);
  return sum;
}
void add_deviations(DType dtype, const void* x, std::int64_t n, double mean, RowDeviations& sums) {
  HWY_DYNAMIC_DISPATCH(deviations_kernel)(dtype, x, n, mean, sums);
}
void normalize_row(DType dtype, const void* x, std::int64_t n, const RowScale& scale, const void* weight,
                   const void* bias, void* y) {
  HWY_DYNAMIC_DISPATCH(normalize_kernel)(dtype, x, n, scale, weight, bias, y);
}
void normalize_rows(DType dtype, const void* x, std::int64_t rows, const RowsNorm& norm, void* y, void* means,
                    void* rstds) {
  HWY_DYNAMIC_DISPATCH(normalize_rows_kernel)(dtype, x, rows, norm, y, means, rstds);
}
void add_gradient_sums(DType dtype, const void* g, const void* x, std::int64_t n, double mean, double rstd,
                       const void* weight, void* dweight, void* dbias, RowGradientSums& sums) {
  HWY_DYNAMIC_DISPATCH(gradient_sums_kernel)(dtype, g, x, n, mean, rstd, weight, dweight, dbias, sums);
}
void row_gradient(DType dtype, const void* g, const void* x, std::int64_t n, double mean, double rstd,
                  const void* weight, double mean_h, double mean_hz, void* dx) {
  HWY_DYNAMIC_DISPATCH(gradient_kernel)(dtype, g, x, n, mean, rstd, weight, mean_h, mean_hz, dx);
}
void gradient_rows(DType dtype, const void* g, const void* x, std::int64_t rows, const void* means, const void* rstds,
                   const RowsGradient& norm, void* dx) {
  HWY_DYNAMIC_DISPATCH(gradient_rows_kernel)(dtype, g, x, rows, means, rstds, norm, dx);
}
void column_sums(DType dtype, const void* from, std::int64_t rows, std::int64_t stride, std::int64_t n, void* to) {
  HWY_DYNAMIC_DISPATCH(column_sums_kernel)(dtype, from, rows, stride, n, to);
}

}  // namespace halfstep::cpu
#endif
