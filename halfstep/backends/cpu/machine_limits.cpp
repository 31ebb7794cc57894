// SPDX-License-Identifier: Apache-2.0
// Multiply-adds in registers and a stream through memory, for runtime/machine_limits.h.
#include "halfstep/runtime/machine_limits.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>

#include "halfstep/backends/cpu/amx_tile.h"
#include "halfstep/backends/cpu/isa.h"
#include "halfstep/backends/cpu/split_block.h"

namespace halfstep::cpu {
namespace {

// As many independent sums as hide the latency of a multiply-add on two units.
constexpr int kSums = 12;

#if defined(__x86_64__)

__attribute__((target("avx512f"))) double multiply_adds_512(std::int64_t rounds, float* result) {
  __m512 sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = _mm512_set1_ps(0.1f * static_cast<float>(i));
  const __m512 factor = _mm512_set1_ps(0.999f), term = _mm512_set1_ps(1e-3f);
  for (std::int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_fmadd_ps(sums[i], factor, term);
  }
  for (int i = 1; i < kSums; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  *result = _mm512_cvtss_f32(sums[0]);
  return 2.0 * 16 * kSums * static_cast<double>(rounds);
}

// Of pairs of bf16, with float32 sums.
__attribute__((target("avx512f,avx512bf16"))) double multiply_adds_of_pairs(std::int64_t rounds, float* result) {
  __m512 sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  const auto a = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80)), b = a;  // ones
  for (std::int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], a, b);
  }
  for (int i = 1; i < kSums; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  *result = _mm512_cvtss_f32(sums[0]);
  return 4.0 * 16 * kSums * static_cast<double>(rounds);
}

__attribute__((target("avx2,fma"))) double multiply_adds_256(std::int64_t rounds, float* result) {
  __m256 sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = _mm256_set1_ps(0.1f * static_cast<float>(i));
  const __m256 factor = _mm256_set1_ps(0.999f), term = _mm256_set1_ps(1e-3f);
  for (std::int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sums[i] = _mm256_fmadd_ps(sums[i], factor, term);
  }
  for (int i = 1; i < kSums; ++i) sums[0] = _mm256_add_ps(sums[0], sums[i]);
  *result = _mm256_cvtss_f32(sums[0]);
  return 2.0 * 8 * kSums * static_cast<double>(rounds);
}

double multiply_adds_of(DType dtype, std::int64_t rounds, float* result) {
  if (amx_usable()) {
    *result = 0;
    // Four products take about ten rounds of vectors.
    const double done = run_tile_products(std::max<std::int64_t>(rounds / 8, 1));
    const bool in_parts = dtype != DType::f16 || !has_f16_units(Isa::amx);
    return in_parts ? done / static_cast<double>(count_products(tile_parts(dtype, float32_precision()))) : done;
  }
  if (dtype == DType::bf16 && compute_isa(DType::bf16) >= Isa::avx512_bf16) {
    return multiply_adds_of_pairs(rounds, result);
  }
  return compute_isa() >= Isa::avx512 ? multiply_adds_512(rounds, result) : multiply_adds_256(rounds, result);
}

#else

double multiply_adds_of(DType /*dtype*/, std::int64_t rounds, float* result) {
  constexpr int kLanes = 4;
  float sums[kSums][kLanes] = {};
  for (std::int64_t r = 0; r < rounds; ++r) {
    for (auto& s : sums) {
      for (float& x : s) x = x * 0.999f + 1e-3f;
    }
  }
  *result = 0;
  for (const auto& s : sums) {
    for (const float x : s) *result += x;
  }
  return 2.0 * kLanes * kSums * static_cast<double>(rounds);
}

#endif

double loop_multiply_adds(DType dtype, std::int64_t rounds) {
  float result;
  const double done = multiply_adds_of(dtype, rounds, &result);
  volatile float used = result;  // else nothing of it would have to be computed
  (void)used;
  return done;
}

void loop_stream(float* __restrict to, const float* __restrict from, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] += 1e-6f * from[i];
}

[[maybe_unused]] const bool machine_loops = [] {
  set_machine_loops({.multiply_adds = loop_multiply_adds, .stream = loop_stream});
  return true;
}();

}  // namespace
}  // namespace halfstep::cpu
