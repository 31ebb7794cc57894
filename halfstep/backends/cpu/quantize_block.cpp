// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/quantize_block.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <limits>

#include "halfstep/backends/cpu/quantize_block.h"
#include "halfstep/backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {

template <class C>
using GridTag = hn::ScalableTag<C>;

// Full vectors of operands, and the first n lanes of one.
struct AllLanes {
  template <class D, class T>
  HWY_INLINE hn::Vec<D> get(D d, const T* p) const {
    return load(d, p);
  }
  template <class D, class T>
  HWY_INLINE void put(hn::Vec<D> v, D d, T* p) const {
    store(v, d, p);
  }
  template <class D>
  HWY_INLINE std::size_t count(D d) const {
    return hn::Lanes(d);
  }
};
struct FirstLanes {
  std::size_t n;
  template <class D, class T>
  HWY_INLINE hn::Vec<D> get(D d, const T* p) const {
    return load_n(d, p, n);
  }
  template <class D, class T>
  HWY_INLINE void put(hn::Vec<D> v, D d, T* p) const {
    store_n(v, d, p, n);
  }
  template <class D>
  HWY_INLINE std::size_t count(D) const {
    return n;
  }
};
/// f(i, lanes) for the vectors of n elements.
template <class D, class F>
HWY_INLINE void grid_vectors(D d, std::int64_t count, F&& f) {
  const std::size_t lanes = hn::Lanes(d), n = static_cast<std::size_t>(count);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) f(i, AllLanes{});
  if (i < n) f(i, FirstLanes{n - i});
}

/// A number of each element, or of all.
template <bool kEach, class C>
struct GridNumber {
  const C* p;
  template <class D, class L>
  HWY_INLINE hn::Vec<D> get(D d, std::size_t i, L lanes) const {
    if constexpr (kEach) return lanes.get(d, p + i);
    return hn::Set(d, *p);
  }
};

/// The integer before clamping.
template <bool kFraction, class V>
HWY_INLINE V grid_integer(V x, V inverse, V zero) {
  const V scaled = hn::Mul(x, inverse);
  if constexpr (kFraction) return hn::Round(hn::Add(scaled, zero));
  return hn::Add(hn::Round(scaled), zero);
}
/// NaN becomes the least.
template <class V>
HWY_INLINE V grid_clamped(V q, V least, V most) {
  const V low = hn::IfThenElse(hn::Gt(q, least), q, least);
  return hn::IfThenElse(hn::Lt(low, most), low, most);
}

template <class D, class M, class L>
HWY_INLINE void put_mask(M mask, D d, std::uint8_t* p, L lanes) {
  if constexpr (sizeof(hn::TFromD<D>) == 4) {
    const hn::RebindToSigned<D> di;
    const hn::Rebind<std::uint8_t, D> d8;
    const auto bytes = hn::DemoteTo(d8, hn::IfThenElseZero(hn::RebindMask(di, mask), hn::Set(di, 1)));
    if (lanes.count(d) == hn::Lanes(d)) {
      hn::StoreU(bytes, d8, p);
      return;
    }
    alignas(64) std::uint8_t block[hn::MaxLanes(D())];
    hn::StoreU(bytes, d8, block);
    copy_few(p, block, lanes.count(d));
  } else {
    alignas(64) hn::TFromD<D> block[hn::MaxLanes(D())];
    hn::Store(hn::IfThenElseZero(mask, hn::Set(d, 1)), d, block);
    for (std::size_t i = 0; i < lanes.count(d); ++i) p[i] = block[i] != 0;
  }
}

// What becomes of the integers: their values, or themselves.
template <bool kEach, bool kFraction, bool kValues, class C, class In, class Out>
void put_on_grid(const Grid<C>& grid, const In* x, std::int64_t n, Out* y, std::uint8_t* mask) {
  const GridTag<C> d;
  const GridNumber<kEach, C> scale{grid.scale}, inverse{grid.inverse}, zero{grid.zero};
  const auto least = hn::Set(d, grid.least), most = hn::Set(d, grid.most);
  grid_vectors(d, n, [&](std::size_t i, auto lanes) HWY_ATTR {
    const auto z = zero.get(d, i, lanes);
    const auto q = grid_integer<kFraction>(lanes.get(d, x + i), inverse.get(d, i, lanes), z);
    if (mask) put_mask(hn::And(hn::Ge(q, least), hn::Le(q, most)), d, mask + i, lanes);
    auto v = grid_clamped(q, least, most);
    if constexpr (kValues) v = hn::Mul(hn::Sub(v, z), scale.get(d, i, lanes));
    lanes.put(v, d, y + i);
  });
}
template <bool kValues, class C>
void put_on(const Grid<C>& grid, const C* x, std::int64_t n, C* y, std::uint8_t* mask) {
  if (grid.each) {
    grid.fraction ? put_on_grid<true, true, kValues>(grid, x, n, y, mask)
                  : put_on_grid<true, false, kValues>(grid, x, n, y, mask);
  } else {
    grid.fraction ? put_on_grid<false, true, kValues>(grid, x, n, y, mask)
                  : put_on_grid<false, false, kValues>(grid, x, n, y, mask);
  }
}

// 16-bit values as they lie, for one channel.
bool put_sixteen_bits(const Grid<float>& grid, DType in, const void* x, std::int64_t n, DType out, void* y,
                      std::uint8_t* mask) {
  const auto run = [&](auto from, auto to) {
    using In = decltype(from);
    using Out = decltype(to);
    put_on_grid<false, false, true>(grid, static_cast<const In*>(x), n, static_cast<Out*>(y), mask);
    return true;
  };
  if (grid.each || grid.fraction) return false;
  if (in == DType::f16 && out == DType::f16) return run(Half{}, Half{});
  if (in == DType::bf16 && out == DType::bf16) return run(BFloat16{}, BFloat16{});
  if (in == DType::f32 && out == DType::f16) return run(float{}, Half{});
  if (in == DType::f32 && out == DType::bf16) return run(float{}, BFloat16{});
  return false;
}

template <bool kEach, class C>
void take_points(const Grid<C>& grid, const C* x, std::int64_t n, C* y) {
  const GridTag<C> d;
  const GridNumber<kEach, C> scale{grid.scale}, zero{grid.zero};
  grid_vectors(d, n, [&](std::size_t i, auto lanes) HWY_ATTR {
    const auto v = hn::Sub(lanes.get(d, x + i), zero.get(d, i, lanes));
    lanes.put(hn::Mul(v, scale.get(d, i, lanes)), d, y + i);
  });
}

template <class D>
double lane_sum(D d, hn::Vec<D> v) {
  alignas(64) hn::TFromD<D> block[hn::MaxLanes(D())];
  hn::Store(v, d, block);
  double total = 0;
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) total += static_cast<double>(block[i]);
  return total;
}

// Lanes beyond the end load g as 0, and so add nothing: their scale is 0 where each element has its own, whose
// reciprocal is not used here.
template <bool kEach, class C>
GridSums take_gradients(const Grid<C>& grid, const C* g, const C* x, std::int64_t n, C* x_grad, C* scale_grad,
                        C* zero_grad) {
  const GridTag<C> d;
  const GridNumber<kEach, C> scale{grid.scale}, inverse{grid.inverse}, zero{grid.zero};
  const auto least = hn::Set(d, grid.least), most = hn::Set(d, grid.most);
  auto scale_sum = hn::Zero(d), zero_sum = hn::Zero(d);
  grid_vectors(d, n, [&](std::size_t i, auto lanes) HWY_ATTR {
    const auto gradient = lanes.get(d, g + i), v = lanes.get(d, x + i);
    const auto s = scale.get(d, i, lanes), r = inverse.get(d, i, lanes), z = zero.get(d, i, lanes);
    const auto q = grid_integer<false>(v, r, z);
    const auto below = hn::Lt(q, least), above = hn::Gt(q, most);
    if (x_grad) {
      const auto inside = hn::And(hn::Ge(q, least), hn::Le(q, most));
      lanes.put(hn::IfThenElseZero(inside, gradient), d, x_grad + i);
    }
    if (scale_grad) {
      // As PyTorch: the error of the value, over the scale.
      const auto error = hn::Mul(hn::Sub(hn::Mul(hn::Sub(q, z), s), v), r);
      const auto slope = hn::IfThenElse(below, hn::Sub(least, z), hn::IfThenElse(above, hn::Sub(most, z), error));
      const auto term = hn::Mul(gradient, slope);
      if constexpr (kEach) {
        lanes.put(term, d, scale_grad + i);
      } else {
        scale_sum = hn::Add(scale_sum, term);
      }
    }
    if (zero_grad) {
      const auto term = hn::IfThenElseZero(hn::Or(below, above), hn::Neg(hn::Mul(gradient, s)));
      if constexpr (kEach) {
        lanes.put(term, d, zero_grad + i);
      } else {
        zero_sum = hn::Add(zero_sum, term);
      }
    }
  });
  return {lane_sum(d, scale_sum), lane_sum(d, zero_sum)};
}

template <class C>
void take_masked(const C* g, const std::uint8_t* mask, std::int64_t n, C* y) {
  if constexpr (sizeof(C) == 8) {
    for (std::int64_t i = 0; i < n; ++i) y[i] = mask[i] ? g[i] : C{0};
  } else {
    const GridTag<C> d;
    const hn::RebindToSigned<decltype(d)> di;
    const hn::Rebind<std::uint8_t, decltype(d)> d8;
    grid_vectors(d, n, [&](std::size_t i, auto lanes) HWY_ATTR {
      alignas(64) std::uint8_t block[hn::MaxLanes(d)];
      const std::uint8_t* from = mask + i;
      if (lanes.count(d) < hn::Lanes(d)) {
        copy_few(block, from, lanes.count(d));
        from = block;
      }
      const auto flags = hn::PromoteTo(di, hn::LoadU(d8, from));
      const auto off = hn::RebindMask(d, hn::Eq(flags, hn::Zero(di)));
      lanes.put(hn::IfThenZeroElse(off, lanes.get(d, g + i)), d, y + i);
    });
  }
}

// Numbers of 16 bits, whatever they are.
void take_masked_bits(const std::uint16_t* g, const std::uint8_t* mask, std::int64_t count, std::uint16_t* y) {
  const hn::ScalableTag<std::uint16_t> d;
  const hn::Rebind<std::uint8_t, decltype(d)> d8;
  const std::size_t lanes = hn::Lanes(d), n = static_cast<std::size_t>(count);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto off = hn::Eq(hn::PromoteTo(d, hn::LoadU(d8, mask + i)), hn::Zero(d));
    hn::StoreU(hn::IfThenZeroElse(off, hn::LoadU(d, g + i)), d, y + i);
  }
  for (; i < n; ++i) y[i] = mask[i] ? g[i] : std::uint16_t{0};
}

template <class C>
void clip_block(const C* x, C alpha, std::int64_t n, C* y) {
  const GridTag<C> d;
  const auto bound = hn::Set(d, alpha);
  grid_vectors(d, n, [&](std::size_t i, auto lanes) HWY_ATTR {
    const auto v = lanes.get(d, x + i);
    const auto positive = hn::IfThenZeroElse(hn::Le(v, hn::Zero(d)), v);  // NaN stays
    lanes.put(hn::IfThenElse(hn::Ge(v, bound), bound, positive), d, y + i);
  });
}

template <class C>
double clip_gradients(const C* g, const C* x, C alpha, std::int64_t n, C* x_grad) {
  const GridTag<C> d;
  const auto bound = hn::Set(d, alpha);
  auto sum = hn::Zero(d);
  grid_vectors(d, n, [&](std::size_t i, auto lanes) HWY_ATTR {
    const auto gradient = lanes.get(d, g + i), v = lanes.get(d, x + i);
    if (x_grad) {
      const auto inside = hn::And(hn::Gt(v, hn::Zero(d)), hn::Lt(v, bound));
      lanes.put(hn::IfThenElseZero(inside, gradient), d, x_grad + i);
    }
    sum = hn::Add(sum, hn::IfThenElseZero(hn::Ge(v, bound), gradient));
  });
  return lane_sum(d, sum);
}

// One of each for each target.
#define HALFSTEP_GRID_FUNCTIONS(C, name)                                                                           \
  void values_##name(const Grid<C>& grid, const C* x, std::int64_t n, C* y, std::uint8_t* mask) {                  \
    put_on<true>(grid, x, n, y, mask);                                                                             \
  }                                                                                                                \
  void integers_##name(const Grid<C>& grid, const C* x, std::int64_t n, C* y) {                                    \
    put_on<false>(grid, x, n, y, nullptr);                                                                         \
  }                                                                                                                \
  void points_##name(const Grid<C>& grid, const C* x, std::int64_t n, C* y) {                                      \
    grid.each ? take_points<true>(grid, x, n, y) : take_points<false>(grid, x, n, y);                              \
  }                                                                                                                \
  GridSums gradients_##name(const Grid<C>& grid, const C* g, const C* x, std::int64_t n, C* x_grad, C* scale_grad, \
                            C* zero_grad) {                                                                        \
    return grid.each ? take_gradients<true>(grid, g, x, n, x_grad, scale_grad, zero_grad)                          \
                     : take_gradients<false>(grid, g, x, n, x_grad, scale_grad, zero_grad);                        \
  }                                                                                                                \
  void masked_##name(const C* g, const std::uint8_t* mask, std::int64_t n, C* y) { take_masked(g, mask, n, y); }   \
  void clipped_##name(const C* x, C alpha, std::int64_t n, C* y) { clip_block(x, alpha, n, y); }                   \
  double clipped_gradients_##name(const C* g, const C* x, C alpha, std::int64_t n, C* x_grad) {                    \
    return clip_gradients(g, x, alpha, n, x_grad);                                                                 \
  }
HALFSTEP_GRID_FUNCTIONS(float, f32)
HALFSTEP_GRID_FUNCTIONS(double, f64)
#undef HALFSTEP_GRID_FUNCTIONS

// Chains of minima and maxima side by side.
void widen_all(const float* x, std::int64_t count, float* low, float* high) {
  const F32Tag d;
  const std::size_t lanes = hn::Lanes(d), n = static_cast<std::size_t>(count);
  const auto top = hn::Set(d, std::numeric_limits<float>::max());
  const auto infinity = hn::Set(d, std::numeric_limits<float>::infinity()), lowest = hn::Neg(infinity);
  auto least0 = infinity, least1 = infinity, most0 = lowest, most1 = lowest;
  const auto see = [&](auto v, auto seen, auto& least, auto& most) HWY_ATTR {
    const auto finite = hn::And(seen, hn::Le(hn::Abs(v), top));
    least = hn::Min(least, hn::IfThenElse(finite, v, infinity));
    most = hn::Max(most, hn::IfThenElse(finite, v, lowest));
  };
  const auto all = hn::FirstN(d, lanes);
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    see(hn::LoadU(d, x + i), all, least0, most0);
    see(hn::LoadU(d, x + i + lanes), all, least1, most1);
  }
  for (; i < n; i += lanes) {
    const std::size_t rest = std::min(lanes, n - i);
    see(load_n(d, x + i, rest), hn::FirstN(d, rest), least0, most0);
  }
  *low = std::min(*low, hn::GetLane(hn::MinOfLanes(d, hn::Min(least0, least1))));
  *high = std::max(*high, hn::GetLane(hn::MaxOfLanes(d, hn::Max(most0, most1))));
}
void widen_each(const float* x, std::int64_t n, float* low, float* high) {
  const F32Tag d;
  const auto top = hn::Set(d, std::numeric_limits<float>::max());
  grid_vectors(d, n, [&](std::size_t i, auto lanes) HWY_ATTR {
    const auto v = lanes.get(d, x + i), least = lanes.get(d, low + i), most = lanes.get(d, high + i);
    const auto finite = hn::Le(hn::Abs(v), top);
    lanes.put(hn::IfThenElse(hn::And(finite, hn::Lt(v, least)), v, least), d, low + i);
    lanes.put(hn::IfThenElse(hn::And(finite, hn::Gt(v, most)), v, most), d, high + i);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {

#define HALFSTEP_GRID_DISPATCH(C, name)                                                                             \
  HWY_EXPORT(values_##name);                                                                                        \
  HWY_EXPORT(integers_##name);                                                                                      \
  HWY_EXPORT(points_##name);                                                                                        \
  HWY_EXPORT(gradients_##name);                                                                                     \
  HWY_EXPORT(masked_##name);                                                                                        \
  HWY_EXPORT(clipped_##name);                                                                                       \
  HWY_EXPORT(clipped_gradients_##name);                                                                             \
  template <>                                                                                                       \
  void grid_values<C>(const Grid<C>& grid, const C* x, std::int64_t n, C* y, std::uint8_t* mask) {                  \
    HWY_DYNAMIC_DISPATCH(values_##name)(grid, x, n, y, mask);                                                       \
  }                                                                                                                 \
  template <>                                                                                                       \
  void grid_integers<C>(const Grid<C>& grid, const C* x, std::int64_t n, C* y) {                                    \
    HWY_DYNAMIC_DISPATCH(integers_##name)(grid, x, n, y);                                                           \
  }                                                                                                                 \
  template <>                                                                                                       \
  void grid_points<C>(const Grid<C>& grid, const C* x, std::int64_t n, C* y) {                                      \
    HWY_DYNAMIC_DISPATCH(points_##name)(grid, x, n, y);                                                             \
  }                                                                                                                 \
  template <>                                                                                                       \
  GridSums grid_gradients<C>(const Grid<C>& grid, const C* g, const C* x, std::int64_t n, C* x_grad, C* scale_grad, \
                             C* zero_grad) {                                                                        \
    return HWY_DYNAMIC_DISPATCH(gradients_##name)(grid, g, x, n, x_grad, scale_grad, zero_grad);                    \
  }                                                                                                                 \
  template <>                                                                                                       \
  void masked_values<C>(const C* g, const std::uint8_t* mask, std::int64_t n, C* y) {                               \
    HWY_DYNAMIC_DISPATCH(masked_##name)(g, mask, n, y);                                                             \
  }                                                                                                                 \
  template <>                                                                                                       \
  void clipped_values<C>(const C* x, C alpha, std::int64_t n, C* y) {                                               \
    HWY_DYNAMIC_DISPATCH(clipped_##name)(x, alpha, n, y);                                                           \
  }                                                                                                                 \
  template <>                                                                                                       \
  double clipped_gradients<C>(const C* g, const C* x, C alpha, std::int64_t n, C* x_grad) {                         \
    return HWY_DYNAMIC_DISPATCH(clipped_gradients_##name)(g, x, alpha, n, x_grad);                                  \
  }
HALFSTEP_GRID_DISPATCH(float, f32)
HALFSTEP_GRID_DISPATCH(double, f64)
#undef HALFSTEP_GRID_DISPATCH

HWY_EXPORT(put_sixteen_bits);
HWY_EXPORT(take_masked_bits);
bool grid_values_of(const Grid<float>& grid, DType in, const void* x, std::int64_t n, DType out, void* y,
                    std::uint8_t* mask) {
  return HWY_DYNAMIC_DISPATCH(put_sixteen_bits)(grid, in, x, n, out, y, mask);
}
void masked_bits(const std::uint16_t* g, const std::uint8_t* mask, std::int64_t n, std::uint16_t* y) {
  HWY_DYNAMIC_DISPATCH(take_masked_bits)(g, mask, n, y);
}

HWY_EXPORT(widen_all);
HWY_EXPORT(widen_each);
void widen_by_finite(const float* x, std::int64_t n, float* low, float* high) {
  HWY_DYNAMIC_DISPATCH(widen_all)(x, n, low, high);
}
void widen_each_by_finite(const float* x, std::int64_t n, float* low, float* high) {
  HWY_DYNAMIC_DISPATCH(widen_each)(x, n, low, high);
}

}  // namespace halfstep::cpu
#endif  // HWY_ONCE
