// SPDX-License-Identifier: Apache-2.0
// In the versions of Highway in use no target has AVX512-BF16, so this is written in intrinsics.
#include "halfstep/backends/cpu/pair_tile.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "halfstep/backends/cpu/isa.h"
#include "halfstep/core/float16.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define HALFSTEP_PAIR_UNITS __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#endif

namespace halfstep::cpu {

namespace {

float half_of(const float* pair, int i) {
  BFloat16 halves[2];
  std::memcpy(halves, pair, sizeof halves);
  return static_cast<float>(halves[i]);
}
void plain_tile(const GemmTile& t, int rows, int vectors) {
  for (int i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < vectors * kPairLanes; ++j) {
      float sum = 0;
      for (std::int64_t p = 0; p < t.k; ++p) {
        const float *s = t.s + p * t.s_stride + i, *v = t.v + p * t.v_stride + j;
        sum += half_of(s, 0) * half_of(v, 0);
        sum += half_of(s, 1) * half_of(v, 1);
      }
      float& c = t.c[i * t.ldc + j];
      c = t.accumulate ? c + sum : sum;
    }
  }
}
template <int Rows, int Vectors>
void plain_pair_tile(const GemmTile& t) {
  plain_tile(t, Rows, Vectors);
}

#if defined(__x86_64__)
bool has_units() { return compute_isa() >= Isa::avx512_bf16; }

// A row's value is broadcast from memory; the compiler makes that part of the multiplication.
template <int Rows, int Vectors>
HALFSTEP_PAIR_UNITS void pair_tile(const GemmTile& t) {
  __m512 sum[Rows][Vectors];
#pragma GCC unroll 14
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) sum[i][j] = _mm512_setzero_ps();
  }
  const float *v = t.v, *s = t.s;
  const std::int64_t v_stride = t.v_stride, s_stride = t.s_stride;
  const auto step = [&]() HALFSTEP_PAIR_UNITS {
    __m512 x[Vectors];
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) x[j] = _mm512_loadu_ps(v + 16 * j);
#pragma GCC unroll 14
    for (int i = 0; i < Rows; ++i) {
      const __m512bh a = reinterpret_cast<__m512bh>(_mm512_set1_ps(s[i]));
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) {
        sum[i][j] = _mm512_dpbf16_ps(sum[i][j], a, reinterpret_cast<__m512bh>(x[j]));
      }
    }
    v += v_stride;
    s += s_stride;
  };
  // As for the float32 tiles: the results' lines come while the sums are made.
  const std::int64_t fetched = t.k / Vectors < Rows ? t.k / Vectors : Rows;
  const float* line = t.c;
  for (std::int64_t i = 0; i < fetched; ++i, line += t.ldc) {
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) {
      __builtin_prefetch(line + 16 * j, 1);
      step();
    }
  }
  for (std::int64_t p = t.k - fetched * Vectors; p > 0; --p) step();
  float* c = t.c;
#pragma GCC unroll 14
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) {
      __m512 r = sum[i][j];
      if (t.accumulate) r = _mm512_add_ps(r, _mm512_loadu_ps(c + 16 * j));
      _mm512_storeu_ps(c + 16 * j, r);
    }
    c += t.ldc;
  }
}

template <int Rows, int Vectors>
GemmTileFn tile_of() {
  return has_units() ? pair_tile<Rows, Vectors> : plain_pair_tile<Rows, Vectors>;
}

HALFSTEP_PAIR_UNITS void interleave(const std::uint16_t* first, const std::uint16_t* second, std::int64_t n,
                                    std::uint32_t* to) {
  alignas(64) static constexpr auto kOrder = [] {
    std::array<std::uint16_t, 64> order{};
    for (std::uint16_t i = 0; i < 32; ++i) {
      order[i] = static_cast<std::uint16_t>(i / 2 + (i % 2 != 0 ? 32 : 0));
      order[32 + i] = static_cast<std::uint16_t>(order[i] + 16);
    }
    return order;
  }();
  const __m512i lower = _mm512_load_si512(kOrder.data()), upper = _mm512_load_si512(kOrder.data() + 32);
  for (std::int64_t i = 0; i < n; i += 32) {
    const __m512i a = _mm512_loadu_si512(first + i), b = _mm512_loadu_si512(second + i);
    _mm512_storeu_si512(to + i, _mm512_permutex2var_epi16(a, lower, b));
    _mm512_storeu_si512(to + i + 16, _mm512_permutex2var_epi16(a, upper, b));
  }
}
// The elements of both in `lanes` as pairs, zeros in the others.
HALFSTEP_PAIR_UNITS inline __m512i sixteen_pairs(const std::uint16_t* first, const std::uint16_t* second,
                                                 __mmask16 lanes) {
  // With masks, since g++ 12 warns of the others' undefined vectors.
  const __m512i a = _mm512_maskz_cvtepu16_epi32(lanes, _mm256_maskz_loadu_epi16(lanes, first)),
                b = _mm512_maskz_cvtepu16_epi32(lanes, _mm256_maskz_loadu_epi16(lanes, second));
  return _mm512_or_si512(a, _mm512_maskz_slli_epi32(lanes, b, 16));
}

// All columns of a panel of 32: without masks and a loop in them, 0.8 of the time.
HALFSTEP_PAIR_UNITS inline void panel_of_pairs(const std::uint16_t* first, const std::uint16_t* second, float* to) {
  // Quarters of a vector become halves: the unpacked pairs of lower and upper quarters are columns side by side.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  constexpr __mmask8 kAll = 0xFF;
  const __m512i a = _mm512_maskz_permutexvar_epi64(kAll, order, _mm512_loadu_si512(first)),
                b = _mm512_maskz_permutexvar_epi64(kAll, order, _mm512_loadu_si512(second));
  _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, b));
  _mm512_storeu_si512(to + 16, _mm512_unpackhi_epi16(a, b));
}

HALFSTEP_PAIR_UNITS void gather_pairs_by_vectors(const void* const* rows, std::int64_t steps, std::int64_t first,
                                                 std::int64_t n, std::int64_t width, std::int64_t size, float* to,
                                                 std::int64_t stride) {
  const std::int64_t panels = width == 2 * kPairLanes ? n / width : 0, rest = n - panels * width;
  for (std::int64_t i = 0; i < steps; ++i, to += stride) {
    const auto* a = static_cast<const std::uint16_t*>(rows[2 * i]) + first;
    const auto* b = static_cast<const std::uint16_t*>(rows[2 * i + 1]) + first;
    float* panel = to;
    // What will be wanted 16 steps later comes meanwhile.
    const std::int64_t later = std::min(i + 16, steps - 1);
    const auto* c = static_cast<const std::uint16_t*>(rows[2 * later]) + first;
    const auto* d = static_cast<const std::uint16_t*>(rows[2 * later + 1]) + first;
    for (std::int64_t p = 0; p < panels; ++p, a += 32, b += 32, c += 32, d += 32, panel += size) {
      __builtin_prefetch(c);
      __builtin_prefetch(d);
      panel_of_pairs(a, b, panel);
    }
    for (std::int64_t left = rest; left > 0; left -= width, a += width, b += width, panel += size) {
      const std::int64_t columns = left < width ? left : width;
      std::int64_t j = 0;
      for (; j + 16 <= columns; j += 16) _mm512_storeu_si512(panel + j, sixteen_pairs(a + j, b + j, 0xFFFF));
      if (j == columns) continue;
      const auto lanes = static_cast<__mmask16>((1U << (columns - j)) - 1);
      _mm512_storeu_si512(panel + j, sixteen_pairs(a + j, b + j, lanes));
    }
  }
}
#else
template <int Rows, int Vectors>
GemmTileFn tile_of() {
  return plain_pair_tile<Rows, Vectors>;
}
#endif

template <int Vectors, int... I>
GemmTileFn tile_with(int rows, std::integer_sequence<int, I...>) {
  GemmTileFn tile = nullptr;
  ((rows == I + 1 ? void(tile = tile_of<I + 1, Vectors>()) : void()), ...);
  return tile;
}

}  // namespace

GemmTileFn bfloat16_pair_tile(int vectors, int rows) noexcept {
  constexpr std::make_integer_sequence<int, GemmKernels::kMaxRows> kRows;
  return vectors == 1 ? tile_with<1>(rows, kRows) : tile_with<2>(rows, kRows);
}

void gather_pairs(const void* const* rows, std::int64_t steps, std::int64_t first, std::int64_t n, std::int64_t width,
                  std::int64_t size, float* to, std::int64_t stride) {
#if defined(__x86_64__)
  if (has_units()) return gather_pairs_by_vectors(rows, steps, first, n, width, size, to, stride);
#endif
  for (std::int64_t i = 0; i < steps; ++i) {
    const auto* a = static_cast<const std::uint16_t*>(rows[2 * i]) + first;
    const auto* b = static_cast<const std::uint16_t*>(rows[2 * i + 1]) + first;
    for (std::int64_t j = 0; j < n; ++j) {
      const std::uint32_t pair = a[j] | static_cast<std::uint32_t>(b[j]) << 16;
      std::memcpy(to + j / width * size + i * stride + j % width, &pair, sizeof pair);
    }
    // Up to the end of the last panel's vector.
    const std::int64_t used = (n - 1) % width + 1;
    for (std::int64_t j = used; j % kPairLanes != 0; ++j) to[(n - 1) / width * size + i * stride + j] = 0;
  }
}

void interleave_pairs(const std::uint16_t* first, const std::uint16_t* second, std::int64_t n, std::uint32_t* to) {
#if defined(__x86_64__)
  if (has_units()) return interleave(first, second, n, to);
#endif
  for (std::int64_t i = 0; i < n; ++i) to[i] = first[i] | static_cast<std::uint32_t>(second[i]) << 16;
}

}  // namespace halfstep::cpu
