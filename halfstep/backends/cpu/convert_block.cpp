// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/convert_block.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {

template <class From, class To>
void convert_run(const From* from, std::int64_t n, To* to) {
  map_run(
      F32Tag(), to, n, [](auto v) { return v; }, Run(from));
}

void load_floats(DType dtype, const void* from, std::int64_t n, float* to) {
  if (dtype == DType::f16) return convert_run(static_cast<const Half*>(from), n, to);
  if (dtype == DType::bf16) return convert_run(static_cast<const BFloat16*>(from), n, to);
  std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
}

void store_floats(DType dtype, void* to, std::int64_t n, const float* from) {
  if (dtype == DType::f16) return convert_run(from, n, static_cast<Half*>(to));
  if (dtype == DType::bf16) return convert_run(from, n, static_cast<BFloat16*>(to));
  std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
}

template <class From>
void add_run(const From* from, std::int64_t n, float factor, float* sums) {
  const F32Tag d;
  const F32Vec f = hn::Set(d, factor);
  map_run(
      d, sums, n, [&](F32Vec v, F32Vec sum) HWY_ATTR { return hn::Add(sum, hn::Mul(f, v)); }, Run(from), Run(sums));
}

void add_floats(DType dtype, const void* from, std::int64_t n, float factor, float* sums) {
  if (dtype == DType::f16) return add_run(static_cast<const Half*>(from), n, factor, sums);
  if (dtype == DType::bf16) return add_run(static_cast<const BFloat16*>(from), n, factor, sums);
  add_run(static_cast<const float*>(from), n, factor, sums);
}

template <class From>
void widen_run(const From* from, std::int64_t count, double* to) {
  const F64Tag d;
  const hn::Rebind<float, F64Tag> f;
  const std::size_t lanes = hn::Lanes(d), n = static_cast<std::size_t>(count);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) store(hn::PromoteTo(d, load(f, from + i)), d, to + i);
  for (; i < n; ++i) to[i] = convert<double>(from[i]);
}

void load_doubles(DType dtype, const void* from, std::int64_t n, double* to) {
  if (dtype == DType::f16) return widen_run(static_cast<const Half*>(from), n, to);
  if (dtype == DType::bf16) return widen_run(static_cast<const BFloat16*>(from), n, to);
  if (dtype == DType::f32) return widen_run(static_cast<const float*>(from), n, to);
  std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(double));
}

// Rounded to odd: what is no float becomes the one of its two neighbours whose last bit is 1, so that rounding again to
// a type with fewer bits gives what rounding the double to it would (Boldo and Melquiond, 2008).
void round_to_odd(const double* from, std::int64_t count, float* to) {
  const F64Tag d;
  const hn::Rebind<float, F64Tag> f;
  const hn::Rebind<std::int32_t, F64Tag> i32;
  const std::size_t lanes = hn::Lanes(d), n = static_cast<std::size_t>(count);
  for (std::size_t i = 0; i < n; i += lanes) {
    const F64Vec v = i + lanes <= n ? load(d, from + i) : load_n(d, from + i, n - i);
    const auto nearest = hn::DemoteTo(f, v);
    const F64Vec back = hn::PromoteTo(d, nearest);
    // Whether it was inexact, and away from zero, as the integers 1 and 0.
    const F64Vec one = hn::Set(d, 1.0);
    const auto inexact = hn::DemoteTo(i32, hn::IfThenElseZero(hn::Ne(back, v), one));
    const auto away = hn::DemoteTo(i32, hn::IfThenElseZero(hn::Gt(hn::Abs(back), hn::Abs(v)), one));
    const auto odd = hn::BitCast(f, hn::Or(hn::Sub(hn::BitCast(i32, nearest), away), inexact));
    if (i + lanes <= n) {
      hn::StoreU(odd, f, to + i);
    } else {
      HWY_ALIGN float rest[hn::MaxLanes(F64Tag())];
      hn::Store(odd, f, rest);
      std::copy(rest, rest + (n - i), to + i);
    }
  }
}

void store_doubles(DType dtype, void* to, std::int64_t n, const double* from) {
  if (dtype == DType::f64) {
    std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(double));
  } else if (dtype == DType::f32) {
    for (std::int64_t i = 0; i < n; ++i) static_cast<float*>(to)[i] = static_cast<float>(from[i]);
  } else {
    constexpr std::int64_t kBlock = 512;
    float odd[kBlock];
    for (std::int64_t at = 0; at < n; at += kBlock) {
      const std::int64_t count = std::min(kBlock, n - at);
      round_to_odd(from + at, count, odd);
      store_floats(dtype, static_cast<std::uint16_t*>(to) + at, count, odd);
    }
  }
}

// 0 * v is 0 for finite values only: the sum of these is NaN as soon as one wasn't.
template <class D>
HWY_INLINE hn::Vec<D> poison(D d, hn::Vec<D> v, hn::Vec<D> sum) {
  return hn::MulAdd(v, hn::Zero(d), sum);
}
template <class D>
HWY_INLINE bool clean(D d, hn::Vec<D> a, hn::Vec<D> b) {
  return hn::AllFalse(d, hn::IsNaN(hn::Add(a, b)));
}

// What storing as `To` keeps, as the vector that reading it again would give.
template <class To, class D>
HWY_INLINE hn::Vec<D> rounded(D d, hn::Vec<D> v) {
  if constexpr (std::is_same_v<To, BFloat16>) {
    return hn::BitCast(d, hn::ShiftLeft<16>(round_to_bfloat16(d, v)));
  } else {
    return v;
  }
}

template <class From, class To>
GradientBlock unscale_run(const From* from, To* to, std::int64_t count, double inverse, bool squares) {
  using D = ComputeTag<From>;
  using C = ComputeScalar<From>;
  const D d;
  const std::size_t lanes = hn::Lanes(d), n = static_cast<std::size_t>(count);
  const auto factor = hn::Set(d, static_cast<C>(inverse));
  auto bad0 = hn::Zero(d), bad1 = bad0;
  double total = 0;
  std::size_t i = 0;
  if (!squares) {
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
      const auto v0 = rounded<To>(d, hn::Mul(load(d, from + i), factor));
      const auto v1 = rounded<To>(d, hn::Mul(load(d, from + i + lanes), factor));
      bad0 = poison(d, v0, bad0);
      bad1 = poison(d, v1, bad1);
      store(v0, d, to + i);
      store(v1, d, to + i + lanes);
    }
  }
  while (i + lanes <= n) {
    // Blocks of sums in the vectors' type, added up in double.
    const std::size_t begin = i, end = std::min(n - lanes + 1, i + 64 * lanes);
    auto sum = hn::Zero(d);
    for (; i < end; i += lanes) {
      const auto v = rounded<To>(d, hn::Mul(load(d, from + i), factor));
      bad0 = poison(d, v, bad0);
      sum = hn::MulAdd(v, v, sum);
      store(v, d, to + i);
    }
    if (!squares) continue;
    double part = static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
    if (!std::isfinite(part)) {
      // Squares of large gradients overflow float32 though the gradients don't.
      part = 0;
      for (std::size_t j = begin; j < i; ++j) {
        const auto v = static_cast<double>(convert<C>(to[j]));
        part += v * v;
      }
    }
    total += part;
  }
  if (i < n) {
    const auto v = rounded<To>(d, hn::Mul(load_n(d, from + i, n - i), factor));
    bad1 = poison(d, hn::IfThenElseZero(hn::FirstN(d, n - i), v), bad1);
    store_n(v, d, to + i, n - i);
    for (std::size_t j = i; squares && j < n; ++j) {
      const auto value = static_cast<double>(convert<C>(to[j]));
      total += value * value;
    }
  }
  return {clean(d, bad0, bad1), total};
}

template <class From, class To>
bool finite_run(const From* from, std::int64_t count, double inverse) {
  using D = ComputeTag<From>;
  const D d;
  const std::size_t lanes = hn::Lanes(d), n = static_cast<std::size_t>(count);
  const auto factor = hn::Set(d, static_cast<ComputeScalar<From>>(inverse));
  auto bad0 = hn::Zero(d), bad1 = bad0;
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    bad0 = poison(d, rounded<To>(d, hn::Mul(load(d, from + i), factor)), bad0);
    bad1 = poison(d, rounded<To>(d, hn::Mul(load(d, from + i + lanes), factor)), bad1);
  }
  for (; i < n; i += lanes) {
    const auto v = i + lanes <= n ? load(d, from + i) : load_n(d, from + i, n - i);
    bad0 = poison(d, rounded<To>(d, hn::Mul(v, factor)), bad0);
  }
  return clean(d, bad0, bad1);
}

GradientBlock unscale_block(DType dtype, const void* from, void* to, std::int64_t n, double inverse, bool squares) {
  switch (dtype) {
    case DType::f64:
      return unscale_run(static_cast<const double*>(from), static_cast<double*>(to), n, inverse, squares);
    case DType::f16:
      return unscale_run(static_cast<const Half*>(from), static_cast<float*>(to), n, inverse, squares);
    case DType::bf16:
      return unscale_run(static_cast<const BFloat16*>(from), static_cast<BFloat16*>(to), n, inverse, squares);
    default:
      return unscale_run(static_cast<const float*>(from), static_cast<float*>(to), n, inverse, squares);
  }
}

// Without their signs, floats are in the order of their bits as integers; NaN comes last.
template <class From>
float max_magnitude_run(const From* from, std::int64_t count) {
  const F32Tag d;
  const hn::RebindToSigned<F32Tag> di;
  const std::size_t lanes = hn::Lanes(d), n = static_cast<std::size_t>(count);
  auto top0 = hn::Zero(di), top1 = top0;
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    top0 = hn::Max(top0, hn::BitCast(di, hn::Abs(load(d, from + i))));
    top1 = hn::Max(top1, hn::BitCast(di, hn::Abs(load(d, from + i + lanes))));
  }
  for (; i < n; i += lanes) {
    const auto v = i + lanes <= n ? load(d, from + i) : load_n(d, from + i, n - i);
    top0 = hn::Max(top0, hn::BitCast(di, hn::Abs(v)));
  }
  const float top = std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(di, hn::Max(top0, top1))));
  return std::isnan(top) ? std::numeric_limits<float>::infinity() : top;
}

float max_magnitude(DType dtype, const void* from, std::int64_t n) {
  if (dtype == DType::f16) return max_magnitude_run(static_cast<const Half*>(from), n);
  if (dtype == DType::bf16) return max_magnitude_run(static_cast<const BFloat16*>(from), n);
  return max_magnitude_run(static_cast<const float*>(from), n);
}

bool finite_block(DType dtype, const void* from, std::int64_t n, double inverse) {
  switch (dtype) {
    case DType::f64:
      return finite_run<double, double>(static_cast<const double*>(from), n, inverse);
    case DType::f16:
      return finite_run<Half, float>(static_cast<const Half*>(from), n, inverse);
    case DType::bf16:
      return finite_run<BFloat16, BFloat16>(static_cast<const BFloat16*>(from), n, inverse);
    default:
      return finite_run<float, float>(static_cast<const float*>(from), n, inverse);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
HWY_EXPORT(load_floats);
HWY_EXPORT(store_floats);
HWY_EXPORT(add_floats);
HWY_EXPORT(load_doubles);
HWY_EXPORT(store_doubles);
HWY_EXPORT(unscale_block);
HWY_EXPORT(max_magnitude);
HWY_EXPORT(finite_block);

void load_floats(DType dtype, const void* from, std::int64_t n, float* to) {
  HWY_DYNAMIC_DISPATCH(load_floats)(dtype, from, n, to);
}
void store_floats(DType dtype, void* to, std::int64_t n, const float* from) {
  HWY_DYNAMIC_DISPATCH(store_floats)(dtype, to, n, from);
}
void add_floats(DType dtype, const void* from, std::int64_t n, float factor, float* sums) {
  HWY_DYNAMIC_DISPATCH(add_floats)(dtype, from, n, factor, sums);
}
void load_doubles(DType dtype, const void* from, std::int64_t n, double* to) {
  HWY_DYNAMIC_DISPATCH(load_doubles)(dtype, from, n, to);
}
void store_doubles(DType dtype, void* to, std::int64_t n, const double* from) {
  HWY_DYNAMIC_DISPATCH(store_doubles)(dtype, to, n, from);
}
GradientBlock unscale_block(DType dtype, const void* from, void* to, std::int64_t n, double inverse, bool squares) {
  return HWY_DYNAMIC_DISPATCH(unscale_block)(dtype, from, to, n, inverse, squares);
}
float max_magnitude(DType dtype, const void* from, std::int64_t n) {
  return HWY_DYNAMIC_DISPATCH(max_magnitude)(dtype, from, n);
}
bool finite_block(DType dtype, const void* from, std::int64_t n, double inverse) {
  return HWY_DYNAMIC_DISPATCH(finite_block)(dtype, from, n, inverse);
}
}  // namespace halfstep::cpu
#endif
