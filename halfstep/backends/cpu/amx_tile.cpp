// SPDX-License-Identifier: Apache-2.0
// The kernel is written once, over the eight tiles of a `Machine`: the processor's, by intrinsics, or the model's, by
// which it is tested where there is no AMX. 32 x 32 of the result stay in four tiles for a whole chunk of steps; each
// 16 steps load two tiles of each operand, which is half as much as four products can hide. Sums that become bfloat16
// are rounded during the next block's products, which leave the vector units idle.
#include "halfstep/backends/cpu/amx_tile.h"

#include <algorithm>
#include <iterator>

#include "halfstep/backends/cpu/amx_model.h"
#include "halfstep/backends/cpu/isa.h"
#include "halfstep/backends/cpu/round_up.h"
#include "halfstep/core/float16.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define HALFSTEP_AMX_UNITS __attribute__((target("amx-tile,amx-bf16")))
// Processors with AMX have these parts of AVX-512, as isa.cpp makes sure of.
#define HALFSTEP_ROUND_UNITS __attribute__((target("avx512f,avx512bw,avx512bf16")))
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

constexpr std::int64_t kLine = 4 * kTileLanes;  // bytes of a tile's row, and of a line of the cache

/// Rows and columns of a block, which decide about the shapes of its tiles.
struct BlockShape {
  std::int64_t rows = 0, columns = 0;
  bool operator==(const BlockShape&) const = default;
};

constexpr std::int64_t kBlockSide = 2 * kTileLanes;

/// Rows [first, end) of a block of sums, 32 in each, and where they belong.
struct RoundedRows {
  const float* sums = nullptr;
  const TileResults* results = nullptr;
  const float* bias = nullptr;  // of the block's columns, or null
  std::int64_t first = 0, end = 0, row = 0, column = 0, columns = 0;
  bool plain = false;   // all 32 columns, and only rounding to do
  bool stream = false;  // with non-temporal stores

  /// Null for a row that is dropped.
  std::uint16_t* to(std::int64_t i) const {
    const std::int64_t at = results->rows == nullptr ? row + i : results->rows[row + i];
    return at < 0 ? nullptr : results->to + at * results->stride + column;
  }
};

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
#define HALFSTEP_LOAD_TILE_ONCE(tile) _tile_stream_loadd(tile, from, stride)
#define HALFSTEP_STORE_TILE(tile) _tile_stored(tile, to, stride)
#define HALFSTEP_ZERO_TILE(tile) _tile_zero(tile)

struct TileUnit {
  // What this thread's tiles were configured for, until they are released.
  static BlockShape& configured() {
    thread_local BlockShape shape;
    return shape;
  }
  // g++ takes eight bytes for what the instruction reads, and nothing for what loads read: without the barrier it may
  // leave stores out or put them behind the instruction.
  HALFSTEP_AMX_UNITS static void configure(const TileConfig& config) {
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  HALFSTEP_AMX_UNITS static void release() {
    _tile_release();
    configured() = {};
  }
  template <int Tile>
  HALFSTEP_AMX_UNITS static void load(const void* from, std::int64_t stride) {
    HALFSTEP_EACH_TILE(HALFSTEP_LOAD_TILE);
  }
  // Hints that what is read needn't stay in the first-level cache.
  template <int Tile>
  HALFSTEP_AMX_UNITS static void load_once(const void* from, std::int64_t stride) {
    HALFSTEP_EACH_TILE(HALFSTEP_LOAD_TILE_ONCE);
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
  // A store of a tile waits for about 900 cycles if no floating-point vector instruction ran in the 2200 cycles before,
  // as if the processor had turned these units off. Measured on a Granite Rapids: stores after 130 products don't wait,
  // those after 140 do; integer vector instructions, loads and other stores don't help.
  __attribute__((always_inline)) HALFSTEP_AMX_UNITS static inline void keep_vectors_on() {
    __m128 sum = _mm_setzero_ps();
    __asm__ volatile("" : "+x"(sum));
    sum = _mm_add_ps(sum, sum);
    __asm__ volatile("" : : "x"(sum));
  }
  // A row's sums, of which some are masked, with their bias and activation, as 32 numbers of bfloat16.
  __attribute__((always_inline)) HALFSTEP_ROUND_UNITS static inline __m512i rounded(__m512 low, __m512 high,
                                                                                    const __m512* bias, bool relu) {
    if (bias != nullptr) low = _mm512_add_ps(low, bias[0]), high = _mm512_add_ps(high, bias[1]);
    if (relu) {  // NaN is not less than 0, and stays
      const __m512 zero = _mm512_setzero_ps();
      low = _mm512_mask_mov_ps(low, _mm512_cmp_ps_mask(low, zero, _CMP_LT_OQ), zero);
      high = _mm512_mask_mov_ps(high, _mm512_cmp_ps_mask(high, zero, _CMP_LT_OQ), zero);
    }
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
  }
  // VCVTNE2PS2BF16 flushes subnormal numbers. Sums from tiles are never subnormal; those with a bias may be.
  __attribute__((always_inline)) HALFSTEP_ROUND_UNITS static inline void round(const RoundedRows& r) {
    if (!r.plain) return round_with(r);
    const float* sums = r.sums + r.first * kBlockSide;
    const bool stream = r.stream;
    for (std::int64_t i = r.first; i < r.end; ++i, sums += kBlockSide) {
      if (std::uint16_t* const to = r.to(i)) {
        write(to, rounded(_mm512_load_ps(sums), _mm512_load_ps(sums + kTileLanes), nullptr, false), stream);
      }
    }
  }
  // Not inlined, which would make the loop of products slower.
  __attribute__((noinline)) HALFSTEP_ROUND_UNITS static void round_with(const RoundedRows& r) {
    const auto columns = static_cast<__mmask32>((1ULL << r.columns) - 1);
    const auto first = static_cast<__mmask16>(columns), second = static_cast<__mmask16>(columns >> kTileLanes);
    const __m512* bias = nullptr;
    __m512 biases[2];
    if (r.bias != nullptr) {
      biases[0] = _mm512_maskz_loadu_ps(first, r.bias);
      biases[1] = _mm512_maskz_loadu_ps(second, r.bias + kTileLanes);
      bias = biases;
    }
    const bool whole = r.columns == kBlockSide, stream = r.stream, relu = r.results->relu;
    const float* sums = r.sums + r.first * kBlockSide;
    for (std::int64_t i = r.first; i < r.end; ++i, sums += kBlockSide) {
      std::uint16_t* const to = r.to(i);
      if (to == nullptr) continue;
      const __m512 low = _mm512_maskz_load_ps(first, sums), high = _mm512_maskz_load_ps(second, sums + kTileLanes);
      const __m512i line = rounded(low, high, bias, relu);
      whole ? write(to, line, stream) : _mm512_mask_storeu_epi16(to, columns, line);
    }
  }
  __attribute__((always_inline)) HALFSTEP_ROUND_UNITS static inline void write(std::uint16_t* to, __m512i line,
                                                                               bool stream) {
    if (stream) return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), line);
    // Of the next columns, which come soon: the line behind the last one that this row touches, aligned or not.
    __builtin_prefetch(to + 2 * kBlockSide - 1, 0, 3);
    _mm512_storeu_si512(to, line);
  }
};
#undef HALFSTEP_EACH_TILE
#undef HALFSTEP_LOAD_TILE
#undef HALFSTEP_LOAD_TILE_ONCE
#undef HALFSTEP_STORE_TILE
#undef HALFSTEP_ZERO_TILE
#endif

// Each model starts unconfigured.
struct ModelUnit : TileModel {
  template <int Tile>
  void load_once(const void* from, std::int64_t stride) {
    TileModel::load<Tile>(from, stride);
  }
  BlockShape shape;
  BlockShape& configured() { return shape; }
  static void keep_vectors_on() {}
  static void round(const RoundedRows& r) {
    for (std::int64_t i = r.first; i < r.end; ++i) {
      std::uint16_t* const to = r.to(i);
      for (std::int64_t j = 0; to != nullptr && j < r.columns; ++j) {
        const float sum = r.sums[i * kBlockSide + j], all = r.bias != nullptr ? sum + r.bias[j] : sum;
        to[j] = BFloat16(r.results->relu && all < 0 ? 0.0F : all).bits;
      }
    }
  }
};

// Tiles of a block of `rows` x `columns`, at most 32 x 32: 0 to 3 are those of the result, row by row, 4 and 5 of the
// first operand, 6 and 7 of the second. Those of the edge are smaller, so that nothing outside of the result is read or
// written. Steps are always 16: another shape for the last ones would clear the sums.
TileConfig block_config(const BlockShape& block) {
  const auto [rows, columns] = block;
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

// The same kernels for three targets: AMX alone, whose instructions a test can emulate on any processor; AMX with
// AVX-512, so that rounding is inlined into the loops; and neither, for the model.
#if defined(__x86_64__)
namespace amx {
#define HALFSTEP_TILE_UNITS HALFSTEP_AMX_UNITS
#include "halfstep/backends/cpu/amx_blocks-inl.h"
#undef HALFSTEP_TILE_UNITS
}  // namespace amx
namespace amx_and_avx512 {
#define HALFSTEP_TILE_UNITS __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512bf16")))
#include "halfstep/backends/cpu/amx_blocks-inl.h"
#undef HALFSTEP_TILE_UNITS
}  // namespace amx_and_avx512
#endif
namespace model {
#define HALFSTEP_TILE_UNITS
#include "halfstep/backends/cpu/amx_blocks-inl.h"
#undef HALFSTEP_TILE_UNITS
}  // namespace model

#if defined(__x86_64__)
HALFSTEP_AMX_UNITS void release_tiles() { TileUnit::release(); }
void fence_stores() { _mm_sfence(); }

HALFSTEP_AMX_UNITS void multiply_tiles_in_registers(std::int64_t rounds) {
  TileUnit::configure(block_config({2 * kTileLanes, 2 * kTileLanes}));  // which clears them
  // Zeros draw less power, so the clock would run faster than it does on real data.
  alignas(64) std::uint32_t pairs[kTileLanes * kTileLanes];
  for (std::uint32_t i = 0; i < std::size(pairs); ++i) {
    const std::uint32_t low = 0x3F80 + i * 37 % 128, high = 0x3F80 + i * 91 % 128;  // 1 to 2
    pairs[i] = low | (high | i % 2 << 15) << 16;
  }
  __asm__ volatile("" : : "r"(pairs) : "memory");  // tile loads don't tell the compiler that they read memory
  TileUnit::load<4>(pairs, kLine);
  TileUnit::load<5>(pairs, kLine);
  TileUnit::load<6>(pairs, kLine);
  TileUnit::load<7>(pairs, kLine);
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
  if (by_processor) {
    return {amx::multiply_tiles<TileUnit>, amx_and_avx512::multiply_tiles_rounded<TileUnit>, fence_stores,
            release_tiles};
  }
#else
  (void)by_processor;
#endif
  return {model::multiply_tiles<ModelUnit>, model::multiply_tiles_rounded<ModelUnit>, [] {}, [] {}};
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
