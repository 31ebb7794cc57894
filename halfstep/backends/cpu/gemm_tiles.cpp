// SPDX-License-Identifier: Apache-2.0
// Products of bfloat16 on the tiles of AMX. One operand is the "row" side: 16 of its rows by 16 pairs of steps fill a
// tile, each row's 64 bytes as they lie where its steps lie side by side. The other, the "column" side, is packed into
// panels of 32 columns, pair by pair. Either operand can be either side: the product is computed transposed, and turned
// while results are written, where that packs less. So the weights of a linear layer ([n, k]) are rows for a small
// batch, and columns for a large one.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "halfstep/backends/cpu/amx_tile.h"
#include "halfstep/backends/cpu/gemm_internal.h"
#include "halfstep/backends/cpu/gemm_shares.h"
#include "halfstep/backends/cpu/pair_tile.h"
#include "halfstep/backends/cpu/past_caches.h"
#include "halfstep/backends/cpu/round_up.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kTilesPanel = 2 * kTileLanes;   // columns that are packed side by side
constexpr std::int64_t kTurnedSteps = 2 * kTileLanes;  // of the sum that turn_places() takes
// Of a thread at a time: pairs of columns, 1 MiB of the second-level cache, and of rows; rows and columns whose sums
// wait for being rounded; columns that are gathered, since more panels take each other's sets of the cache.
constexpr std::int64_t kTilesColumnPairs = 256 << 10, kTilesRowPairs = 64 << 10;
constexpr std::int64_t kTilesMostRows = 256, kTilesMostRounded = 64, kTilesGroup = 2 * kTilesPanel,
                       kGatheredColumns = 4 * kTilesPanel;
constexpr std::int64_t kMostSteps = 512;  // pairs in one go, where tiles add to c themselves
// Pairs from which on rounded sums are made row by row. With sums of 128 to 768 pairs these took 0.79 to 0.96 of the
// time, 0.98 to 1.04 with 1024 or with 64 columns, 0.99 to 1.13 with 32 to 96 (Granite Rapids, two threads, operands in
// the caches).
constexpr std::int64_t kStepsByRows = 128;
// From which on oneDNN's kernels are slower: sums of rows in place, and rows and columns of sums that are no multiple
// of 32 steps, for some of which oneDNN has kernels without AMX only.
constexpr std::int64_t kLongSum = 768, kManyRows = 64, kManyColumns = 192;
// Results bypass the caches from twice the size of past_caches.h on, because the next layer reads them at once: with
// that size itself the step of an MLP at batch 4096 took 1.15x as long.
constexpr std::int64_t kStreamed = 2;
// Sums that are rounded are made in one go: longer ones leave room for few rows and columns, which are packed often.
constexpr std::int64_t kLongestRounded = 4096;

struct TilesSide {
  const std::uint16_t* data;
  std::int64_t count;                    // rows or columns
  std::int64_t outer, k;                 // strides, one of them 1
  bool along() const { return k == 1; }  // steps lie side by side
};

/// Whether it can be the column side: steps side by side are moved in pairs.
bool can_be_columns(const TilesSide& s, std::int64_t k) { return !s.along() || (k % 2 == 0 && s.outer % 2 == 0); }

/// Cycles to pack a pair, about.
double row_cost(const TilesSide& s) { return s.along() ? 0.12 : 0.3; }
double column_cost(const TilesSide& s) { return s.along() ? 0.35 : 0.15; }

struct TilesPlan {
  bool swap;
  bool straight;  // tiles write c themselves
  bool rounded;   // sums are rounded to c while the next ones are made
  bool in_place;  // rows are not packed
  bool by_rows;   // as TileProduct::by_rows
  TilesSide rows, columns;
  std::int64_t k, steps;  // steps: pairs, a multiple of 16
  std::int64_t at_once;   // of these in one go
  GemmShares shares;
  std::int64_t block_rows, chunk_columns, group;
};

double tiles_cost(const TilesSide& rows, const TilesSide& columns, std::int64_t k, bool turned) {
  const auto r = static_cast<double>(rows.count), c = static_cast<double>(columns.count),
             pairs = static_cast<double>(divide_up(k, 2));
  return pairs * (r * row_cost(rows) + c * column_cost(columns)) + r * c * (turned ? 0.5 : 0.1);
}

TilesSide side_of_a(const GemmArgs& g) {
  return {static_cast<const std::uint16_t*>(g.a.data), g.m, g.a.row_stride, g.a.col_stride};
}
TilesSide side_of_b(const GemmArgs& g) {
  return {static_cast<const std::uint16_t*>(g.b.data), g.n, g.b.col_stride, g.b.row_stride};
}

TilesPlan tiles_plan(const GemmArgs& g, int threads) {
  const TilesSide a = side_of_a(g), b = side_of_b(g);
  TilesPlan p = {};
  p.k = g.k;
  p.steps = round_up(divide_up(g.k, 2), kTileLanes);
  const bool floats = g.c_dtype == DType::f32 && g.bias == nullptr && g.activation == GemmActivation::none;
  // Sums of several goes are added to where they belong, which turned ones can't be.
  const bool keep = can_be_columns(b, g.k) && floats && p.steps > kMostSteps;
  p.swap = !keep && can_be_columns(a, g.k) &&
           (!can_be_columns(b, g.k) || tiles_cost(b, a, g.k, true) < tiles_cost(a, b, g.k, false));
  p.rows = p.swap ? b : a;
  p.columns = p.swap ? a : b;
  p.straight = !p.swap && floats;
  p.rounded = !p.swap && g.c_dtype == DType::bf16 && g.beta == 0;
  // Rows 2048 bytes apart share sets of the first-level cache.
  p.in_place =
      p.rows.along() && p.k % kTurnedSteps == 0 && p.rows.outer % 2 == 0 && (p.rounded || p.rows.outer % 1024 != 0);
  p.at_once = p.straight ? round_up(divide_up(p.steps, divide_up(p.steps, kMostSteps)), kTileLanes) : p.steps;
  p.shares = share_product(p.rows.count, p.columns.count, kTilesPanel, threads, [&](std::int64_t r, std::int64_t c) {
    // 32 x 32 x 16 pairs take 64 cycles, and twice that where they wait for the cache.
    return static_cast<double>(p.steps) *
           (static_cast<double>(r) * static_cast<double>(c) / 128 + static_cast<double>(r) * row_cost(p.rows) +
            static_cast<double>(c) * column_cost(p.columns));
  });
  const std::int64_t part_rows = p.shares.most_rows(), part_columns = p.shares.most_columns();
  const auto fits = [&](std::int64_t pairs, std::int64_t most) {
    return std::clamp(pairs / p.at_once / kTilesPanel * kTilesPanel, kTilesPanel, round_up(most, kTilesPanel));
  };
  p.block_rows = std::min(fits(kTilesRowPairs, part_rows), p.rounded ? kTilesMostRounded : kTilesMostRows);
  // Chunks alike, since each of them packs the rows again.
  const std::int64_t most = fits(kTilesColumnPairs, part_columns);
  p.chunk_columns = round_up(divide_up(part_columns, divide_up(part_columns, most)), kTilesPanel);
  p.by_rows = p.rounded && p.at_once >= kStepsByRows && p.chunk_columns > kTilesPanel;
  p.group = p.straight || p.rounded ? p.chunk_columns : std::min(p.chunk_columns, kTilesGroup);
  return p;
}

struct TilesScratch {
  std::uint32_t *rows, *columns;  // a part for each worker
  float *bias, *sums;
  std::uint16_t* zeros;  // for steps behind the last one
  std::int64_t longest;  // of these
  std::int64_t row_pairs, column_pairs, sum_floats;
};

TilesScratch carve_tiles(const GemmArgs& g, const TilesPlan& p, int threads, Carver& carver) {
  TilesScratch s = {};
  s.row_pairs = p.in_place ? 0 : p.block_rows * p.at_once;
  s.column_pairs = p.chunk_columns * p.at_once;
  s.sum_floats = p.straight || p.rounded ? 0 : kTilesPanel * p.group;
  s.rows = reinterpret_cast<std::uint32_t*>(carver.floats(s.row_pairs * threads));
  s.columns = reinterpret_cast<std::uint32_t*>(carver.floats(s.column_pairs * threads));
  if (g.bias != nullptr) s.bias = carver.floats(g.n);
  s.sums = carver.floats(s.sum_floats * threads);
  s.longest = std::max(p.rows.along() ? 0 : kTilesMostRows, p.columns.along() ? 0 : p.chunk_columns) + kTilesPanel;
  s.zeros = static_cast<std::uint16_t*>(carver.bytes(static_cast<std::size_t>(s.longest) * sizeof(*s.zeros)));
  return s;
}

class TilesProduct {
 public:
  TilesProduct(const GemmArgs& g, const TilesPlan& p, const TilesScratch& scratch, int threads)
      : g_(g),
        p_(p),
        threads_(threads),
        scratch_(scratch),
        amx_(amx_kernels(amx_usable())),
        kernels_(gemm_kernels()),
        stream_(p.rounded && written_past_caches(2 * g.m * g.n / kStreamed)) {}

  void run() const {
    if (g_.bias != nullptr) kernels_.widen(g_.bias_dtype, g_.bias, g_.n, scratch_.bias);
    std::fill_n(scratch_.zeros, scratch_.longest, std::uint16_t{0});
    parallel_jobs(p_.shares.count(), threads_, [&](std::int64_t share, std::int64_t worker) {
      compute(share, worker);
      amx_.release();
      if (stream_) amx_.fence();
    });
  }

 private:
  void compute(std::int64_t share, std::int64_t worker) const {
    const std::int64_t r0 = p_.shares.first_row(share), r1 = p_.shares.end_row(share),
                       c0 = p_.shares.first_column(share), c1 = p_.shares.end_column(share);
    if (r0 == r1) return;
    std::uint32_t* const rows = scratch_.rows + worker * scratch_.row_pairs;
    std::uint32_t* const columns = scratch_.columns + worker * scratch_.column_pairs;
    for (std::int64_t c = c0; c < c1; c += p_.chunk_columns) {
      const std::int64_t chunk = std::min(c1, c + p_.chunk_columns) - c;
      for (std::int64_t k0 = 0; k0 < p_.steps; k0 += p_.at_once) {
        const std::int64_t steps = std::min(p_.at_once, p_.steps - k0);
        pack_columns(c, chunk, k0, steps, columns);
        for (std::int64_t r = r0; r < r1; r += p_.block_rows) {
          const std::int64_t block = std::min(r1, r + p_.block_rows) - r;
          TileProduct product = {};
          product.steps = steps;
          product.rows = block;
          const std::int64_t together = p_.straight || p_.rounded ? block : std::min(block, kTilesPanel);
          product.by_rows = p_.by_rows;
          product.rows_once = !p_.by_rows && 4 * steps * together >= kBytesReadOnce;
          if (p_.in_place) {
            product.a = reinterpret_cast<const std::uint32_t*>(p_.rows.data + r * p_.rows.outer) + k0;
            product.a_row = p_.rows.outer / 2, product.a_steps = kTileLanes,
            product.a_rows = kTileLanes * product.a_row;
            const std::int64_t next = std::min(r1, r + 2 * p_.block_rows) - (r + block);
            if (next > 0 && p_.rows.outer == p_.k) {
              product.next = p_.rows.data + (r + block) * p_.rows.outer;
              product.next_bytes = 2 * next * p_.rows.outer;
            }
          } else {
            pack_rows(r, block, k0, steps, rows);
            product.set_packed(rows);
          }
          for (std::int64_t j = 0; j < chunk; j += p_.group) {
            product.columns = std::min(chunk - j, p_.group);
            product.b = columns + j * steps;
            multiply(worker, r, c + j, k0 > 0, product);
          }
        }
      }
    }
  }

  void multiply(std::int64_t worker, std::int64_t r, std::int64_t c, bool add, TileProduct& product) const {
    if (p_.straight) {
      product.c = static_cast<float*>(g_.c) + r * g_.ldc + c;
      product.ldc = g_.ldc;
      product.accumulate = add || g_.beta != 0;
      return amx_.multiply(product);
    }
    if (p_.rounded) {
      const GemmEpilogue to = epilogue(g_, false, nullptr, 0, r, product.rows, c, product.columns, scratch_.bias);
      return amx_.multiply_rounded(
          product, {static_cast<std::uint16_t*>(to.c), to.row_stride, to.bias, to.relu, nullptr, stream_});
    }
    // A few rows at a time, so that their sums are in the first-level cache when they are rounded.
    product.c = scratch_.sums + worker * scratch_.sum_floats;
    product.ldc = p_.group;
    const std::int64_t rows = product.rows;
    for (std::int64_t i = 0; i < rows; i += kTilesPanel, product.a += 2 * product.a_rows) {
      product.rows = std::min(kTilesPanel, rows - i);
      amx_.multiply(product);
      kernels_.finish(
          epilogue(g_, p_.swap, product.c, product.ldc, r + i, product.rows, c, product.columns, scratch_.bias));
    }
    product.a -= divide_up(rows, kTilesPanel) * 2 * product.a_rows;
    product.rows = rows;
  }

  // Where step `i` of the sum lies, from `first` on; zeros behind the last one.
  const void* step(const TilesSide& s, std::int64_t first, std::int64_t i) const {
    return i < p_.k ? s.data + first + i * s.k : scratch_.zeros;
  }

  void pack_rows(std::int64_t first, std::int64_t count, std::int64_t k0, std::int64_t steps, std::uint32_t* to) const {
    const TilesSide& s = p_.rows;
    if (s.along()) {
      for (std::int64_t r = 0; r < count; ++r) {
        tile_row(s.data + (first + r) * s.outer + 2 * k0, std::min(2 * steps, p_.k - 2 * k0),
                 to + r / kTileLanes * kTileLanes * steps + r % kTileLanes * kTileLanes);
      }
      return;
    }
    const void* places[kTurnedSteps];
    for (std::int64_t i = 0; i < steps; i += kTileLanes) {
      for (std::int64_t j = 0; j < kTurnedSteps; ++j) places[j] = step(s, first, 2 * (k0 + i) + j);
      turn_places({places, 0, count, steps, to + i * kTileLanes, 2 * kTurnedSteps * s.k * 2});
    }
  }

  // `count` of a row's steps, 16 pairs in a line, and zeros behind the last one.
  static void tile_row(const std::uint16_t* from, std::int64_t count, std::uint32_t* to) {
    std::int64_t i = 0;
    for (; i + kTurnedSteps <= count; i += kTurnedSteps, to += kTileLanes * kTileLanes) {
      std::memcpy(to, from + i, kTurnedSteps * sizeof(*from));
    }
    if (i == count) return;
    auto* const last = reinterpret_cast<std::uint16_t*>(to);
    std::fill_n(std::copy_n(from + i, count - i, last), kTurnedSteps - (count - i), std::uint16_t{0});
  }

  void pack_columns(std::int64_t first, std::int64_t count, std::int64_t k0, std::int64_t steps,
                    std::uint32_t* to) const {
    const TilesSide& s = p_.columns;
    if (s.along()) {
      const std::int64_t pairs = std::min(steps, p_.k / 2 - k0);
      for (std::int64_t j = 0; j < count; j += kTilesPanel, to += kTilesPanel * steps) {
        // A pair is 32 bits that are moved, whatever they mean.
        kernels_.pack(DType::f32, s.data + (first + j) * s.outer + 2 * k0, s.outer / 2, 1,
                      std::min(kTilesPanel, count - j), pairs, kTilesPanel, reinterpret_cast<float*>(to));
        std::fill_n(to + pairs * kTilesPanel, (steps - pairs) * kTilesPanel, 0U);
      }
      return;
    }
    constexpr std::int64_t kRows = 512;
    std::array<const void*, kRows> rows;
    for (std::int64_t i = 0; i < steps; i += kRows / 2) {
      const std::int64_t pairs = std::min(kRows / 2, steps - i);
      for (std::int64_t j = 0; j < 2 * pairs; ++j) {
        rows[static_cast<std::size_t>(j)] = step(s, first, 2 * (k0 + i) + j);
      }
      for (std::int64_t j = 0; j < count; j += kGatheredColumns) {
        gather_pairs(rows.data(), pairs, j, std::min(kGatheredColumns, count - j), kTilesPanel, kTilesPanel * steps,
                     reinterpret_cast<float*>(to + j * steps + i * kTilesPanel), kTilesPanel);
      }
    }
  }

  const GemmArgs& g_;
  const TilesPlan& p_;
  const int threads_;
  const TilesScratch& scratch_;
  const AmxKernels amx_;
  const GemmKernels& kernels_;
  const bool stream_;  // results bypass the caches
};

}  // namespace

bool tiles_serve(const GemmArgs& g) noexcept {
  const TilesSide a = side_of_a(g), b = side_of_b(g);
  return g.a.dtype == DType::bf16 && g.b.dtype == DType::bf16 && (a.k == 1 || a.outer == 1) &&
         (b.k == 1 || b.outer == 1) && (can_be_columns(a, g.k) || can_be_columns(b, g.k));
}

bool tiles_suit(const GemmArgs& g) noexcept {
  const TilesPlan p = tiles_plan(g, 1);
  const bool weight_gradient = g.a.col_stride != 1 && g.b.col_stride == 1;
  const bool uneven_sum = g.k % kTurnedSteps != 0 && g.m >= kManyRows && g.n >= kManyColumns;
  return (p.straight || g.k <= kLongestRounded) &&
         (p.rounded || weight_gradient || uneven_sum || (p.in_place && (p.swap || g.k >= kLongSum)));
}

std::size_t tiles_workspace(const GemmArgs& args, int threads) {
  const TilesPlan plan = tiles_plan(args, threads);
  Carver carver(nullptr);
  carve_tiles(args, plan, threads, carver);
  return carver.used();
}

void gemm_tiles(const GemmArgs& args, int threads, void* workspace) {
  const TilesPlan plan = tiles_plan(args, threads);
  Carver carver(workspace);
  const TilesScratch scratch = carve_tiles(args, plan, threads, carver);
  TilesProduct(args, plan, scratch, threads).run();
}

}  // namespace halfstep::cpu
