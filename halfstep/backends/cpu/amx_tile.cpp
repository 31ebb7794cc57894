// SPDX-License-Identifier: Apache-2.0
// The kernel is written once, over the eight tiles of a `Machine`: the processor's, by intrinsics, or the model's, by
// which it is tested where there is no AMX. 32 x 32 of the result stay in four tiles for a whole chunk of steps; each
// 16 steps load two tiles of each operand, which is half as much as four products can hide.
#include "halfstep/backends/cpu/amx_tile.h"

#include <algorithm>

#include "halfstep/backends/cpu/amx_model.h"
#include "halfstep/backends/cpu/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define HALFSTEP_AMX_UNITS __attribute__((target("amx-tile,amx-bf16")))
#else
#define HALFSTEP_AMX_UNITS
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace halfstep::cpu {
namespace {

#if defined(__x86_64__)
// The intrinsics take literal numbers only.
#define HALFSTEP_EACH_TILE(what)    \
  if constexpr (Tile == 0) what(0); \
  if constexpr (Tile == 1) what(1); \
  if constexpr (Tile == 2) what(2); \
  if constexpr (Tile == 3) what(3); \
  if constexpr (Tile == 4) what(4); \
  if constexpr (Tile == 5) what(5); \
  if constexpr (Tile == 6) what(6); \
  if constexpr (Tile == 7) what(7)
#define HALFSTEP_LOAD_TILE(tile) _tile_loadd(tile, from, stride)
#define HALFSTEP_STORE_TILE(tile) _tile_stored(tile, to, stride)
#define HALFSTEP_ZERO_TILE(tile) _tile_zero(tile)

struct TileUnit {
  // g++ takes eight bytes for what the instruction reads, and nothing for what loads read: without the barrier it may
  // leave stores out or put them behind the instruction.
  HALFSTEP_AMX_UNITS static void configure(const TileConfig& config) {
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  HALFSTEP_AMX_UNITS static void release() { _tile_release(); }
  template <int Tile>
  HALFSTEP_AMX_UNITS static void load(const void* from, std::int64_t stride) {
    HALFSTEP_EACH_TILE(HALFSTEP_LOAD_TILE);
  }
  template <int Tile>
  HALFSTEP_AMX_UNITS static void store(void* to, std::int64_t stride) {
    HALFSTEP_EACH_TILE(HALFSTEP_STORE_TILE);
  }
  template <int Tile>
  HALFSTEP_AMX_UNITS static void zero() {
    HALFSTEP_EACH_TILE(HALFSTEP_ZERO_TILE);
  }
  template <int C, int A, int B>
  HALFSTEP_AMX_UNITS static void multiply() {
    static_assert(C == (A - 4) * 2 + B - 6);
    if constexpr (C == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (C == 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (C == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (C == 3) _tile_dpbf16ps(3, 5, 7);
  }
};
#undef HALFSTEP_EACH_TILE
#undef HALFSTEP_LOAD_TILE
#undef HALFSTEP_STORE_TILE
#undef HALFSTEP_ZERO_TILE
#endif

// Tiles of a block of `rows` x `columns`, at most 32 x 32: 0 to 3 are those of the result, row by row, 4 and 5 of the
// first operand, 6 and 7 of the second. Those of the edge are smaller, so that nothing outside of the result is read or
// written. Steps are always 16: another shape for the last ones would clear the sums.
TileConfig block_config(std::int64_t rows, std::int64_t columns) {
  TileConfig config;
  const auto shape = [&](int tile, std::int64_t height, std::int64_t width) {
    if (height <= 0 || width <= 0) return;
    config.rows[tile] = static_cast<std::uint8_t>(std::min(height, kTileLanes));
    config.row_bytes[tile] = static_cast<std::uint16_t>(4 * std::min(width, kTileLanes));
  };
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j) shape(2 * i + j, rows - kTileLanes * i, columns - kTileLanes * j);
    shape(4 + i, rows - kTileLanes * i, kTileLanes);
    shape(6 + i, kTileLanes, columns - kTileLanes * i);
  }
  return config;
}

template <class Machine, int Rows, int Columns>
HALFSTEP_AMX_UNITS void multiply_block(Machine& m, const TileProduct& p, const std::uint32_t* a, const std::uint32_t* b,
                                       float* c) {
  constexpr std::int64_t kLine = 4 * kTileLanes;  // bytes
  const std::int64_t ldc = p.ldc * 4;
  float* const below = c + kTileLanes * p.ldc;
  if (p.accumulate) {
    m.template load<0>(c, ldc);
    if constexpr (Columns == 2) m.template load<1>(c + kTileLanes, ldc);
    if constexpr (Rows == 2) m.template load<2>(below, ldc);
    if constexpr (Rows == 2 && Columns == 2) m.template load<3>(below + kTileLanes, ldc);
  } else {
    m.template zero<0>();
    if constexpr (Columns == 2) m.template zero<1>();
    if constexpr (Rows == 2) m.template zero<2>();
    if constexpr (Rows == 2 && Columns == 2) m.template zero<3>();
  }
  for (std::int64_t s = 0; s < p.steps; s += kTileLanes) {
    m.template load<4>(a + s * kTileLanes, kLine);
    m.template load<6>(b + s * 2 * kTileLanes, 2 * kLine);
    m.template multiply<0, 4, 6>();
    if constexpr (Columns == 2) {
      m.template load<7>(b + s * 2 * kTileLanes + kTileLanes, 2 * kLine);
      m.template multiply<1, 4, 7>();
    }
    if constexpr (Rows == 2) {
      m.template load<5>(a + (p.steps + s) * kTileLanes, kLine);
      m.template multiply<2, 5, 6>();
    }
    if constexpr (Rows == 2 && Columns == 2) m.template multiply<3, 5, 7>();
  }
  m.template store<0>(c, ldc);
  if constexpr (Columns == 2) m.template store<1>(c + kTileLanes, ldc);
  if constexpr (Rows == 2) m.template store<2>(below, ldc);
  if constexpr (Rows == 2 && Columns == 2) m.template store<3>(below + kTileLanes, ldc);
}

template <class Machine>
HALFSTEP_AMX_UNITS void multiply_tiles(const TileProduct& p) {
  Machine m;
  constexpr std::int64_t kBlock = 2 * kTileLanes;
  std::int64_t height = 0, width = 0;
  for (std::int64_t c = 0; c < p.columns; c += kBlock) {
    for (std::int64_t r = 0; r < p.rows; r += kBlock) {
      if (p.between != nullptr) p.between(p.context);
      const std::int64_t rows = std::min(kBlock, p.rows - r), columns = std::min(kBlock, p.columns - c);
      if (rows != height || columns != width) {
        height = rows, width = columns;
        m.configure(block_config(rows, columns));
      }
      const auto block = rows > kTileLanes
                             ? (columns > kTileLanes ? multiply_block<Machine, 2, 2> : multiply_block<Machine, 2, 1>)
                             : (columns > kTileLanes ? multiply_block<Machine, 1, 2> : multiply_block<Machine, 1, 1>);
      block(m, p, p.a + r * p.steps, p.b + c * p.steps, p.c + r * p.ldc + c);
    }
  }
}

#if defined(__x86_64__)
HALFSTEP_AMX_UNITS void release_tiles() { TileUnit::release(); }

__attribute__((target("avx512f"))) void transpose_by_vectors(const std::uint32_t* from, std::int64_t stride,
                                                             std::uint32_t* to) {
  // By masks of all, since g++ takes the others' undefined third operand for a mistake.
  constexpr __mmask16 kAll = 0xFFFF;
  constexpr __mmask8 kHalf = 0xFF;
  __m512i x[16], y[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) x[i] = _mm512_loadu_si512(from + i * stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_maskz_unpacklo_epi32(kAll, x[i], x[i + 1]);
    y[i + 1] = _mm512_maskz_unpackhi_epi32(kAll, x[i], x[i + 1]);
  }
  // Then a quarter q of x[4 i + j] has elements 4 i to 4 i + 3 of line 4 q + j of the result.
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_maskz_unpacklo_epi64(kHalf, y[i], y[i + 2]);
    x[i + 1] = _mm512_maskz_unpackhi_epi64(kHalf, y[i], y[i + 2]);
    x[i + 2] = _mm512_maskz_unpacklo_epi64(kHalf, y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_maskz_unpackhi_epi64(kHalf, y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    constexpr int kEven = 0x88, kOdd = 0xDD;  // quarters 0 and 2 of both, 1 and 3 of both
    const __m512i even_low = _mm512_maskz_shuffle_i32x4(kAll, x[j], x[4 + j], kEven);
    const __m512i even_high = _mm512_maskz_shuffle_i32x4(kAll, x[8 + j], x[12 + j], kEven);
    const __m512i odd_low = _mm512_maskz_shuffle_i32x4(kAll, x[j], x[4 + j], kOdd);
    const __m512i odd_high = _mm512_maskz_shuffle_i32x4(kAll, x[8 + j], x[12 + j], kOdd);
    _mm512_storeu_si512(to + 16 * j, _mm512_maskz_shuffle_i32x4(kAll, even_low, even_high, kEven));
    _mm512_storeu_si512(to + 16 * (4 + j), _mm512_maskz_shuffle_i32x4(kAll, odd_low, odd_high, kEven));
    _mm512_storeu_si512(to + 16 * (8 + j), _mm512_maskz_shuffle_i32x4(kAll, even_low, even_high, kOdd));
    _mm512_storeu_si512(to + 16 * (12 + j), _mm512_maskz_shuffle_i32x4(kAll, odd_low, odd_high, kOdd));
  }
}
#endif

// Linux gives a thread memory for its tiles only when the process has asked for them; the answer holds for all of its
// threads. Asking twice is no mistake: oneDNN asks as well.
bool tiles_granted() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr long kGetPermission = 0x1022, kRequestPermission = 0x1023, kTileData = 18;  // of <asm/prctl.h>
  std::uint64_t granted = 0;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 &&
         syscall(SYS_arch_prctl, kGetPermission, &granted) == 0 && (granted >> kTileData & 1) != 0;
#else
  return false;
#endif
}

}  // namespace

AmxKernels amx_kernels(bool by_processor) noexcept {
#if defined(__x86_64__)
  if (by_processor) return {multiply_tiles<TileUnit>, release_tiles};
#else
  (void)by_processor;
#endif
  return {multiply_tiles<TileModel>, [] {}};
}

bool amx_usable() noexcept {
  if (compute_isa() != Isa::amx) return false;
  static const bool granted = tiles_granted();
  return granted;
}

void transpose_pairs_plainly(const std::uint32_t* from, std::int64_t stride, std::uint32_t* to) {
  for (std::int64_t i = 0; i < kTileLanes; ++i) {
    for (std::int64_t j = 0; j < kTileLanes; ++j) to[i * kTileLanes + j] = from[j * stride + i];
  }
}

void transpose_pairs(const std::uint32_t* from, std::int64_t stride, std::uint32_t* to) {
#if defined(__x86_64__)
  if (compute_isa() >= Isa::avx512) return transpose_by_vectors(from, stride, to);
#endif
  transpose_pairs_plainly(from, stride, to);
}

}  // namespace halfstep::cpu
