// SPDX-License-Identifier: Apache-2.0
// Blocks of values to and from float32, for kernels that compute in float32 on pieces that fit the first-level cache.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "halfstep/core/dtype.h"

namespace halfstep::cpu {

inline void to_floats(const float* from, std::int64_t n, float* to) {
  std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
}
inline void to_floats(const BFloat16* from, std::int64_t n, float* to) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = std::bit_cast<float>(static_cast<std::uint32_t>(from[i].bits) << 16);
}
inline void to_floats(const Half* from, std::int64_t n, float* to) {
  std::int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
#endif
  for (; i < n; ++i) to[i] = convert<float>(from[i]);
}

inline void from_floats(const float* from, std::int64_t n, float* to) {
  std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
}
inline void from_floats(const float* from, std::int64_t n, BFloat16* to) {
  for (std::int64_t i = 0; i < n; ++i) {
    const auto u = std::bit_cast<std::uint32_t>(from[i]);
    const std::uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    const std::uint32_t quiet = u >> 16 | 0x40u;  // a NaN stays one
    to[i].bits = static_cast<std::uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
  }
}
inline void from_floats(const float* from, std::int64_t n, Half* to) {
  std::int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#endif
  for (; i < n; ++i) to[i] = convert<Half>(from[i]);
}

/// `n` values of a dtype (f32, f16, bf16) from element `at` on, as floats.
inline void load_floats(DType dtype, const void* data, std::int64_t at, std::int64_t n, float* to) {
  switch (dtype) {
    case DType::f16:
      return to_floats(static_cast<const Half*>(data) + at, n, to);
    case DType::bf16:
      return to_floats(static_cast<const BFloat16*>(data) + at, n, to);
    default:
      return to_floats(static_cast<const float*>(data) + at, n, to);
  }
}
/// The same back, rounded to nearest even.
inline void store_floats(DType dtype, void* data, std::int64_t at, std::int64_t n, const float* from) {
  switch (dtype) {
    case DType::f16:
      return from_floats(from, n, static_cast<Half*>(data) + at);
    case DType::bf16:
      return from_floats(from, n, static_cast<BFloat16*>(data) + at);
    default:
      return from_floats(from, n, static_cast<float*>(data) + at);
  }
}

}  // namespace halfstep::cpu
