// SPDX-License-Identifier: Apache-2.0
// Products of float32 and float16 on the tiles of AMX, which multiply bfloat16 about 15 times as fast as the vector
// units multiply float32. Each float32 element is split into the exact sum of three bfloat16 numbers (split_block.h).
// Six of the nine products of these parts are computed; the other three together are less than 2^-24 of the whole,
// which is what one rounding of float32 may be. Each float16 element is the sum of two parts, and all four products are
// computed. Sums are float32. The tiles add up 32 products before they add their sum to the others, so there are fewer
// roundings than with one addition per product. With Float32Precision::high two of the three parts are multiplied.
//
// An operand that is infinite, NaN, or rounds to 2^128 makes every sum it is in infinite or NaN, though not always the
// same as with float32 arithmetic. The vector units compute the 32 x 32 blocks of the result with such sums again.
#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "halfstep/backends/cpu/amx_tile.h"
#include "halfstep/backends/cpu/gemm_internal.h"
#include "halfstep/backends/cpu/gemm_shares.h"
#include "halfstep/backends/cpu/past_caches.h"
#include "halfstep/backends/cpu/round_up.h"
#include "halfstep/backends/cpu/side_work.h"
#include "halfstep/backends/cpu/split_block.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kSplitPanel = 2 * kTileLanes;
// Pairs of one part of 32 steps: of 16 rows, and of a panel of columns.
constexpr std::int64_t kRowPart = kTileLanes * kTileLanes, kPanelPart = kTileLanes * kSplitPanel;
// The most steps of a sum that is computed in one go. A longer sum is cut into pieces of at least kFewestAtOnce steps,
// but for the last one. They are longer where the sum has kFewestPieces or more of them (shorter sums gain nothing for
// the memory that takes), up to kSplitInOneGo and to about where packed rows, packed columns and sums of the largest
// block fill kSplitBytes of the second-level cache. With the sizes of the actual blocks, which are mostly smaller,
// 2048 x 2048 x 2048 took 1.06 of the time (Granite Rapids).
constexpr std::int64_t kSplitInOneGo = 512, kSplitBytes = 1400 << 10, kFewestAtOnce = 128, kFewestPieces = 8;
// The most rows of a block, and the most columns of one of a long sum.
constexpr std::int64_t kSplitRows = 512, kSplitColumns = 384;
// Bytes of packed columns, of packed rows, and of sums where sums are computed in one go.
constexpr std::int64_t kSplitColumnBytes = 768 << 10, kSplitRowBytes = 256 << 10, kSplitSumBytes = 128 << 10;
// Results bypass the caches from twice the size of past_caches.h on, as those of gemm_tiles.cpp.
constexpr std::int64_t kSplitStreamed = 2;
// The fewest rows and columns, and steps, and multiply-adds of three parts: 64 x 64 x 64 took 1.1 of the time of vector
// instructions (in two 0.84).
constexpr std::int64_t kFewestSplit = 32, kFewestSteps = 32, kLeastWork = 2 * 64 * 64 * 64;

struct SplitSide {
  const void* data;
  std::int64_t count, outer, k;          // strides, one of them 1
  bool along() const { return k == 1; }  // steps lie side by side
  template <class Element>
  const Element* at(std::int64_t i, std::int64_t step) const {
    return static_cast<const Element*>(data) + i * outer + step * k;
  }
};
SplitSide rows_of(const GemmArgs& g) { return {g.a.data, g.m, g.a.row_stride, g.a.col_stride}; }
SplitSide columns_of(const GemmArgs& g) { return {g.b.data, g.n, g.b.col_stride, g.b.row_stride}; }

/// Cycles to split and pack an element of float32, about, those of a product of parts, and those to write a result.
constexpr double kAcross = 0.4, kTurned = 0.8, kPartProduct = 1.0 / 512, kWrite = 0.1, kWriteTurned = 0.5;

// How many rows ahead are prefetched while one is packed.
constexpr std::int64_t kRowsAhead = 2;

struct SplitPlan {
  bool swap;  // the result is computed turned
  TileParts parts;
  SplitSide rows, columns;
  std::int64_t at_once;  // steps in one go, a multiple of 32
  GemmShares shares;
  std::int64_t block_rows, chunk_columns;
  bool rows_ahead;  // a block's rows are packed while the block before is multiplied

  std::int64_t row_blocks() const { return rows_ahead ? 2 : 1; }
};

double row_cost(const SplitSide& s) { return s.along() ? kAcross : kTurned; }
double column_cost(const SplitSide& s) { return s.along() ? kTurned : kAcross; }
double packing_cost(const GemmArgs& g, const SplitSide& rows, const SplitSide& columns, double write) {
  return static_cast<double>(g.k) * (static_cast<double>(rows.count) * row_cost(rows) +
                                     static_cast<double>(columns.count) * column_cost(columns)) +
         static_cast<double>(g.m * g.n) * write;
}

SplitPlan split_plan(const GemmArgs& g, int threads) {
  SplitPlan p = {};
  p.parts = tile_parts(g.a.dtype, g.precision);
  p.rows = rows_of(g), p.columns = columns_of(g);
  p.swap = packing_cost(g, p.columns, p.rows, kWriteTurned) < packing_cost(g, p.rows, p.columns, kWrite);
  if (p.swap) std::swap(p.rows, p.columns);
  const std::int64_t steps = round_up(g.k, kSplitGroup);
  const bool in_one_go = steps <= kSplitInOneGo;
  p.rows_ahead = p.rows.along() && in_one_go;
  const std::int64_t largest_rows = std::min(p.rows.count, kSplitRows),
                     largest_columns = std::min(p.columns.count, kSplitColumns),
                     step_bytes = 2 * count_parts(p.parts) * (largest_rows + largest_columns),
                     fitting = (kSplitBytes - 4 * largest_rows * largest_columns) / step_bytes,
                     most = round_up(std::min(fitting, steps / kFewestPieces), kSplitGroup),
                     pieces = divide_up(steps, std::clamp(most, kFewestAtOnce, kSplitInOneGo));
  p.at_once = in_one_go ? steps : round_up(divide_up(steps, pieces), kSplitGroup);
  const auto fits = [&](std::int64_t bytes) {
    return std::max(bytes / (2 * count_parts(p.parts) * p.at_once) / kSplitPanel * kSplitPanel, kSplitPanel);
  };
  p.block_rows = in_one_go ? std::min(fits(kSplitRowBytes / p.row_blocks()), kSplitRows) : kSplitRows;
  p.chunk_columns = in_one_go ? fits(kSplitColumnBytes) : kSplitColumns;
  const double product = kPartProduct * static_cast<double>(count_products(p.parts));
  p.shares = share_product(p.rows.count, p.columns.count, kSplitPanel, threads, [&](std::int64_t r, std::int64_t c) {
    const std::int64_t rows_packed = divide_up(c, p.chunk_columns),
                       columns_packed = in_one_go ? 1 : divide_up(r, p.block_rows);
    return static_cast<double>(g.k) *
           (product * static_cast<double>(r * c) + row_cost(p.rows) * static_cast<double>(r * rows_packed) +
            column_cost(p.columns) * static_cast<double>(c * columns_packed));
  });
  // Blocks of about the same size.
  const auto equal = [](std::int64_t count, std::int64_t most) {
    return round_up(divide_up(count, divide_up(count, most)), kSplitPanel);
  };
  p.chunk_columns = equal(p.shares.most_columns(), p.chunk_columns);
  if (in_one_go) {
    const std::int64_t rows = kSplitSumBytes / 4 / p.chunk_columns / kSplitPanel * kSplitPanel;
    p.block_rows = std::clamp(rows, kSplitPanel, p.block_rows);
  }
  p.block_rows = equal(p.shares.most_rows(), p.block_rows);
  return p;
}

struct SplitScratch {
  std::uint32_t *rows, *columns;  // a part for each worker: of rows, SplitPlan::row_blocks() blocks
  float *sums, *bias;
  float* zeros;  // a line of zeros of any dtype, for steps behind the last one
  char* again;   // workspace of blocks that are computed again
  std::int64_t row_size, column_size, sum_size;
  std::size_t again_size;
};

// Rows and columns as the plan has them.
GemmArgs sub_product(const GemmArgs& g, bool swap, std::int64_t r, std::int64_t rows, std::int64_t c,
                     std::int64_t columns) {
  if (swap) std::swap(r, c), std::swap(rows, columns);
  GemmArgs one = g;
  one.m = rows, one.n = columns;
  const auto item = [](DType dtype) { return static_cast<std::int64_t>(item_size(dtype)); };
  one.a.data = static_cast<const char*>(g.a.data) + r * g.a.row_stride * item(g.a.dtype);
  one.b.data = static_cast<const char*>(g.b.data) + c * g.b.col_stride * item(g.b.dtype);
  one.c = static_cast<char*>(g.c) + (r * g.ldc + c) * item(g.c_dtype);
  if (g.bias != nullptr) one.bias = static_cast<const char*>(g.bias) + c * item(g.bias_dtype);
  return one;
}

SplitScratch carve_split(const GemmArgs& g, const SplitPlan& p, int threads, Carver& carver) {
  SplitScratch s = {};
  const std::int64_t groups = p.at_once / kSplitGroup * count_parts(p.parts);
  s.row_size = p.block_rows / kTileLanes * groups * kRowPart;
  s.column_size = p.chunk_columns / kSplitPanel * groups * kPanelPart;
  s.sum_size = p.block_rows * p.chunk_columns;
  s.rows = reinterpret_cast<std::uint32_t*>(carver.floats(p.row_blocks() * s.row_size * threads));
  s.columns = reinterpret_cast<std::uint32_t*>(carver.floats(s.column_size * threads));
  s.sums = carver.floats(s.sum_size * threads);
  if (g.bias != nullptr) s.bias = carver.floats(g.n);
  s.zeros = carver.floats(std::max(p.block_rows, p.chunk_columns));
  for (const std::int64_t rows : {std::min(p.rows.count, kSplitPanel), p.rows.count % kSplitPanel}) {
    for (const std::int64_t columns : {std::min(p.columns.count, kSplitPanel), p.columns.count % kSplitPanel}) {
      if (rows == 0 || columns == 0) continue;
      s.again_size = std::max(s.again_size, blocked_workspace(sub_product(g, p.swap, 0, rows, 0, columns), 1));
    }
  }
  s.again_size = whole_lines(s.again_size);
  s.again = static_cast<char*>(carver.bytes(s.again_size * static_cast<std::size_t>(threads)));
  return s;
}

template <class Number>
class SplitProduct {
  using Element = typename Number::Element;

 public:
  SplitProduct(const GemmArgs& g, const SplitPlan& p, const SplitScratch& scratch, int threads)
      : g_(g),
        p_(p),
        threads_(threads),
        scratch_(scratch),
        rows_(p.rows),
        columns_(p.columns),
        plain_(!p.swap && g.c_dtype == g.a.dtype && g.bias == nullptr && g.beta == 0 &&
               g.activation == GemmActivation::none),
        stream_(plain_ &&
                written_past_caches(static_cast<std::int64_t>(sizeof(Element)) * g.m * g.n / kSplitStreamed)) {}

  void run() const {
    if (g_.bias != nullptr) kernels_.widen(g_.bias_dtype, g_.bias, g_.n, scratch_.bias);
    std::fill_n(scratch_.zeros, std::max(p_.block_rows, p_.chunk_columns), 0.0F);
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
    std::uint32_t* const columns = scratch_.columns + worker * scratch_.column_size;
    std::uint32_t* rows = scratch_.rows + worker * p_.row_blocks() * scratch_.row_size;
    std::uint32_t* next_rows = rows + (p_.row_blocks() - 1) * scratch_.row_size;
    for (std::int64_t c = c0; c < c1 && r0 < r1; c += p_.chunk_columns) {
      const std::int64_t chunk = std::min(c1, c + p_.chunk_columns) - c;
      if (p_.at_once >= g_.k) pack_columns(c, chunk, 0, columns);
      if (p_.rows_ahead) pack_rows(block(r0, r1, 0), rows);
      for (std::int64_t r = r0; r < r1; r += p_.block_rows) {
        multiply(worker, block(r, r1, 0), block(r + p_.block_rows, r1, 0), c, chunk, rows, next_rows);
        std::swap(rows, next_rows);
      }
    }
  }

  /// Some rows and steps: the first ones, and how many.
  struct RowsAndSteps {
    std::int64_t r, rows, k, steps;
    std::int64_t groups() const { return divide_up(steps, kSplitGroup); }
  };
  // The block of rows from r on, at most up to `end`, and of steps from k on. It has no rows if r >= end.
  RowsAndSteps block(std::int64_t r, std::int64_t end, std::int64_t k) const {
    return {r, std::max<std::int64_t>(std::min(end - r, p_.block_rows), 0), k, std::min(p_.at_once, g_.k - k)};
  }

  // Computes a block of rows. Meanwhile it packs the rows of the next one, if they are packed ahead.
  void multiply(std::int64_t worker, RowsAndSteps own, const RowsAndSteps& next, std::int64_t c, std::int64_t chunk,
                std::uint32_t* rows, std::uint32_t* next_rows) const {
    std::uint32_t* const columns = scratch_.columns + worker * scratch_.column_size;
    float* const sums = scratch_.sums + worker * scratch_.sum_size;
    const auto pack_next = [&](std::int64_t i) { pack_row(next, i, next_rows); };
    SideWork ahead(pack_next, p_.rows_ahead ? next.rows : 0);
    for (; own.k < g_.k; own.k += p_.at_once) {
      own.steps = std::min(p_.at_once, g_.k - own.k);
      if (!p_.rows_ahead) pack_rows(own, rows);
      if (p_.at_once < g_.k) pack_columns(c, chunk, own.k, columns);
      TileProduct product = {};
      product.parts = p_.parts;
      product.steps = own.groups() * kTileLanes;
      product.accumulate = own.k > 0;
      product.rows = own.rows;
      product.set_packed(rows);
      product.ldc = kSplitPanel;
      for (std::int64_t j = 0; j < chunk; j += kSplitPanel) {
        product.columns = std::min(kSplitPanel, chunk - j);
        product.c = sums + j * p_.block_rows;
        product.b = columns + j * product.steps * kParts;
        ahead.attach(product, divide_up(chunk - j, kSplitPanel));
        amx_.multiply(product);
      }
      ahead.finish();
    }
    finish(worker, {sums, kSplitPanel * p_.block_rows, own.rows, chunk}, own.r, c);
  }

  // Writes a block of the result. If it has sums that aren't finite, each 32 x 32 of it is either written or computed
  // again, so that the bits don't depend on how the product is cut into blocks.
  void finish(std::int64_t worker, const PanelSums& block, std::int64_t r, std::int64_t c) const {
    auto* const to = plain_ ? static_cast<Element*>(g_.c) + r * g_.ldc + c : nullptr;
    const bool finite = copy_finite(block, to, g_.ldc, stream_);
    if (finite && plain_) return;
    for (std::int64_t j = 0; j < block.columns; j += kSplitPanel) {
      const std::int64_t columns = std::min(kSplitPanel, block.columns - j);
      const std::int64_t height = finite ? block.rows : kSplitPanel;
      for (std::int64_t i = 0; i < block.rows; i += height) {
        const std::int64_t rows = std::min(height, block.rows - i);
        const float* const sums = block.sums + j / kSplitPanel * block.panel + i * kSplitPanel;
        if (!finite && !copy_finite<Element>({sums, block.panel, rows, columns}, nullptr, 0, false)) {
          gemm_blocked(sub_product(g_, p_.swap, r + i, rows, c + j, columns), 1,
                       scratch_.again + static_cast<std::size_t>(worker) * scratch_.again_size);
        } else if (!plain_) {
          kernels_.finish(epilogue(g_, p_.swap, sums, kSplitPanel, r + i, rows, c + j, columns, scratch_.bias));
        }
      }
    }
  }

  // Line `step` of an operand whose steps don't lie side by side, from its element `first` on.
  const Element* line(const SplitSide& s, std::int64_t first, std::int64_t step) const {
    return step < g_.k ? s.template at<Element>(first, step) : reinterpret_cast<const Element*>(scratch_.zeros);
  }

  // Row i of a block whose steps lie side by side.
  void pack_row(const RowsAndSteps& block, std::int64_t i, std::uint32_t* to) const {
    constexpr std::int64_t kGroup = kParts * kRowPart;
    std::uint32_t* const at = to + i / kTileLanes * block.groups() * kGroup + i % kTileLanes * kTileLanes;
    split_along<Number>(rows_.template at<Element>(block.r + i, block.k), block.steps, {at, kRowPart}, kGroup,
                        kRowsAhead * rows_.outer);
  }
  void pack_rows(const RowsAndSteps& block, std::uint32_t* to) const {
    if (rows_.along()) {
      for (std::int64_t i = 0; i < block.rows; ++i) pack_row(block, i, to);
      return;
    }
    std::array<const Element*, kSplitGroup> lines;
    const std::int64_t ahead = kSplitGroup * rows_.k, groups = block.groups();
    for (std::int64_t group = 0; group < groups; ++group) {
      for (std::int64_t i = 0; i < kSplitGroup; ++i) {
        lines[static_cast<std::size_t>(i)] = line(rows_, block.r, block.k + group * kSplitGroup + i);
      }
      for (std::int64_t r = 0; r < block.rows; r += kTileLanes) {
        split_turned<Number>(lines.data(), block.rows - r,
                             {to + (r / kTileLanes * groups + group) * kParts * kRowPart, kRowPart}, ahead);
        for (const Element*& at : lines) at += kTileLanes;
      }
    }
  }

  void pack_columns(std::int64_t first, std::int64_t count, std::int64_t k, std::uint32_t* to) const {
    const std::int64_t n = std::min(p_.at_once, g_.k - k), groups = divide_up(n, kSplitGroup);
    constexpr std::int64_t kGroup = kParts * kPanelPart;
    for (std::int64_t group = 0; group < groups; ++group) {
      std::uint32_t* const at = to + group * kGroup;
      const std::int64_t step = k + group * kSplitGroup, inside = std::min(kSplitGroup, k + n - step);
      if (columns_.along()) {
        for (std::int64_t j = 0; j < count; j += kTileLanes) {
          std::uint32_t* const panel = at + j / kSplitPanel * groups * kGroup + j % kSplitPanel;
          split_columns<Number>(columns_.template at<Element>(first + j, step), columns_.outer, count - j, inside,
                                {panel, kPanelPart});
        }
        continue;
      }
      for (std::int64_t i = 0; i < kTileLanes; ++i) {
        split_across<Number>(line(columns_, first, step + i), line(columns_, first, step + i + kTileLanes), count,
                             {at + i * kSplitPanel, kPanelPart}, groups * kGroup, kSplitGroup * columns_.k);
      }
    }
  }

  static constexpr std::int64_t kParts = Number::kParts;
  const GemmArgs& g_;
  const SplitPlan& p_;
  const int threads_;
  const SplitScratch& scratch_;
  const SplitSide &rows_, &columns_;
  const bool plain_;   // sums are the results
  const bool stream_;  // results bypass the caches
  const AmxKernels amx_ = amx_kernels(amx_usable());
  const GemmKernels& kernels_ = gemm_kernels();
};

}  // namespace

bool split_serves(const GemmArgs& g) noexcept {
  const SplitSide a = rows_of(g), b = columns_of(g);
  const bool dtypes = (g.a.dtype == DType::f32 || g.a.dtype == DType::f16) && g.b.dtype == g.a.dtype;
  return dtypes && (a.k == 1 || a.outer == 1) && (b.k == 1 || b.outer == 1);
}

bool split_suits(const GemmArgs& g) noexcept {
  const std::int64_t least = tile_parts(g.a.dtype, g.precision) == TileParts::three ? kLeastWork : 0;
  return std::min(g.m, g.n) >= kFewestSplit && g.k >= kFewestSteps && g.m * g.n * g.k >= least;
}

std::size_t split_workspace(const GemmArgs& args, int threads) {
  const SplitPlan plan = split_plan(args, threads);
  Carver carver(nullptr);
  carve_split(args, plan, threads, carver);
  return carver.used();
}

void gemm_split(const GemmArgs& args, int threads, void* workspace) {
  const SplitPlan plan = split_plan(args, threads);
  Carver carver(workspace);
  const SplitScratch scratch = carve_split(args, plan, threads, carver);
  with_split_number(plan.parts, [&]<class Number>(Number) {
    if constexpr (Number::kParts > 1) SplitProduct<Number>(args, plan, scratch, threads).run();
  });
}

}  // namespace halfstep::cpu
