// SPDX-License-Identifier: Apache-2.0
// Where a row has its extreme: stretches are reduced in vectors, and only one that beats those before it is searched.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/extreme_row.cpp"
#include <hwy/foreach_target.h>

#include <algorithm>

#include "halfstep/backends/cpu/extreme_row.h"
#include "halfstep/backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace extreme_row_detail {

template <bool kMax, class V>
HWY_INLINE V better(V a, V b) {
  return kMax ? hn::Max(a, b) : hn::Min(a, b);
}

/// The first of n values that f(vector) gives a mask for; n where none does.
template <class T, class F>
HWY_INLINE std::size_t first_place(const T* x, std::size_t n, F&& f) {
  const ComputeTag<T> d;
  const std::size_t lanes = hn::Lanes(d);
  for (std::size_t i = 0; i < n; i += lanes) {
    const std::size_t m = std::min(lanes, n - i);
    auto found = f(m == lanes ? load(d, x + i) : load_n(d, x + i, m));
    if (m < lanes) found = hn::And(found, hn::FirstN(d, m));
    const auto at = hn::FindFirstTrue(d, found);
    if (at >= 0) return i + static_cast<std::size_t>(at);
  }
  return n;
}

template <bool kMax, class T>
std::int64_t extreme_place(const void* row, std::int64_t count) {
  using C = ComputeScalar<T>;
  constexpr std::size_t kStretch = 1024;
  const ComputeTag<T> d;
  const std::size_t lanes = hn::Lanes(d), n = static_cast<std::size_t>(count);
  const T* x = static_cast<const T*>(row);
  std::size_t best = 0;
  C top{};
  for (std::size_t first = 0; first < n; first += kStretch) {
    const std::size_t end = std::min(n, first + kStretch);
    C most{};
    bool nan = false;
    std::size_t i = first;
    if (end - first >= 2 * lanes) {
      auto most0 = load(d, x + i), most1 = load(d, x + i + lanes);
      // A sum is NaN where one of its terms is, or where infinities meet, which the search below tells apart.
      auto sum = hn::Add(most0, most1);
      auto nans = hn::IsNaN(sum);
      for (i += 2 * lanes; i + 2 * lanes <= end; i += 2 * lanes) {
        const auto v0 = load(d, x + i), v1 = load(d, x + i + lanes);
        most0 = better<kMax>(most0, v0);
        most1 = better<kMax>(most1, v1);
        nans = hn::Or(nans, hn::IsNaN(hn::Add(v0, v1)));
      }
      const auto most_of_both = better<kMax>(most0, most1);
      most = hn::GetLane(kMax ? hn::MaxOfLanes(d, most_of_both) : hn::MinOfLanes(d, most_of_both));
      nan = !hn::AllFalse(d, nans);
    } else {
      most = static_cast<C>(x[first]);
    }
    for (; i < end; ++i) {
      const C v = static_cast<C>(x[i]);
      nan |= v != v;
      most = kMax ? std::max(most, v) : std::min(most, v);
    }
    if (HWY_UNLIKELY(nan)) {
      const std::size_t at = first_place(x + first, end - first, [](auto v) HWY_ATTR { return hn::IsNaN(v); });
      if (at < end - first) return static_cast<std::int64_t>(first + at);
    }
    if (first != 0 && !(kMax ? most > top : most < top)) continue;
    top = most;
    const auto wanted = hn::Set(d, most);
    best = first + first_place(x + first, end - first, [&](auto v) HWY_ATTR { return hn::Eq(v, wanted); });
  }
  return static_cast<std::int64_t>(best);
}

template <bool kMax>
std::int64_t extreme_place_of(DType dtype, const void* row, std::int64_t n) {
  switch (dtype) {
    case DType::f64:
      return extreme_place<kMax, double>(row, n);
    case DType::f16:
      return extreme_place<kMax, Half>(row, n);
    case DType::bf16:
      return extreme_place<kMax, BFloat16>(row, n);
    default:
      return extreme_place<kMax, float>(row, n);
  }
}

}  // namespace extreme_row_detail

std::int64_t largest_place_of(DType dtype, const void* row, std::int64_t n) {
  return extreme_row_detail::extreme_place_of<true>(dtype, row, n);
}
std::int64_t smallest_place_of(DType dtype, const void* row, std::int64_t n) {
  return extreme_row_detail::extreme_place_of<false>(dtype, row, n);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {

HWY_EXPORT(largest_place_of);
HWY_EXPORT(smallest_place_of);

std::int64_t largest_place(DType dtype, const void* row, std::int64_t n) {
  return HWY_DYNAMIC_DISPATCH(largest_place_of)(dtype, row, n);
}
std::int64_t smallest_place(DType dtype, const void* row, std::int64_t n) {
  return HWY_DYNAMIC_DISPATCH(smallest_place_of)(dtype, row, n);
}

}  // namespace halfstep::cpu
#endif
