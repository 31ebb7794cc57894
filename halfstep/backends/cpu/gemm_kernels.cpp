// SPDX-License-Identifier: Apache-2.0
// What the blocked product and its narrow forms do besides multiplying tiles (gemm_tile.cpp): packing, results, and
// products that memory limits.
#include "halfstep/backends/cpu/gemm_kernels.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/gemm_kernels.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "halfstep/backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(D()));

// ---- one vector from memory and to it ----

// Highway's masked loads and stores of 16-bit lanes touch whole vectors on AVX2.
constexpr bool kMasked16 = HWY_TARGET <= HWY_AVX3;

struct LoadF32 {
  using T = float;
  static constexpr bool kMasked = true;
  V operator()(const T* p) const { return hn::LoadU(D(), p); }
  V operator()(const T* p, std::int64_t n) const {
    return hn::MaskedLoad(hn::FirstN(D(), static_cast<std::size_t>(n)), D(), p);
  }
};
struct LoadBf16 {
  using T = std::uint16_t;
  static constexpr bool kMasked = kMasked16;
  using D16 = hn::Rebind<std::uint16_t, D>;
  static V wide(hn::Vec<D16> v) {
    return hn::BitCast(D(), hn::ShiftLeft<16>(hn::PromoteTo(hn::RebindToUnsigned<D>(), v)));
  }
  V operator()(const T* p) const { return wide(hn::LoadU(D16(), p)); }
  V operator()(const T* p, std::int64_t n) const {
    return wide(hn::MaskedLoad(hn::FirstN(D16(), static_cast<std::size_t>(n)), D16(), p));
  }
};
struct LoadF16 {
  using T = std::uint16_t;
  static constexpr bool kMasked = kMasked16;
  using D16 = hn::Rebind<std::uint16_t, D>;
  static V wide(hn::Vec<D16> v) { return hn::PromoteTo(D(), hn::BitCast(hn::Rebind<hwy::float16_t, D>(), v)); }
  V operator()(const T* p) const { return wide(hn::LoadU(D16(), p)); }
  V operator()(const T* p, std::int64_t n) const {
    return wide(hn::MaskedLoad(hn::FirstN(D16(), static_cast<std::size_t>(n)), D16(), p));
  }
};

/// The first n elements, zeros after them.
template <class Load>
HWY_INLINE V load_some(Load load, const typename Load::T* p, std::int64_t n) {
  if (n >= kLanes) return load(p);
  if constexpr (Load::kMasked) {
    return load(p, std::max<std::int64_t>(n, 0));
  } else {
    typename Load::T some[kLanes] = {};
    std::memcpy(some, p, static_cast<std::size_t>(std::max<std::int64_t>(n, 0)) * sizeof(typename Load::T));
    return load(some);
  }
}

template <class F>
void with_load(DType dtype, F f) {
  if (dtype == DType::bf16) {
    f(LoadBf16());
  } else if (dtype == DType::f16) {
    f(LoadF16());
  } else {
    f(LoadF32());
  }
}

struct StoreF32 {
  using T = float;
  static constexpr bool kMasked = true;
  using DOut = D;
  static V narrow(V v) { return v; }
};
struct StoreBf16 {
  using T = std::uint16_t;
  static constexpr bool kMasked = kMasked16;
  using DOut = hn::Rebind<std::uint16_t, D>;
  static hn::Vec<DOut> narrow(V v) {
    const hn::RebindToUnsigned<D> du;
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFF)));
    const auto quiet = hn::Or(bits, hn::Set(du, 0x400000));  // A NaN stays one.
    const auto is_nan = hn::RebindMask(du, hn::IsNaN(v));
    return hn::TruncateTo(DOut(), hn::ShiftRight<16>(hn::IfThenElse(is_nan, quiet, rounded)));
  }
};
struct StoreF16 {
  using T = std::uint16_t;
  static constexpr bool kMasked = kMasked16;
  using DOut = hn::Rebind<std::uint16_t, D>;
  static hn::Vec<DOut> narrow(V v) { return hn::BitCast(DOut(), hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), v)); }
};

template <class Store>
HWY_INLINE void store_some(Store, V v, typename Store::T* p, std::int64_t n) {
  const typename Store::DOut d;
  const auto narrow = Store::narrow(v);
  if (n >= kLanes) {
    hn::StoreU(narrow, d, p);
  } else if constexpr (Store::kMasked) {
    hn::BlendedStore(narrow, hn::FirstN(d, static_cast<std::size_t>(n)), d, p);
  } else {
    typename Store::T some[kLanes];
    hn::StoreU(narrow, d, some);
    std::memcpy(p, some, static_cast<std::size_t>(n) * sizeof(typename Store::T));
  }
}

/// Turns kLanes rows into columns.
HWY_INLINE void transpose(V (&r)[kLanes]) {
#if HWY_TARGET <= HWY_AVX3
  __m512 a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(r[i].raw, r[i + 1].raw);
    a[i + 1] = _mm512_unpackhi_ps(r[i].raw, r[i + 1].raw);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // b[i + c]: column c of each 4 x 4 block of rows i to i + 3.
    b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xEE);
    b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xEE);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512 even = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88), odd = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xDD);
    const __m512 even2 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88),
                 odd2 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xDD);
    r[c] = V{_mm512_shuffle_f32x4(even, even2, 0x88)};
    r[8 + c] = V{_mm512_shuffle_f32x4(even, even2, 0xDD)};
    r[4 + c] = V{_mm512_shuffle_f32x4(odd, odd2, 0x88)};
    r[12 + c] = V{_mm512_shuffle_f32x4(odd, odd2, 0xDD)};
  }
#elif HWY_TARGET <= HWY_AVX2
  __m256 a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(r[i].raw, r[i + 1].raw);
    a[i + 1] = _mm256_unpackhi_ps(r[i].raw, r[i + 1].raw);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xEE);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xEE);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    r[c] = V{_mm256_permute2f128_ps(b[c], b[4 + c], 0x20)};
    r[4 + c] = V{_mm256_permute2f128_ps(b[c], b[4 + c], 0x31)};
  }
#else
  float square[kLanes][kLanes];
  for (int i = 0; i < kLanes; ++i) hn::StoreU(r[i], D(), square[i]);
  for (int i = 0; i < kLanes; ++i) {
    float column[kLanes];
    for (int j = 0; j < kLanes; ++j) column[j] = square[j][i];
    r[i] = hn::LoadU(D(), column);
  }
#endif
}

// ---- packing ----

template <class Load>
void pack_as(Load load, const typename Load::T* from, std::int64_t j_stride, std::int64_t p_stride, std::int64_t n,
             std::int64_t k, std::int64_t columns, float* HWY_RESTRICT to) {
  const D d;
  if (j_stride == 1 && columns % kLanes == 0) {
    if (n == columns && columns == 2 * kLanes) {
      constexpr std::int64_t kAhead = 12;
      for (std::int64_t p = 0; p < k; ++p, from += p_stride, to += columns) {
        // The rows lie too far apart for the processor to foresee.
        const std::uintptr_t ahead =
            reinterpret_cast<std::uintptr_t>(from) + static_cast<std::uintptr_t>(kAhead * p_stride) * sizeof(*from);
        hwy::Prefetch(reinterpret_cast<const char*>(ahead));
        hwy::Prefetch(reinterpret_cast<const char*>(ahead + 2 * kLanes * sizeof(*from) - 1));
        const V v0 = load(from), v1 = load(from + kLanes);
        hn::StoreU(v0, d, to);
        hn::StoreU(v1, d, to + kLanes);
      }
      return;
    }
    for (std::int64_t p = 0; p < k; ++p, from += p_stride, to += columns) {
      for (std::int64_t j = 0; j < columns; j += kLanes) hn::StoreU(load_some(load, from + j, n - j), d, to + j);
    }
    return;
  }
  if (p_stride == 1 && columns % kLanes == 0) {
    for (std::int64_t p = 0; p < k; p += kLanes) {
      const std::int64_t steps = std::min<std::int64_t>(kLanes, k - p);
      for (std::int64_t j = 0; j < columns; j += kLanes) {
        V r[kLanes];
        if (steps == kLanes && n - j >= kLanes) {
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) r[i] = load(from + (j + i) * j_stride + p);
          transpose(r);
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) hn::StoreU(r[i], d, to + (p + i) * columns + j);
          continue;
        }
        for (int i = 0; i < kLanes; ++i) {
          r[i] = j + i < n ? load_some(load, from + (j + i) * j_stride + p, steps) : hn::Zero(d);
        }
        transpose(r);
        for (int i = 0; i < steps; ++i) hn::StoreU(r[i], d, to + (p + i) * columns + j);
      }
    }
    return;
  }
  for (std::int64_t p = 0; p < k; ++p, to += columns) {
    typename Load::T some[kLanes] = {};
    for (std::int64_t j = 0; j < columns; j += kLanes) {
      const std::int64_t count = std::clamp<std::int64_t>(n - j, 0, kLanes),
                         width = std::min<std::int64_t>(kLanes, columns - j);
      for (std::int64_t i = 0; i < count; ++i) some[i] = from[(j + i) * j_stride + p * p_stride];
      for (std::int64_t i = count; i < kLanes; ++i) some[i] = {};
      store_some(StoreF32(), load(some), to + j, width);
    }
  }
}

void pack(DType dtype, const void* from, std::int64_t j_stride, std::int64_t p_stride, std::int64_t n, std::int64_t k,
          std::int64_t columns, float* to) {
  with_load(dtype, [&](auto load) {
    pack_as(load, static_cast<const typename decltype(load)::T*>(from), j_stride, p_stride, n, k, columns, to);
  });
}

template <class Load>
void gather_as(Load load, const void* const* rows, std::int64_t count, std::int64_t first, std::int64_t n,
               std::int64_t width, std::int64_t size, float* HWY_RESTRICT to, std::int64_t stride) {
  constexpr std::int64_t kAhead = 4;
  const D d;
  const std::int64_t bytes = n * static_cast<std::int64_t>(sizeof(typename Load::T));
  for (std::int64_t i = 0; i < count; ++i, to += stride) {
    const auto* p = static_cast<const typename Load::T*>(rows[i]) + first;
    // The rows to come lie too far apart for the processor to foresee.
    const auto* const ahead = reinterpret_cast<const char*>(
        static_cast<const typename Load::T*>(rows[std::min(i + kAhead, count - 1)]) + first);
    for (std::int64_t line = 0; line < bytes; line += 64) hwy::Prefetch(ahead + line);
    float* panel = to;
    std::int64_t left = n;
    if (width == 2 * kLanes) {
      for (; left >= width; left -= width, p += width, panel += size) {
        hn::StoreU(load(p), d, panel);
        hn::StoreU(load(p + kLanes), d, panel + kLanes);
      }
    } else if (width <= kLanes) {
      for (; left >= kLanes; left -= width, p += width, panel += size) hn::StoreU(load(p), d, panel);
    }
    for (; left > 0; left -= width, p += width, panel += size) {
      const std::int64_t columns = std::min(left, width);
      for (std::int64_t j = 0; j < columns; j += kLanes) hn::StoreU(load_some(load, p + j, columns - j), d, panel + j);
    }
  }
}

void gather(DType dtype, const void* const* rows, std::int64_t count, std::int64_t first, std::int64_t n,
            std::int64_t width, std::int64_t size, float* to, std::int64_t stride) {
  with_load(dtype, [&](auto load) { gather_as(load, rows, count, first, n, width, size, to, stride); });
}

void widen(DType dtype, const void* from, std::int64_t n, float* to) {
  with_load(dtype, [&](auto load) {
    const auto* p = static_cast<const typename decltype(load)::T*>(from);
    std::int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) hn::StoreU(load(p + i), D(), to + i);
    if (i < n) store_some(StoreF32(), load_some(load, p + i, n - i), to + i, n - i);
  });
}

// ---- results ----

// Two vectors as bfloat16, one after the other: a line of the cache.
HWY_INLINE void store_line(V v0, V v1, std::uint16_t* to) {
  const hn::Repartition<std::uint16_t, D> d16;
  if (HWY_UNLIKELY(!hn::AllFalse(D(), hn::IsNaN(hn::Add(v0, v1))))) {
    store_some(StoreBf16(), v0, to, kLanes);
    store_some(StoreBf16(), v1, to + kLanes, kLanes);
    return;
  }
  hn::StoreU(round_two(D(), v0, v1), d16, to);
}

template <class Store>
void finish_as(Store store, const GemmEpilogue& f) {
  using T = typename Store::T;
  const D d;
  T* const c = static_cast<T*>(f.c);
  const auto last = [&](V v) {
    // Max would turn a NaN into 0.
    return f.relu ? hn::IfThenElse(hn::Lt(v, hn::Zero(d)), hn::Zero(d), v) : v;
  };
  if (f.col_stride == 1) {
    for (std::int64_t i = 0; i < f.rows; ++i) {
      const float* from = f.from + i * f.ld;
      T* to = c + i * f.row_stride;
      std::int64_t j = 0;
      if constexpr (std::is_same_v<Store, StoreBf16>) {
        const auto value = [&](std::int64_t at) HWY_ATTR {
          V v = hn::LoadU(d, from + at);
          if (f.bias != nullptr) v = hn::Add(v, f.bias_by_row ? hn::Set(d, f.bias[i]) : hn::LoadU(d, f.bias + at));
          return last(v);
        };
        for (; j + 2 * kLanes <= f.cols; j += 2 * kLanes) store_line(value(j), value(j + kLanes), to + j);
      }
      for (; j < f.cols; j += kLanes) {
        const std::int64_t n = f.cols - j;
        V v = load_some(LoadF32(), from + j, n);
        if constexpr (sizeof(T) == 4) {
          if (f.add_c) v = hn::Add(v, load_some(LoadF32(), to + j, n));
        }
        if (f.bias != nullptr) {
          v = hn::Add(v, f.bias_by_row ? hn::Set(d, f.bias[i]) : load_some(LoadF32(), f.bias + j, n));
        }
        store_some(store, last(v), to + j, n);
      }
    }
    return;
  }
  for (std::int64_t i = 0; i < f.rows; i += kLanes) {
    const std::int64_t rows = std::min<std::int64_t>(kLanes, f.rows - i);
    V by_row = hn::Zero(d);
    if (f.bias != nullptr && f.bias_by_row) by_row = load_some(LoadF32(), f.bias + i, rows);
    for (std::int64_t j = 0; j < f.cols; j += kLanes) {
      const std::int64_t cols = std::min<std::int64_t>(kLanes, f.cols - j);
      V r[kLanes];
      if (rows == kLanes && cols == kLanes) {
#pragma GCC unroll 16
        for (int q = 0; q < kLanes; ++q) r[q] = hn::LoadU(d, f.from + (i + q) * f.ld + j);
      } else {
        for (int q = 0; q < kLanes; ++q) {
          r[q] = q < rows ? load_some(LoadF32(), f.from + (i + q) * f.ld + j, cols) : hn::Zero(d);
        }
      }
      transpose(r);
      for (std::int64_t q = 0; q < cols; ++q) {
        T* to = c + (j + q) * f.col_stride + i;
        V v = r[q];
        if constexpr (sizeof(T) == 4) {
          if (f.add_c) v = hn::Add(v, load_some(LoadF32(), to, rows));
        }
        if (f.bias != nullptr) v = hn::Add(v, f.bias_by_row ? by_row : hn::Set(d, f.bias[j + q]));
        store_some(store, last(v), to, rows);
      }
    }
  }
}

void finish(const GemmEpilogue& f) {
  if (f.dtype == DType::bf16) {
    finish_as(StoreBf16(), f);
  } else if (f.dtype == DType::f16) {
    finish_as(StoreF16(), f);
  } else {
    finish_as(StoreF32(), f);
  }
}

// ---- few rows: memory is the limit, nothing is packed ----

template <class Load>
void dots_as(Load load, const typename Load::T* w, std::int64_t w_stride, std::int64_t n, std::int64_t k,
             const float* x, std::int64_t ldx, std::int64_t rows, float* out, std::int64_t ldo) {
  const D d;
  std::int64_t j = 0;
  for (; j + 4 <= n; j += 4) {
    const typename Load::T* w0 = w + j * w_stride;
    for (std::int64_t i = 0; i < rows; ++i) {
      const float* xi = x + i * ldx;
      V s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0, t0 = s0, t1 = s0, t2 = s0, t3 = s0;
      std::int64_t p = 0;
      for (; p + 2 * kLanes <= k; p += 2 * kLanes) {
        const V a = hn::LoadU(d, xi + p), b = hn::LoadU(d, xi + p + kLanes);
        const typename Load::T* q = w0 + p;
        s0 = hn::MulAdd(a, load(q), s0);
        t0 = hn::MulAdd(b, load(q + kLanes), t0);
        s1 = hn::MulAdd(a, load(q + w_stride), s1);
        t1 = hn::MulAdd(b, load(q + w_stride + kLanes), t1);
        s2 = hn::MulAdd(a, load(q + 2 * w_stride), s2);
        t2 = hn::MulAdd(b, load(q + 2 * w_stride + kLanes), t2);
        s3 = hn::MulAdd(a, load(q + 3 * w_stride), s3);
        t3 = hn::MulAdd(b, load(q + 3 * w_stride + kLanes), t3);
      }
      for (; p < k; p += kLanes) {
        const V a = load_some(LoadF32(), xi + p, k - p);
        s0 = hn::MulAdd(a, load_some(load, w0 + p, k - p), s0);
        s1 = hn::MulAdd(a, load_some(load, w0 + w_stride + p, k - p), s1);
        s2 = hn::MulAdd(a, load_some(load, w0 + 2 * w_stride + p, k - p), s2);
        s3 = hn::MulAdd(a, load_some(load, w0 + 3 * w_stride + p, k - p), s3);
      }
      float* o = out + i * ldo + j;
      o[0] = hn::GetLane(hn::SumOfLanes(d, hn::Add(s0, t0)));
      o[1] = hn::GetLane(hn::SumOfLanes(d, hn::Add(s1, t1)));
      o[2] = hn::GetLane(hn::SumOfLanes(d, hn::Add(s2, t2)));
      o[3] = hn::GetLane(hn::SumOfLanes(d, hn::Add(s3, t3)));
    }
  }
  for (; j < n; ++j) {
    for (std::int64_t i = 0; i < rows; ++i) {
      V s = hn::Zero(d);
      for (std::int64_t p = 0; p < k; p += kLanes) {
        s = hn::MulAdd(load_some(LoadF32(), x + i * ldx + p, k - p), load_some(load, w + j * w_stride + p, k - p), s);
      }
      out[i * ldo + j] = hn::GetLane(hn::SumOfLanes(d, s));
    }
  }
}

void dots(DType dtype, const void* w, std::int64_t w_stride, std::int64_t n, std::int64_t k, const float* x,
          std::int64_t ldx, std::int64_t rows, float* out, std::int64_t ldo) {
  with_load(dtype, [&](auto load) {
    dots_as(load, static_cast<const typename decltype(load)::T*>(w), w_stride, n, k, x, ldx, rows, out, ldo);
  });
}

template <class Load>
void axpys_as(Load load, const typename Load::T* w, std::int64_t w_stride, std::int64_t n, std::int64_t k,
              const float* x, std::int64_t ldx, std::int64_t rows, float* out, std::int64_t ldo, bool accumulate) {
  const D d;
  // Four steps at a time: the sums are read and written once for four vectors of w.
  for (std::int64_t p = 0; p == 0 || p < k; p += 4) {
    const std::int64_t steps = std::clamp<std::int64_t>(k - p, 0, 4);
    const bool add = accumulate || p > 0;
    const typename Load::T* w0 = w + p * w_stride;
    for (std::int64_t i = 0; i < rows; ++i) {
      float* o = out + i * ldo;
      const float* a = x + i * ldx + p;
      const V a0 = steps > 0 ? hn::Set(d, a[0]) : hn::Zero(d), a1 = steps > 1 ? hn::Set(d, a[1]) : hn::Zero(d),
              a2 = steps > 2 ? hn::Set(d, a[2]) : hn::Zero(d), a3 = steps > 3 ? hn::Set(d, a[3]) : hn::Zero(d);
      for (std::int64_t j = 0; j < n; j += kLanes) {
        const std::int64_t left = n - j;
        V s = add ? load_some(LoadF32(), o + j, left) : hn::Zero(d);
        const typename Load::T* q = w0 + j;
        if (steps > 0) s = hn::MulAdd(a0, load_some(load, q, left), s);
        if (steps > 1) s = hn::MulAdd(a1, load_some(load, q + w_stride, left), s);
        if (steps > 2) s = hn::MulAdd(a2, load_some(load, q + 2 * w_stride, left), s);
        if (steps > 3) s = hn::MulAdd(a3, load_some(load, q + 3 * w_stride, left), s);
        store_some(StoreF32(), s, o + j, left);
      }
    }
  }
}

void axpys(DType dtype, const void* w, std::int64_t w_stride, std::int64_t n, std::int64_t k, const float* x,
           std::int64_t ldx, std::int64_t rows, float* out, std::int64_t ldo, bool accumulate) {
  with_load(dtype, [&](auto load) {
    axpys_as(load, static_cast<const typename decltype(load)::T*>(w), w_stride, n, k, x, ldx, rows, out, ldo,
             accumulate);
  });
}

GemmKernels make_kernels() {
  GemmKernels kernels = {};
  kernels.lanes = kLanes;
  kernels.columns = 2 * kLanes;
  fill_tiles(kernels);
  kernels.pack = pack;
  kernels.gather = gather;
  kernels.widen = widen;
  kernels.finish = finish;
  kernels.dots = dots;
  kernels.axpys = axpys;
  return kernels;
}

}  // namespace

const GemmKernels& kernels_of_target() {
  static const GemmKernels kernels = make_kernels();
  return kernels;
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
HWY_EXPORT(kernels_of_target);
const GemmKernels& gemm_kernels() { return HWY_DYNAMIC_DISPATCH(kernels_of_target)(); }
}  // namespace halfstep::cpu
#endif
