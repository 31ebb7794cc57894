// SPDX-License-Identifier: Apache-2.0
// A tile keeps 14 x 32 (AVX-512) or 6 x 16 (AVX2) sums in registers; a step loads two vectors of one operand and
// broadcasts one value a row of the other: 16 loads for 28 fused multiply-adds, so that the two multiply-add units are
// the limit. Measured on a 2.4 GHz Cascade Lake: 0.97 of the 153 GFLOP/s of a core when the vectors are aligned to 64
// bytes, 0.78 when they straddle lines, whether the broadcast operand is packed or read in place.
//
// Where another program runs on the core's second hyperthread, instructions become the limit: 47 a step with those of
// the loop. So a loop does four steps, and in AVX-512 10 of 14 rows broadcast within their multiplications: 34
// instructions, and 26 loads, which two load units do in 13 cycles of 14. Not from rows in place: an index register in
// the address makes two instructions of such a one again. Measured on an Emerald Rapids beside others' programs, with
// everything in the second-level cache: 0.64 to 0.74 of the rate in registers; on a quiet core 0.88 to 0.91.
#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "halfstep/backends/cpu/gemm_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/gemm_tile.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "halfstep/backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace {

constexpr int kGemmTileLanes = static_cast<int>(hn::MaxLanes(F32Tag()));
constexpr int kGemmTileRows = HWY_TARGET <= HWY_AVX3 ? 14 : 6;

/// Fetches a line that will be written, and takes it from the other cores already. Processors without the instruction
/// (before Broadwell) pass over it.
HWY_INLINE void prefetch_to_write([[maybe_unused]] const void* p) {
#if HWY_ARCH_X86
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(p)));
#endif
}

/// sum + *a * x: a multiplication and its load in one instruction, see the top of the file.
HWY_INLINE F32Vec multiply_loaded(const float* a, F32Vec x, F32Vec sum) {
#if HWY_TARGET <= HWY_AVX3
  __m512 result = sum.raw;
  asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(result) : "v"(x.raw), "m"(*a));
  return F32Vec{result};
#else
  return hn::MulAdd(hn::Set(F32Tag(), *a), x, sum);
#endif
}

/// The sums of a tile, with what other steps have added up, the bias and the activation, rounded to T.
template <class T, int Rows, int Vectors>
HWY_INLINE void finish_rows(const GemmTile& t, F32Vec (&sum)[Rows][Vectors]) {
  const F32Tag d;
  if (t.accumulate) {
    const float* c = t.c;
#pragma GCC unroll 14
    for (int i = 0; i < Rows; ++i, c += t.ldc) {
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) sum[i][j] = hn::Add(sum[i][j], hn::LoadU(d, c + j * kGemmTileLanes));
    }
  }
  if (t.bias != nullptr) {
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) {
      const F32Vec bias = hn::LoadU(d, t.bias + j * kGemmTileLanes);
#pragma GCC unroll 14
      for (int i = 0; i < Rows; ++i) sum[i][j] = hn::Add(sum[i][j], bias);
    }
  }
  if (t.relu) {
#pragma GCC unroll 14
    for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) {
        // Max would turn a NaN into 0.
        sum[i][j] = hn::IfThenElse(hn::Lt(sum[i][j], hn::Zero(d)), hn::Zero(d), sum[i][j]);
      }
    }
  }
  T* to = static_cast<T*>(t.rounded);
#pragma GCC unroll 14
  for (int i = 0; i < Rows; ++i, to += t.rounded_stride) {
    if constexpr (Vectors == 2) {
      store_two(sum[i][0], sum[i][1], d, to);
    } else {
      store(sum[i][0], d, to);
    }
  }
}

/// Results of type T: float, or a 16-bit float that the sums are rounded to on their way from the registers.
template <class T, int Rows, int Vectors, GemmScalars Scalars>
void tile(const GemmTile& t) {
  constexpr bool kRounded = sizeof(T) == 2;
  const F32Tag d;
  F32Vec sum[Rows][Vectors];
#pragma GCC unroll 14
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) sum[i][j] = hn::Zero(d);
  }
  const float* HWY_RESTRICT v = t.v;
  const std::int64_t v_stride = t.v_stride;
  constexpr bool kByRow = Scalars == GemmScalars::rows;
  constexpr int kPointers = kByRow ? (Rows + 2) / 3 : 1;  // Every third row: the two after it are reached by index.
  const std::int64_t s_stride = t.s_stride;
  const float* s[kPointers];
#pragma GCC unroll 5
  for (int i = 0; i < kPointers; ++i) s[i] = t.s + 3 * i * s_stride;
  const auto step = [&]() HWY_ATTR __attribute__((always_inline)) {
    F32Vec x[Vectors];
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) x[j] = hn::LoadU(d, v + j * kGemmTileLanes);
    v += v_stride;
#pragma GCC unroll 14
    for (int i = 0; i < Rows; ++i) {
      const float* const from = kByRow                                ? s[i / 3] + (i % 3) * s_stride
                                : Scalars == GemmScalars::packed_rows ? s[0] + i * kGemmRowStride
                                                                      : s[0] + i;
      if (!kByRow && i % 7 > 1) {
#pragma GCC unroll 2
        for (int j = 0; j < Vectors; ++j) sum[i][j] = multiply_loaded(from, x[j], sum[i][j]);
        continue;
      }
      const F32Vec a = hn::Set(d, *from);
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) sum[i][j] = hn::MulAdd(a, x[j], sum[i][j]);
    }
#pragma GCC unroll 5
    for (int i = 0; i < kPointers; ++i) s[i] += Scalars == GemmScalars::steps ? s_stride : 1;
  };
  // Results seldom lie in the first-level cache: their lines come while the sums are made, one a step, so that loads
  // find room beside them.
  constexpr int kInLine = 64 / static_cast<int>(sizeof(T)), kLines = std::max(1, Vectors * kGemmTileLanes / kInLine);
  const std::int64_t fetched = std::min<std::int64_t>(Rows, t.k / kLines);
  const T* line = static_cast<T*>(kRounded ? t.rounded : t.c);
  const std::int64_t line_stride = kRounded ? t.rounded_stride : t.ldc;
  for (std::int64_t i = 0; i < fetched; ++i, line += line_stride) {
#pragma GCC unroll 2
    for (int j = 0; j < kLines; ++j) {
      prefetch_to_write(line + kInLine * j);
      step();
    }
  }
  std::int64_t left = t.k - fetched * kLines;
  for (; left >= 4; left -= 4) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) step();
  }
  for (; left > 0; --left) step();
  if constexpr (kRounded) {
    finish_rows<T, Rows, Vectors>(t, sum);
  } else {
    float* c = t.c;
#pragma GCC unroll 14
    for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) {
        F32Vec r = sum[i][j];
        if (t.accumulate) r = hn::Add(r, hn::LoadU(d, c + j * kGemmTileLanes));
        hn::StoreU(r, d, c + j * kGemmTileLanes);
      }
      c += t.ldc;
    }
  }
}

template <class T, GemmScalars Scalars, int Vectors, int... I>
constexpr std::array<GemmTileFn, GemmKernels::kMaxRows> tile_row(std::integer_sequence<int, I...>) {
  return {{tile<T, I + 1, Vectors, Scalars>...}};
}

}  // namespace

void fill_tiles_of_target(GemmKernels& kernels) {
  using Sequence = std::make_integer_sequence<int, kGemmTileRows>;
  const auto fill = [&]<class T, GemmScalars scalars>(auto& to) {
    std::ranges::copy(tile_row<T, scalars, 1>(Sequence()), to[0]);
    std::ranges::copy(tile_row<T, scalars, 2>(Sequence()), to[1]);
  };
  const auto fill_floats = [&]<GemmScalars scalars>() {
    fill.template operator()<float, scalars>(kernels.tiles[static_cast<int>(scalars)]);
  };
  fill_floats.template operator()<GemmScalars::steps>();
  fill_floats.template operator()<GemmScalars::rows>();
  fill_floats.template operator()<GemmScalars::packed_rows>();
  fill.template operator()<Half, GemmScalars::packed_rows>(kernels.f16_tiles);
#if HWY_TARGET <= HWY_AVX3
  // With AVX2's 16 registers the compiler makes room for rounding to bf16 by keeping sums in memory while it
  // multiplies.
  fill.template operator()<BFloat16, GemmScalars::packed_rows>(kernels.bf16_tiles);
#endif
  kernels.max_rows = kGemmTileRows;
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
HWY_EXPORT(fill_tiles_of_target);
void fill_tiles(GemmKernels& kernels) { HWY_DYNAMIC_DISPATCH(fill_tiles_of_target)(kernels); }
}  // namespace halfstep::cpu
#endif
