// SPDX-License-Identifier: Apache-2.0
// The kernel is written once, over the eight tiles of a `Machine`: the processor's, by intrinsics, or the model's, by
// which it is tested where there is no AMX. 32 x 32 of the result stay in four tiles for a whole chunk of steps; each
// 16 steps load two tiles of each operand, which is half as much as four products can hide.
#include "halfstep/backends/cpu/amx_tile.h"

#include <algorithm>

#include "halfstep/backends/cpu/amx_model.h"
#include "halfstep/backends/cpu/isa.h"
#include "halfstep/backends/cpu/round_up.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define HALFSTEP_AMX_UNITS __attribute__((target("amx-tile,amx-bf16")))
#define HALFSTEP_TURN_UNITS __attribute__((target("avx512f,avx512bw")))
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
  const std::int64_t row = 4 * p.a_row;
  for (std::int64_t s = 0; s < p.steps; s += kTileLanes, a += p.a_steps) {
    m.template load<4>(a, row);
    m.template load<6>(b + s * 2 * kTileLanes, 2 * kLine);
    m.template multiply<0, 4, 6>();
    if constexpr (Columns == 2) {
      m.template load<7>(b + s * 2 * kTileLanes + kTileLanes, 2 * kLine);
      m.template multiply<1, 4, 7>();
    }
    if constexpr (Rows == 2) {
      m.template load<5>(a + p.a_rows, row);
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
      const std::int64_t rows = std::min(kBlock, p.rows - r), columns = std::min(kBlock, p.columns - c);
      if (rows != height || columns != width) {
        height = rows, width = columns;
        m.configure(block_config(rows, columns));
      }
      const auto block = rows > kTileLanes
                             ? (columns > kTileLanes ? multiply_block<Machine, 2, 2> : multiply_block<Machine, 2, 1>)
                             : (columns > kTileLanes ? multiply_block<Machine, 1, 2> : multiply_block<Machine, 1, 1>);
      block(m, p, p.a + r / kTileLanes * p.a_rows, p.b + c * p.steps, p.c + r * p.ldc + c);
    }
  }
}

#if defined(__x86_64__)
HALFSTEP_AMX_UNITS void release_tiles() { TileUnit::release(); }

HALFSTEP_AMX_UNITS void multiply_tiles_in_registers(std::int64_t rounds) {
  TileUnit::configure(block_config(2 * kTileLanes, 2 * kTileLanes));  // which clears them
  for (std::int64_t r = 0; r < rounds; ++r) {
    TileUnit::multiply<0, 4, 6>();
    TileUnit::multiply<1, 4, 7>();
    TileUnit::multiply<2, 5, 6>();
    TileUnit::multiply<3, 5, 7>();
  }
  TileUnit::release();
}

// By masks of all, since g++ takes the others' undefined third operand for a mistake.
constexpr __mmask16 kAllSixteen = 0xFFFF;
constexpr __mmask8 kAllEight = 0xFF;

// 8 elements from each of rows 0, 8, 16 and 24 on.
HALFSTEP_TURN_UNITS inline __m512i four_rows(const std::uint16_t* from, std::int64_t stride) {
  const auto eight = [&](int row) HALFSTEP_TURN_UNITS {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + row * stride));
  };
  __m512i x = _mm512_zextsi128_si512(eight(0));
  x = _mm512_maskz_inserti32x4(kAllSixteen, x, eight(8), 1);
  x = _mm512_maskz_inserti32x4(kAllSixteen, x, eight(16), 2);
  return _mm512_maskz_inserti32x4(kAllSixteen, x, eight(24), 3);
}

// 32 rows of 8 elements as 8 lines of 32: a line's quarter q is made of rows 8 q to 8 q + 7.
HALFSTEP_TURN_UNITS inline void turn_eight(const std::uint16_t* from, std::int64_t stride, std::uint32_t* to) {
  __m512i x[8], y[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) x[i] = four_rows(from + i * stride, stride);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm512_unpacklo_epi16(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi16(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 4) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      x[i + 2 * j] = _mm512_maskz_unpacklo_epi32(kAllSixteen, y[i + j], y[i + j + 2]);
      x[i + 2 * j + 1] = _mm512_maskz_unpackhi_epi32(kAllSixteen, y[i + j], y[i + j + 2]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_si512(to + 2 * i * kTileLanes, _mm512_maskz_unpacklo_epi64(kAllEight, x[i], x[i + 4]));
    _mm512_storeu_si512(to + (2 * i + 1) * kTileLanes, _mm512_maskz_unpackhi_epi64(kAllEight, x[i], x[i + 4]));
  }
}

// First copied to where no two places are in each other's way in the cache, while those of some steps later come.
HALFSTEP_TURN_UNITS void turn_by_vectors(const PlacesToTurn& p) {
  constexpr std::int64_t kStride = kMostTurned + 32;
  alignas(64) std::uint16_t copy[2 * kTileLanes * kStride];
  const std::int64_t whole = p.n / 32 * 32, rest = p.n - whole;
  const auto mask = static_cast<__mmask32>((1U << rest) - 1);
  for (int i = 0; i < 2 * kTileLanes; ++i) {
    const auto* const from = static_cast<const std::uint16_t*>(p.places[i]) + p.first;
    const char* const ahead = reinterpret_cast<const char*>(from) + p.ahead;
    std::uint16_t* const to = copy + i * kStride;
    for (std::int64_t j = 0; j < whole; j += 32) {
      __builtin_prefetch(ahead + j * 2, 0, 2);
      _mm512_store_si512(to + j, _mm512_loadu_si512(from + j));
    }
    if (rest > 0) _mm512_store_si512(to + whole, _mm512_maskz_loadu_epi16(mask, from + whole));
  }
  for (std::int64_t i = 0; i < p.n; i += kTileLanes) {
    turn_eight(copy + i, kStride, p.to + i * p.steps);
    turn_eight(copy + i + 8, kStride, p.to + i * p.steps + 8 * kTileLanes);
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

double run_tile_products(std::int64_t rounds) {
#if defined(__x86_64__)
  multiply_tiles_in_registers(rounds);
#endif
  return 2.0 * 4 * kTileLanes * kTileLanes * 2 * kTileLanes * static_cast<double>(rounds);
}

bool amx_usable() noexcept {
  if (compute_isa() != Isa::amx) return false;
  static const bool granted = tiles_granted();
  return granted;
}

void turn_places_plainly(const PlacesToTurn& p) {
  for (std::int64_t i = 0; i < round_up(p.n, kTileLanes); ++i) {
    const auto of = [&](std::int64_t place) -> std::uint32_t {
      return i < p.n ? static_cast<const std::uint16_t*>(p.places[place])[p.first + i] : 0;
    };
    std::uint32_t* const to = p.to + i / kTileLanes * kTileLanes * p.steps + i % kTileLanes * kTileLanes;
    for (std::int64_t j = 0; j < kTileLanes; ++j) to[j] = of(2 * j) | of(2 * j + 1) << 16;
  }
}

void turn_places(const PlacesToTurn& p) {
#if defined(__x86_64__)
  if (compute_isa() >= Isa::avx512) return turn_by_vectors(p);
#endif
  turn_places_plainly(p);
}

}  // namespace halfstep::cpu
