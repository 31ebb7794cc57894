// SPDX-License-Identifier: Apache-2.0
// F(2x2, 3x3) takes the points 0, 1, -1: its transforms of input and output only add, that of the weights halves. For
// F(4x4, 3x3) the points 0, +-1/sqrt(2), +-sqrt(2) give numbers of similar size, and with them a third of the error of
// 0, +-1, +-2.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/conv_winograd_kernels.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>

#include "halfstep/backends/cpu/conv_winograd_kernels.h"
#include "halfstep/backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace winograd {

constexpr F32Tag kTag;
constexpr std::int64_t kStep = static_cast<std::int64_t>(hn::MaxLanes(kTag));

constexpr std::int64_t kTilesAhead = 2;

HWY_INLINE F32Vec same(float value) { return hn::Set(kTag, value); }

/// One dimension of the transforms, of vectors that are `at` a distance from each other.
template <int m>
struct Line;

template <>
struct Line<2> {
  static HWY_INLINE void input(const F32Vec (&d)[4], F32Vec (&to)[4]) {
    to[0] = hn::Sub(d[0], d[2]);
    to[1] = hn::Add(d[1], d[2]);
    to[2] = hn::Sub(d[2], d[1]);
    to[3] = hn::Sub(d[1], d[3]);
  }
  static HWY_INLINE void weight(const F32Vec (&g)[3], F32Vec (&to)[4]) {
    const F32Vec half = same(0.5f), ends = hn::Mul(half, hn::Add(g[0], g[2])), middle = hn::Mul(half, g[1]);
    to[0] = g[0];
    to[1] = hn::Add(ends, middle);
    to[2] = hn::Sub(ends, middle);
    to[3] = g[2];
  }
  static HWY_INLINE void output(const F32Vec (&p)[4], F32Vec (&to)[2]) {
    to[0] = hn::Add(p[0], hn::Add(p[1], p[2]));
    to[1] = hn::Sub(hn::Sub(p[1], p[2]), p[3]);
  }
  static HWY_INLINE void gradient(const F32Vec (&y)[2], F32Vec (&to)[4]) {
    to[0] = y[0];
    to[1] = hn::Add(y[0], y[1]);
    to[2] = hn::Sub(y[0], y[1]);
    to[3] = hn::Neg(y[1]);
  }
  static HWY_INLINE void weight_gradient(const F32Vec (&p)[4], F32Vec (&to)[3]) {
    const F32Vec half = same(0.5f), sum = hn::Mul(half, hn::Add(p[1], p[2]));
    to[0] = hn::Add(p[0], sum);
    to[1] = hn::Mul(half, hn::Sub(p[1], p[2]));
    to[2] = hn::Add(sum, p[3]);
  }
};

template <>
struct Line<4> {
  static constexpr float kRoot = 1.41421356237309504880f, kHalfRoot = kRoot / 2;

  static HWY_INLINE void input(const F32Vec (&d)[6], F32Vec (&to)[6]) {
    const F32Vec middle = same(2.5f), root = same(kRoot), half_root = same(kHalfRoot);
    to[0] = hn::Add(hn::NegMulAdd(middle, d[2], d[0]), d[4]);
    const F32Vec even1 = hn::NegMulAdd(same(2.0f), d[2], d[4]);
    const F32Vec odd1 = hn::NegMulAdd(root, d[1], hn::Mul(half_root, d[3]));
    to[1] = hn::Add(even1, odd1);
    to[2] = hn::Sub(even1, odd1);
    const F32Vec even2 = hn::NegMulAdd(same(0.5f), d[2], d[4]);
    const F32Vec odd2 = hn::NegMulAdd(half_root, d[1], hn::Mul(root, d[3]));
    to[3] = hn::Add(even2, odd2);
    to[4] = hn::Sub(even2, odd2);
    to[5] = hn::Add(hn::NegMulAdd(middle, d[3], d[1]), d[5]);
  }
  static HWY_INLINE void weight(const F32Vec (&g)[3], F32Vec (&to)[6]) {
    to[0] = g[0];
    const F32Vec even1 = hn::MulAdd(same(-1 / 3.0f), g[2], hn::Mul(same(-2 / 3.0f), g[0]));
    const F32Vec odd1 = hn::Mul(same(-kRoot / 3), g[1]);
    to[1] = hn::Add(even1, odd1);
    to[2] = hn::Sub(even1, odd1);
    const F32Vec even2 = hn::MulAdd(same(1 / 3.0f), g[2], hn::Mul(same(1 / 6.0f), g[0]));
    const F32Vec odd2 = hn::Mul(same(kRoot / 6), g[1]);
    to[3] = hn::Add(even2, odd2);
    to[4] = hn::Sub(even2, odd2);
    to[5] = g[2];
  }
  static HWY_INLINE void output(const F32Vec (&p)[6], F32Vec (&to)[4]) {
    const F32Vec sum1 = hn::Add(p[1], p[2]), difference1 = hn::Sub(p[1], p[2]);
    const F32Vec sum2 = hn::Add(p[3], p[4]), difference2 = hn::Sub(p[3], p[4]);
    to[0] = hn::Add(p[0], hn::Add(sum1, sum2));
    to[1] = hn::MulAdd(same(kRoot), difference2, hn::Mul(same(kHalfRoot), difference1));
    to[2] = hn::MulAdd(same(2.0f), sum2, hn::Mul(same(0.5f), sum1));
    to[3] = hn::Add(hn::MulAdd(same(2 * kRoot), difference2, hn::Mul(same(kHalfRoot / 2), difference1)), p[5]);
  }
  static HWY_INLINE void gradient(const F32Vec (&y)[4], F32Vec (&to)[6]) {
    const F32Vec even1 = hn::MulAdd(same(0.5f), y[2], y[0]), even2 = hn::MulAdd(same(2.0f), y[2], y[0]);
    const F32Vec odd1 = hn::MulAdd(same(kHalfRoot / 2), y[3], hn::Mul(same(kHalfRoot), y[1]));
    const F32Vec odd2 = hn::MulAdd(same(2 * kRoot), y[3], hn::Mul(same(kRoot), y[1]));
    to[0] = y[0];
    to[1] = hn::Add(even1, odd1);
    to[2] = hn::Sub(even1, odd1);
    to[3] = hn::Add(even2, odd2);
    to[4] = hn::Sub(even2, odd2);
    to[5] = y[3];
  }
  static HWY_INLINE void weight_gradient(const F32Vec (&p)[6], F32Vec (&to)[3]) {
    const F32Vec sum1 = hn::Add(p[1], p[2]), difference1 = hn::Sub(p[1], p[2]);
    const F32Vec sum2 = hn::Add(p[3], p[4]), difference2 = hn::Sub(p[3], p[4]);
    to[0] = hn::Add(p[0], hn::MulAdd(same(-2 / 3.0f), sum1, hn::Mul(same(1 / 6.0f), sum2)));
    to[1] = hn::MulAdd(same(-kRoot / 3), difference1, hn::Mul(same(kRoot / 6), difference2));
    to[2] = hn::Add(p[5], hn::Mul(same(1 / 3.0f), hn::Sub(sum2, sum1)));
  }
};

/// Walks tiles in order: which image, and which place of the tiles' grid.
struct Walk {
  std::int64_t image, row, column;
  Walk(const WinogradImages& images, std::int64_t first)
      : image(first / (images.rows * images.columns)),
        row(first / images.columns % images.rows),
        column(first % images.columns) {}
  void next(const WinogradImages& images) {
    if (++column < images.columns) return;
    column = 0;
    if (++row < images.rows) return;
    row = 0;
    ++image;
  }
};

/// Fetches what a tile some steps ahead reads and those before don't: m rows of m places from (y, x) on.
template <int m, class T>
HWY_INLINE void fetch_ahead(const T* image, std::int64_t y, std::int64_t x, const WinogradImages& images) {
  const bool dense = images.channels == images.pitch;
  const std::int64_t runs = dense ? 1 : m, bytes = (dense ? m : 1) * images.channels * std::int64_t{sizeof(T)};
  for (std::int64_t r = y; r < y + m && r < images.height; ++r) {
    for (std::int64_t s = 0; s < runs; ++s) {
      const char* const from = reinterpret_cast<const char*>(image + (r * images.width + x + s) * images.pitch);
      for (std::int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(from + b);
    }
  }
}

template <int m, class T>
void input_of(const WinogradImages& images, const WinogradTiles& to) {
  constexpr int t = m + 2;
  const std::int64_t channels = images.channels, pitch = images.pitch, width = images.width, apart = to.apart;
  const T* const zeros = static_cast<const T*>(images.zeros);
  Walk walk(images, to.first);
  for (std::int64_t i = 0; i < to.count; ++i, walk.next(images)) {
    const T* at[t][t];
    const std::int64_t y0 = walk.row * m - images.before[0], x0 = walk.column * m - images.before[1];
    const T* const image = static_cast<const T*>(images.data) + walk.image * images.height * width * pitch;
    for (int r = 0; r < t; ++r) {
      const bool inside = y0 + r >= 0 && y0 + r < images.height;
      for (int s = 0; s < t; ++s) {
        at[r][s] = inside && x0 + s >= 0 && x0 + s < width ? image + ((y0 + r) * width + x0 + s) * pitch : zeros;
      }
    }
    fetch_ahead<m>(image, y0 + t - m, x0 + t - m + kTilesAhead * m, images);
    float* out = to.data + i * to.stride;
    const auto transform = [&](const auto& read) HWY_ATTR {
      F32Vec half[t][t];  // B' d, by columns
#pragma GCC unroll 6
      for (int s = 0; s < t; ++s) {
        F32Vec d[t];
#pragma GCC unroll 6
        for (int r = 0; r < t; ++r) d[r] = read(at[r][s]);
        Line<m>::input(d, half[s]);
      }
#pragma GCC unroll 6
      for (int r = 0; r < t; ++r) {
        F32Vec d[t], v[t];
#pragma GCC unroll 6
        for (int s = 0; s < t; ++s) d[s] = half[s][r];
        Line<m>::input(d, v);
#pragma GCC unroll 6
        for (int s = 0; s < t; ++s) hn::StoreU(v[s], kTag, out + (r * t + s) * apart);
      }
    };
    std::int64_t c = 0;
    for (; c + kStep <= channels; c += kStep, out += kStep) {
      transform([&](const T* p) HWY_ATTR { return load(kTag, p + c); });
    }
    if (c < channels) {
      transform([&](const T* p) HWY_ATTR { return load_n(kTag, p + c, static_cast<std::size_t>(channels - c)); });
    }
  }
}

template <int m, class T>
bool output_of(const WinogradTiles& from, const float* bias, const WinogradImages& images) {
  constexpr int t = m + 2;
  const std::int64_t channels = images.channels, pitch = images.pitch, width = images.width, apart = from.apart;
  F32Vec poison = hn::Zero(kTag);  // 0 times a finite number is 0
  Walk walk(images, from.first);
  for (std::int64_t i = 0; i < from.count; ++i, walk.next(images)) {
    const std::int64_t y0 = walk.row * m, x0 = walk.column * m;
    const std::int64_t rows = std::min<std::int64_t>(m, images.height - y0),
                       columns = std::min<std::int64_t>(m, width - x0);
    T* const first = static_cast<T*>(images.data) + ((walk.image * images.height + y0) * width + x0) * pitch;
    for (std::int64_t c = 0; c < channels; c += kStep) {
      const float* const in = from.data + i * from.stride + c;
      const std::int64_t left = channels - c;
      F32Vec half[m][t], y[m][m];
#pragma GCC unroll 6
      for (int s = 0; s < t; ++s) {
        F32Vec p[t], q[m];
#pragma GCC unroll 6
        for (int r = 0; r < t; ++r) p[r] = hn::LoadU(kTag, in + (r * t + s) * apart);
        Line<m>::output(p, q);
#pragma GCC unroll 4
        for (int r = 0; r < m; ++r) half[r][s] = q[r];
      }
      F32Vec add = hn::Zero(kTag);
      if (bias != nullptr) add = load_n(kTag, bias + c, static_cast<std::size_t>(std::min(left, kStep)));
#pragma GCC unroll 4
      for (int r = 0; r < m; ++r) {
        Line<m>::output(half[r], y[r]);
#pragma GCC unroll 4
        for (int s = 0; s < m; ++s) y[r][s] = hn::Add(y[r][s], add);
      }
      T* const to = first + c;
      if (rows == m && columns == m && left >= kStep) {
#pragma GCC unroll 4
        for (int r = 0; r < m; ++r) {
#pragma GCC unroll 4
          for (int s = 0; s < m; ++s) {
            poison = hn::MulAdd(y[r][s], hn::Zero(kTag), poison);
            store(y[r][s], kTag, to + (r * width + s) * pitch);
          }
        }
        continue;
      }
      const auto n = static_cast<std::size_t>(std::min(left, kStep));
      for (int r = 0; r < rows; ++r) {
        for (int s = 0; s < columns; ++s) {
          const F32Vec v = hn::IfThenElseZero(hn::FirstN(kTag, n), y[r][s]);
          poison = hn::MulAdd(v, hn::Zero(kTag), poison);
          store_n(v, kTag, to + (r * width + s) * pitch, n);
        }
      }
    }
  }
  return hn::AllFalse(kTag, hn::IsNaN(poison));
}

template <int m>
void weight_of(const float* from, std::int64_t stride, std::int64_t n, float* to, std::int64_t apart) {
  constexpr int t = m + 2;
  for (std::int64_t i = 0; i < n; i += kStep) {
    F32Vec half[3][t];
#pragma GCC unroll 3
    for (int s = 0; s < 3; ++s) {
      F32Vec g[3];
#pragma GCC unroll 3
      for (int r = 0; r < 3; ++r) g[r] = hn::LoadU(kTag, from + (r * 3 + s) * stride + i);
      Line<m>::weight(g, half[s]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < t; ++r) {
      F32Vec u[t];
      const F32Vec g[3] = {half[0][r], half[1][r], half[2][r]};
      Line<m>::weight(g, u);
#pragma GCC unroll 6
      for (int s = 0; s < t; ++s) hn::StoreU(u[s], kTag, to + (r * t + s) * apart + i);
    }
  }
}

template <int m, class T>
void gradient_of(const WinogradImages& images, const WinogradTiles& to) {
  constexpr int t = m + 2;
  const std::int64_t channels = images.channels, pitch = images.pitch, width = images.width, apart = to.apart;
  const T* const zeros = static_cast<const T*>(images.zeros);
  Walk walk(images, to.first);
  for (std::int64_t i = 0; i < to.count; ++i, walk.next(images)) {
    const T* at[m][m];
    const std::int64_t y0 = walk.row * m, x0 = walk.column * m;
    const T* const image = static_cast<const T*>(images.data) + walk.image * images.height * width * pitch;
    for (int r = 0; r < m; ++r) {
      for (int s = 0; s < m; ++s) {
        at[r][s] = y0 + r < images.height && x0 + s < width ? image + ((y0 + r) * width + x0 + s) * pitch : zeros;
      }
    }
    fetch_ahead<m>(image, y0, x0 + kTilesAhead * m, images);
    float* out = to.data + i * to.stride;
    const auto transform = [&](const auto& read) HWY_ATTR {
      F32Vec half[m][t];  // A y, by columns
#pragma GCC unroll 4
      for (int s = 0; s < m; ++s) {
        F32Vec y[m];
#pragma GCC unroll 4
        for (int r = 0; r < m; ++r) y[r] = read(at[r][s]);
        Line<m>::gradient(y, half[s]);
      }
#pragma GCC unroll 6
      for (int r = 0; r < t; ++r) {
        F32Vec y[m], q[t];
#pragma GCC unroll 4
        for (int s = 0; s < m; ++s) y[s] = half[s][r];
        Line<m>::gradient(y, q);
#pragma GCC unroll 6
        for (int s = 0; s < t; ++s) hn::StoreU(q[s], kTag, out + (r * t + s) * apart);
      }
    };
    std::int64_t c = 0;
    for (; c + kStep <= channels; c += kStep, out += kStep) {
      transform([&](const T* p) HWY_ATTR { return load(kTag, p + c); });
    }
    if (c < channels) {
      transform([&](const T* p) HWY_ATTR { return load_n(kTag, p + c, static_cast<std::size_t>(channels - c)); });
    }
  }
}

template <int m>
bool weight_gradient_of(const float* from, std::int64_t apart, std::int64_t n, float* to, std::int64_t stride) {
  constexpr int t = m + 2;
  F32Vec poison = hn::Zero(kTag);
  for (std::int64_t i = 0; i < n; i += kStep) {
    F32Vec half[t][3];
#pragma GCC unroll 6
    for (int s = 0; s < t; ++s) {
      F32Vec p[t];
#pragma GCC unroll 6
      for (int r = 0; r < t; ++r) p[r] = hn::LoadU(kTag, from + (r * t + s) * apart + i);
      Line<m>::weight_gradient(p, half[s]);
    }
#pragma GCC unroll 3
    for (int r = 0; r < 3; ++r) {
      F32Vec p[t], g[3];
#pragma GCC unroll 6
      for (int s = 0; s < t; ++s) p[s] = half[s][r];
      Line<m>::weight_gradient(p, g);
#pragma GCC unroll 3
      for (int s = 0; s < 3; ++s) {
        const auto counted = hn::FirstN(kTag, static_cast<std::size_t>(std::min(n - i, kStep)));
        poison = hn::MulAdd(hn::IfThenElseZero(counted, g[s]), hn::Zero(kTag), poison);
        hn::StoreU(g[s], kTag, to + (r * 3 + s) * stride + i);
      }
    }
  }
  return hn::AllFalse(kTag, hn::IsNaN(poison));
}

template <int m>
void gradient(const WinogradImages& images, const WinogradTiles& to) {
  if (images.dtype == DType::f16) return gradient_of<m, Half>(images, to);
  if (images.dtype == DType::bf16) return gradient_of<m, BFloat16>(images, to);
  gradient_of<m, float>(images, to);
}
template <int m>
void input(const WinogradImages& images, const WinogradTiles& to) {
  if (images.dtype == DType::f16) return input_of<m, Half>(images, to);
  if (images.dtype == DType::bf16) return input_of<m, BFloat16>(images, to);
  input_of<m, float>(images, to);
}
template <int m>
bool output(const WinogradTiles& from, const float* bias, const WinogradImages& images) {
  if (images.dtype == DType::f16) return output_of<m, Half>(from, bias, images);
  if (images.dtype == DType::bf16) return output_of<m, BFloat16>(from, bias, images);
  return output_of<m, float>(from, bias, images);
}

}  // namespace winograd

const WinogradKernels& winograd_kernels_of_target(bool large) {
  static constexpr WinogradKernels kOf2 = {winograd::input<2>, winograd::output<2>, winograd::weight_of<2>,
                                           winograd::gradient<2>, winograd::weight_gradient_of<2>};
  static constexpr WinogradKernels kOf4 = {winograd::input<4>, winograd::output<4>, winograd::weight_of<4>,
                                           winograd::gradient<4>, winograd::weight_gradient_of<4>};
  return large ? kOf4 : kOf2;
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
HWY_EXPORT(winograd_kernels_of_target);
const WinogradKernels& winograd_kernels(int m) { return HWY_DYNAMIC_DISPATCH(winograd_kernels_of_target)(m == 4); }
}  // namespace halfstep::cpu
#endif
