// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/split_block.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "halfstep/backends/cpu/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define HALFSTEP_SPLIT_UNITS __attribute__((target("avx512f,avx512bw,avx512vl")))
#endif

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kSplitLanes = 16;
constexpr std::uint32_t kUpper = 0xFFFF0000, kHalfOfLower = 0x8000, kExponent = 0x7F800000;

// Whether the last part is rounded. NaN isn't: the sum might be zero.
template <class Number>
constexpr bool kRounded = Number::kTileParts == TileParts::leading_two;

// Parts as the upper halves of float32. Ties are rounded away from zero, which leaves no more behind than to even. The
// last one is what is left.
template <class Number>
std::array<std::uint32_t, Number::kParts> split(float x) {
  std::array<std::uint32_t, Number::kParts> parts;
  for (std::size_t p = 0; p + 1 < parts.size(); ++p) {
    parts[p] = (std::bit_cast<std::uint32_t>(x) + kHalfOfLower) & kUpper;
    x -= std::bit_cast<float>(parts[p]);
  }
  parts.back() = std::bit_cast<std::uint32_t>(x) + (kRounded<Number> && !std::isnan(x) ? kHalfOfLower : 0);
  return parts;
}
template <class Number>
void store_pair(float first, float second, const SplitTo& to, std::int64_t at) {
  const auto a = split<Number>(first), b = split<Number>(second);
  for (std::size_t p = 0; p < a.size(); ++p) {
    to.to[static_cast<std::int64_t>(p) * to.part + at] = a[p] >> 16 | (b[p] & kUpper);
  }
}

#if defined(__x86_64__)
template <std::int64_t Parts>
struct Vectors {
  __m512i part[Parts];
};
template <class Number>
__attribute__((always_inline)) HALFSTEP_SPLIT_UNITS inline Vectors<Number::kParts> split_vector(__m512 x) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(kUpper)), half = _mm512_set1_epi32(kHalfOfLower);
  Vectors<Number::kParts> v;
#pragma GCC unroll 3
  for (int p = 0; p + 1 < Number::kParts; ++p) {
    v.part[p] = _mm512_and_si512(_mm512_add_epi32((__m512i)x, half), upper);
    x = _mm512_sub_ps(x, (__m512)v.part[p]);
  }
  v.part[Number::kParts - 1] = (__m512i)x;
  if constexpr (kRounded<Number>) {
    const __mmask16 numbers = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
    v.part[Number::kParts - 1] = _mm512_mask_add_epi32((__m512i)x, numbers, (__m512i)x, half);
  }
  return v;
}
// Pairs of lanes.
template <class Number>
__attribute__((always_inline)) HALFSTEP_SPLIT_UNITS inline void split_pairs(__m512 first, __m512 second,
                                                                            std::uint32_t* to, std::int64_t part) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(kUpper));
  const Vectors<Number::kParts> a = split_vector<Number>(first), b = split_vector<Number>(second);
#pragma GCC unroll 3
  for (int p = 0; p < Number::kParts; ++p) {
    // With a mask of all, since g++ takes the others' undefined operand for a mistake.
    const __m512i lower = _mm512_maskz_srli_epi32(0xFFFF, a.part[p], 16);
    _mm512_storeu_si512(to + p * part, _mm512_or_si512(lower, _mm512_and_si512(b.part[p], upper)));
  }
}
HALFSTEP_SPLIT_UNITS inline __mmask16 some_lanes(std::int64_t n) {
  return static_cast<__mmask16>(n >= kSplitLanes ? 0xFFFF : (1U << std::max<std::int64_t>(n, 0)) - 1);
}
HALFSTEP_SPLIT_UNITS inline __m512 load_some(const float* from, std::int64_t n) {
  return n >= kSplitLanes ? _mm512_loadu_ps(from) : _mm512_maskz_loadu_ps(some_lanes(n), from);
}
HALFSTEP_SPLIT_UNITS inline __m512 load_some(const Half* from, std::int64_t n) {
  const __m256i bits = n >= kSplitLanes ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))
                                        : _mm256_maskz_loadu_epi16(some_lanes(n), from);
  return _mm512_maskz_cvtph_ps(0xFFFF, bits);
}

// 16 lines of 16, from `from` to `to` with lines `stride` apart there.
HALFSTEP_SPLIT_UNITS void turn_sixteen(const std::uint32_t* from, std::uint32_t* to, std::int64_t stride) {
  constexpr __mmask16 kAll = 0xFFFF;
  constexpr __mmask8 kAllEight = 0xFF;
  __m512i x[16], y[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) x[i] = _mm512_loadu_si512(from + i * kSplitLanes);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_maskz_unpacklo_epi32(kAll, x[i], x[i + 1]);
    y[i + 1] = _mm512_maskz_unpackhi_epi32(kAll, x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_maskz_unpacklo_epi64(kAllEight, y[i], y[i + 2]);
    x[i + 1] = _mm512_maskz_unpackhi_epi64(kAllEight, y[i], y[i + 2]);
    x[i + 2] = _mm512_maskz_unpacklo_epi64(kAllEight, y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_maskz_unpackhi_epi64(kAllEight, y[i + 1], y[i + 3]);
  }
  // Now quarter q of x[4 r + j] holds column 4 q + j of lines 4 r to 4 r + 3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_maskz_shuffle_i32x4(kAll, x[j], x[4 + j], 0x88),
                  b = _mm512_maskz_shuffle_i32x4(kAll, x[j], x[4 + j], 0xDD),
                  c = _mm512_maskz_shuffle_i32x4(kAll, x[8 + j], x[12 + j], 0x88),
                  d = _mm512_maskz_shuffle_i32x4(kAll, x[8 + j], x[12 + j], 0xDD);
    _mm512_storeu_si512(to + j * stride, _mm512_maskz_shuffle_i32x4(kAll, a, c, 0x88));
    _mm512_storeu_si512(to + (4 + j) * stride, _mm512_maskz_shuffle_i32x4(kAll, b, d, 0x88));
    _mm512_storeu_si512(to + (8 + j) * stride, _mm512_maskz_shuffle_i32x4(kAll, a, c, 0xDD));
    _mm512_storeu_si512(to + (12 + j) * stride, _mm512_maskz_shuffle_i32x4(kAll, b, d, 0xDD));
  }
}

template <class Number>
HALFSTEP_SPLIT_UNITS void split_along_by_vectors(const typename Number::Element* from, std::int64_t n,
                                                 const SplitTo& to, std::int64_t group, std::int64_t ahead) {
  std::uint32_t* at = to.to;
  for (std::int64_t i = 0; i < n; i += kSplitGroup, from += kSplitGroup, at += group) {
    __builtin_prefetch(from + ahead);
    __builtin_prefetch(from + ahead + kSplitLanes);
    split_pairs<Number>(load_some(from, n - i), load_some(from + kSplitLanes, n - i - kSplitLanes), at, to.part);
  }
}
template <class Number>
HALFSTEP_SPLIT_UNITS void split_across_by_vectors(const typename Number::Element* first,
                                                  const typename Number::Element* second, std::int64_t n,
                                                  const SplitTo& to, std::int64_t panel, std::int64_t ahead) {
  for (std::int64_t j = 0; j < n; j += kSplitLanes) {
    __builtin_prefetch(first + j + ahead, 0, 2);
    __builtin_prefetch(second + j + ahead, 0, 2);
    split_pairs<Number>(load_some(first + j, n - j), load_some(second + j, n - j),
                        to.to + j / kSplitGroup * panel + j % kSplitGroup, to.part);
  }
}
constexpr std::int64_t kSquare = kSplitLanes * kSplitLanes;
template <class Number>
HALFSTEP_SPLIT_UNITS void split_turned_by_vectors(const typename Number::Element* const* lines, std::int64_t n,
                                                  const SplitTo& to, std::int64_t ahead) {
  constexpr std::int64_t kParts = Number::kParts;
  alignas(64) std::uint32_t pairs[kParts * kSquare];
  for (std::int64_t i = 0; i < kSplitLanes; ++i) {
    __builtin_prefetch(lines[i] + ahead, 0, 2);
    __builtin_prefetch(lines[i + kSplitLanes] + ahead, 0, 2);
    split_pairs<Number>(load_some(lines[i], n), load_some(lines[i + kSplitLanes], n), pairs + i * kSplitLanes, kSquare);
  }
  for (std::int64_t p = 0; p < kParts; ++p) turn_sixteen(pairs + p * kSquare, to.to + p * to.part, kSplitLanes);
}
template <class Number>
HALFSTEP_SPLIT_UNITS void split_columns_by_vectors(const typename Number::Element* from, std::int64_t stride,
                                                   std::int64_t count, std::int64_t n, const SplitTo& to) {
  constexpr std::int64_t kParts = Number::kParts;
  alignas(64) std::uint32_t pairs[kParts * kSquare];
  for (std::int64_t j = 0; j < kSplitLanes; ++j, from += stride) {
    const std::int64_t inside = j < count ? n : 0;
    split_pairs<Number>(load_some(from, inside), load_some(from + kSplitLanes, inside - kSplitLanes),
                        pairs + j * kSplitLanes, kSquare);
  }
  for (std::int64_t p = 0; p < kParts; ++p) turn_sixteen(pairs + p * kSquare, to.to + p * to.part, kSplitGroup);
}

HALFSTEP_SPLIT_UNITS inline void store_some(__m512 x, __mmask16 lanes, bool past, float* to) {
  past ? _mm512_stream_ps(to, x) : _mm512_mask_storeu_ps(to, lanes, x);
}
HALFSTEP_SPLIT_UNITS inline void store_some(__m512 x, __mmask16 lanes, bool past, Half* to) {
  const __m256i bits = _mm512_maskz_cvtps_ph(0xFFFF, x, _MM_FROUND_TO_NEAREST_INT);
  past ? _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bits) : _mm256_mask_storeu_epi16(to, lanes, bits);
}
// Copies nothing without `to`.
template <class Element>
HALFSTEP_SPLIT_UNITS bool copy_finite_by_vectors(const PanelSums& from, Element* to, std::int64_t stride, bool stream) {
  const __m512i exponent = _mm512_set1_epi32(kExponent);
  constexpr std::uintptr_t kStored = kSplitLanes * sizeof(Element);
  const bool past = stream && from.columns % kSplitLanes == 0 && reinterpret_cast<std::uintptr_t>(to) % kStored == 0 &&
                    stride % kSplitLanes == 0;
  __mmask16 any = 0;
  for (std::int64_t i = 0; i < from.rows; ++i) {
    const std::int64_t line = from.lines == nullptr ? i : from.lines[i];
    if (line < 0) continue;
    for (std::int64_t j = 0; j < from.columns; j += kSplitLanes) {
      const float* const at = from.sums + j / kSplitGroup * from.panel + i * kSplitGroup + j % kSplitGroup;
      const __mmask16 lanes = some_lanes(from.columns - j);
      __m512 x = _mm512_maskz_loadu_ps(lanes, at);
      any |= _mm512_cmpeq_epi32_mask(_mm512_and_si512((__m512i)x, exponent), exponent);
      if (to == nullptr) continue;
      if (from.bias != nullptr) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(lanes, from.bias + j));
      store_some(x, lanes, past, to + line * stride + j);
    }
  }
  return any == 0;
}
bool in_split_vectors() { return compute_isa() >= Isa::avx512; }
#endif

template <class Element>
float or_zero(const Element* from, std::int64_t i, std::int64_t n) {
  return i < n ? static_cast<float>(from[i]) : 0.0F;
}

}  // namespace

template <class Number>
void split_along(const typename Number::Element* from, std::int64_t n, const SplitTo& to, std::int64_t group,
                 std::int64_t ahead) {
#if defined(__x86_64__)
  if (in_split_vectors()) return split_along_by_vectors<Number>(from, n, to, group, ahead);
#endif
  (void)ahead;
  for (std::int64_t g = 0; g * kSplitGroup < n; ++g) {
    for (std::int64_t i = 0; i < kSplitLanes; ++i) {
      const std::int64_t at = g * kSplitGroup + i;
      store_pair<Number>(or_zero(from, at, n), or_zero(from, at + kSplitLanes, n), to, g * group + i);
    }
  }
}

template <class Number>
void split_across(const typename Number::Element* first, const typename Number::Element* second, std::int64_t n,
                  const SplitTo& to, std::int64_t panel, std::int64_t ahead) {
#if defined(__x86_64__)
  if (in_split_vectors()) return split_across_by_vectors<Number>(first, second, n, to, panel, ahead);
#endif
  (void)ahead;
  for (std::int64_t j = 0; j < n; ++j) {
    store_pair<Number>(static_cast<float>(first[j]), static_cast<float>(second[j]), to,
                       j / kSplitGroup * panel + j % kSplitGroup);
  }
}

template <class Number>
void split_turned(const typename Number::Element* const* lines, std::int64_t n, const SplitTo& to, std::int64_t ahead) {
#if defined(__x86_64__)
  if (in_split_vectors()) return split_turned_by_vectors<Number>(lines, n, to, ahead);
#endif
  (void)ahead;
  for (std::int64_t j = 0; j < kSplitLanes; ++j) {
    for (std::int64_t i = 0; i < kSplitLanes; ++i) {
      store_pair<Number>(or_zero(lines[i], j, n), or_zero(lines[i + kSplitLanes], j, n), to, j * kSplitLanes + i);
    }
  }
}

template <class Number>
void split_columns(const typename Number::Element* from, std::int64_t stride, std::int64_t count, std::int64_t n,
                   const SplitTo& to) {
#if defined(__x86_64__)
  if (in_split_vectors()) return split_columns_by_vectors<Number>(from, stride, count, n, to);
#endif
  for (std::int64_t j = 0; j < kSplitLanes; ++j) {
    const typename Number::Element* const line = from + j * stride;
    for (std::int64_t i = 0; i < kSplitLanes; ++i) {
      const std::int64_t inside = j < count ? n : 0;
      store_pair<Number>(or_zero(line, i, inside), or_zero(line, i + kSplitLanes, inside), to, i * kSplitGroup + j);
    }
  }
}

template <class Element>
bool copy_finite(const PanelSums& from, Element* to, std::int64_t stride, bool stream) {
#if defined(__x86_64__)
  if (in_split_vectors()) return copy_finite_by_vectors(from, to, stride, stream);
#endif
  (void)stream;
  bool finite = true;
  for (std::int64_t i = 0; i < from.rows; ++i) {
    const std::int64_t line = from.lines == nullptr ? i : from.lines[i];
    for (std::int64_t j = 0; line >= 0 && j < from.columns; ++j) {
      const float x = from.sums[j / kSplitGroup * from.panel + i * kSplitGroup + j % kSplitGroup];
      finite = finite && (std::bit_cast<std::uint32_t>(x) & kExponent) != kExponent;
      if (to != nullptr) to[line * stride + j] = Element(from.bias != nullptr ? x + from.bias[j] : x);
    }
  }
  return finite;
}

template HS_API void split_along<SplitFloat>(const float*, std::int64_t, const SplitTo&, std::int64_t, std::int64_t);
template HS_API void split_along<SplitFloatInTwo>(const float*, std::int64_t, const SplitTo&, std::int64_t,
                                                  std::int64_t);
template HS_API void split_along<SplitHalf>(const Half*, std::int64_t, const SplitTo&, std::int64_t, std::int64_t);
template HS_API void split_across<SplitFloat>(const float*, const float*, std::int64_t, const SplitTo&, std::int64_t,
                                              std::int64_t);
template HS_API void split_across<SplitFloatInTwo>(const float*, const float*, std::int64_t, const SplitTo&,
                                                   std::int64_t, std::int64_t);
template HS_API void split_across<SplitHalf>(const Half*, const Half*, std::int64_t, const SplitTo&, std::int64_t,
                                             std::int64_t);
template HS_API void split_turned<SplitFloat>(const float* const*, std::int64_t, const SplitTo&, std::int64_t);
template HS_API void split_turned<SplitFloatInTwo>(const float* const*, std::int64_t, const SplitTo&, std::int64_t);
template HS_API void split_turned<SplitHalf>(const Half* const*, std::int64_t, const SplitTo&, std::int64_t);
template HS_API void split_columns<SplitFloat>(const float*, std::int64_t, std::int64_t, std::int64_t, const SplitTo&);
template HS_API void split_columns<SplitFloatInTwo>(const float*, std::int64_t, std::int64_t, std::int64_t,
                                                    const SplitTo&);
template HS_API void split_columns<SplitHalf>(const Half*, std::int64_t, std::int64_t, std::int64_t, const SplitTo&);
template HS_API bool copy_finite(const PanelSums&, float*, std::int64_t, bool);
template HS_API bool copy_finite(const PanelSums&, Half*, std::int64_t, bool);

}  // namespace halfstep::cpu
