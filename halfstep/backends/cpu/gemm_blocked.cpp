// SPDX-License-Identifier: Apache-2.0
// The blocked product. One operand is the "vector" side, packed into panels of two vectors (and widened to float32 on
// the way), or read in place where its layout allows; of the other, the "scalar" side, single values are broadcast,
// most often in place. Either operand can be either side: the product is computed transposed, and turned while results
// are written, where that packs less. So the weights of a linear layer ([n, k], by far the larger operand) are read in
// place in the forward pass, where packing and turning them would cost a sixth of the time at batch 64.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>

#include "halfstep/backends/cpu/gemm_internal.h"
#include "halfstep/backends/cpu/gemm_kernels.h"
#include "halfstep/backends/cpu/round_up.h"
#include "halfstep/runtime/machine_limits.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kTilesPerBlock = 8;            // rows of the scalar side that are worked on at a time
constexpr std::int64_t kPanelsPerBlock = 16;          // columns, where results wait in scratch memory
constexpr std::int64_t kPackedFloats = 1 << 20;       // of the vector side at a time, where threads share them
constexpr std::int64_t kOwnPackedFloats = 128 << 10;  // likewise by a thread for itself, half of L2
constexpr std::int64_t kOwnPackedOnce = 32 << 10;     // likewise where few rows use it
constexpr std::int64_t kDeepFloats = 192 << 10;       // likewise of all steps, so that no sums need to wait
constexpr std::int64_t kDeepColumns = 128;            // at least as many, since scalars are packed again for the next
constexpr std::int64_t kResultFloats = 256 << 10;     // of sums that wait for the rest of their terms, a thread
constexpr std::int64_t kFewPanels = 4;                // under which the scalar side is packed tile by tile, into L1
constexpr std::int64_t kDirectRows = 128;          // up to here a vector side that can be read in place is not packed
constexpr std::int64_t kStepStridedInPlace = 128;  // longest sum over a scalar side that jumps a row at each step
static_assert(kGemmMostSteps <= kGemmRowStride);
constexpr std::int64_t kMostGoesKept = 4;  // of a scalar side of few rows, packed once for all panels
constexpr double kJobWork = 1e6;           // multiply-adds that are worth a job, about 14 microseconds
constexpr double kJobsPerThread = 4;       // a slow processor delays a product by one
constexpr double kPackAgain = 0.06;        // of a thread's multiplications, up to which it packs what another packs too

struct Side {
  const char* data;
  DType dtype;
  std::int64_t outer, k;  // strides
  std::int64_t batch;     // between items, whose plans are one

  const char* at(std::int64_t i, std::int64_t p) const {
    return data + (i * outer + p * k) * static_cast<std::int64_t>(item_size(dtype));
  }
};

enum class Scalars { rows_in_place, steps_in_place, packed_rows, packed_steps };

struct GemmPlan {
  bool swap;
  bool vectors_in_place;
  bool straight;  // tiles write c themselves
  bool rounds;    // tiles round their sums to results of 16 bits; finish() rounds a last panel without whole vectors
  Scalars scalars;
  Side s, v;
  std::int64_t rows, cols, k;
  std::int64_t panel, panels, lanes, max_rows;
  std::int64_t steps;                    // of the sum in one go
  std::int64_t row_parts, column_parts;  // among threads
  bool own_panels;                       // each thread packs what it needs, even if another needs it too
  std::int64_t block_rows, packed_stride;
  std::int64_t chunk_panels;  // packed at a time, `packed_steps` of them
  std::int64_t packed_steps;  // `steps`, or all of the sum
  bool deferred;              // sums of several goes wait in scratch memory, those of `rows_at_once`
  std::int64_t rows_at_once;  // of a thread
  // If each thread packs its own panels, its part is split into jobs that idle threads can steal. A job is one chunk
  // of the part's panels and one piece of its rows.
  std::int64_t chunks, pieces;
  bool keeps_scalars;  // the scalar side of a part is packed once, with all goes, for all its chunks

  std::int64_t goes() const { return divide_up(k, steps); }
  /// Rows of a thread's part at most, since parts begin at multiples of 16.
  std::int64_t part_rows() const { return std::min(rows, divide_up(rows, row_parts) + 15); }
};

/// Cycles to pack an element, about.
double pack_cost(const Side& side) { return side.outer == 1 ? 0.13 : side.k == 1 ? 0.35 : 1.5; }

/// Of a sum of `k`, in one go: as few goes as can be, all but the last alike.
std::int64_t steps_at_once(std::int64_t k) { return divide_up(k, divide_up(k, kGemmMostSteps)); }

bool can_read_vectors(const Side& v, std::int64_t k) {
  if (v.dtype != DType::f32 || v.outer != 1 || v.k % 16 != 0 || v.batch % 16 != 0 ||
      reinterpret_cast<std::uintptr_t>(v.data) % 64 != 0) {
    return false;
  }
  // A panel is read from the second-level cache again for each tile. Steps a multiple of 2048 bytes apart share a few
  // of its sets: those of one go must not take more than a third of them.
  if (v.k % 512 != 0 || k <= 128) return true;
  const std::int64_t apart = (v.k & -v.k) * static_cast<std::int64_t>(sizeof(float));
  return 3 * steps_at_once(k) * apart <= second_cache_bytes();
}

Scalars choose_scalars(const Side& s, std::int64_t rows, std::int64_t cols, std::int64_t k) {
  if (s.k == 1) {
    // Rows a multiple of 2048 bytes apart share two sets of the first-level cache.
    const bool clash = s.outer % 512 == 0 && rows > 1 && cols > 32;
    return s.dtype == DType::f32 && !clash ? Scalars::rows_in_place : Scalars::packed_rows;
  }
  // The same for steps, of which there are more than ways.
  const bool clash = s.k % 256 == 0 && k > 8 && cols > 32;
  if (s.outer == 1 && s.dtype == DType::f32 && !clash && (k <= kStepStridedInPlace || cols <= 32)) {
    return Scalars::steps_in_place;
  }
  return Scalars::packed_steps;
}

/// Cycles of a product of `rows` times `cols`, about.
double cost(const Side& s, const Side& v, std::int64_t rows, std::int64_t cols, std::int64_t k, std::int64_t lanes,
            bool turned) {
  const double r = static_cast<double>(rows), c = static_cast<double>(cols), d = static_cast<double>(k);
  double cycles = r * static_cast<double>(divide_up(cols, lanes)) * d / 2;
  if (!can_read_vectors(v, k) || rows > kDirectRows) cycles += c * d * pack_cost(v);
  const Scalars scalars = choose_scalars(s, rows, cols, k);
  if (scalars == Scalars::packed_rows) cycles += r * d * 0.13;
  if (scalars == Scalars::packed_steps) cycles += r * d * (s.outer == 1 ? 0.2 : 1.5);
  return cycles + r * c * (turned ? 0.5 : 0.1);
}

/// Splits the parts of threads into jobs.
void share_out(GemmPlan& p) {
  const std::int64_t thread_panels = divide_up(p.panels, p.column_parts), part_rows = p.part_rows();
  const bool packed = p.scalars == Scalars::packed_rows || p.scalars == Scalars::packed_steps;
  p.keeps_scalars = packed && part_rows <= p.block_rows && p.packed_steps == p.steps && p.goes() <= kMostGoesKept;
  p.pieces = 1;
  const double work = static_cast<double>(thread_panels * p.panel) * static_cast<double>(part_rows * p.k);
  const auto most = static_cast<std::int64_t>(std::clamp(work / kJobWork, 1.0, kJobsPerThread));
  if (p.row_parts * p.column_parts > 1 && most > divide_up(thread_panels, p.chunk_panels)) {
    if (p.vectors_in_place) {
      p.chunk_panels = divide_up(thread_panels, std::min(most, thread_panels));
    } else if (p.packed_steps == p.k && !p.deferred) {
      // A thread packs a chunk once for its pieces of the rows.
      const std::int64_t wanted = divide_up(most, divide_up(thread_panels, p.chunk_panels));
      p.pieces = std::clamp<std::int64_t>(part_rows / (4 * p.max_rows), 1, wanted);
    }
  }
  p.chunks = divide_up(thread_panels, p.chunk_panels);
}

GemmPlan block_plan(const GemmArgs& g, int threads) {
  const GemmKernels& kernels = gemm_kernels();
  const Side a{static_cast<const char*>(g.a.data), g.a.dtype, g.a.row_stride, g.a.col_stride, g.a_batch_stride};
  const Side b{static_cast<const char*>(g.b.data), g.b.dtype, g.b.col_stride, g.b.row_stride, g.b_batch_stride};
  GemmPlan p = {};
  p.lanes = kernels.lanes;
  p.max_rows = kernels.max_rows;
  p.panel = kernels.columns;
  p.k = g.k;
  p.swap = cost(b, a, g.n, g.m, g.k, p.lanes, true) < cost(a, b, g.m, g.n, g.k, p.lanes, false);
  p.s = p.swap ? b : a;
  p.v = p.swap ? a : b;
  p.rows = p.swap ? g.n : g.m;
  p.cols = p.swap ? g.m : g.n;
  p.panels = divide_up(p.cols, p.panel);
  p.vectors_in_place = can_read_vectors(p.v, p.k) && p.rows <= kDirectRows;
  p.straight = !p.swap && g.c_dtype == DType::f32 && g.bias == nullptr && g.activation == GemmActivation::none;
  p.scalars = choose_scalars(p.s, p.rows, p.cols, p.k);
  p.rounds = !p.swap && g.c_dtype != DType::f32 && p.scalars == Scalars::packed_rows &&
             kernels.rounded_tile(g.c_dtype, 1, 1) != nullptr;
  p.steps = steps_at_once(p.k);
  p.packed_stride = p.scalars == Scalars::packed_rows ? kGemmRowStride : round_up(p.max_rows, p.lanes);

  // Threads: the grid whose largest part is least work, and then least to read.
  double best = 0;
  for (std::int64_t parts = 1; parts <= threads; ++parts) {
    if (threads % parts != 0) continue;
    const double r = static_cast<double>(divide_up(p.rows, parts));
    const double c = static_cast<double>(divide_up(p.panels, threads / parts) * p.panel);
    const double work = r * c + 16 * (r + c);
    if (parts == 1 || work < best) {
      best = work;
      p.row_parts = parts;
      p.column_parts = threads / parts;
    }
  }
  const std::int64_t part_rows = p.part_rows();
  // Whole lines of a turned result: 8 tiles of 14 or 6 rows are a multiple of 16.
  p.block_rows = std::min(round_up(part_rows, 16), kTilesPerBlock * p.max_rows);
  const std::int64_t own = part_rows <= p.block_rows ? kOwnPackedOnce : kOwnPackedFloats;
  // Panels that others packed cost a wait, and come from their caches. A thread packs them all again where that is
  // little next to its multiplications.
  const double part_cols = static_cast<double>(divide_up(p.panels, p.column_parts) * p.panel);
  const double packing = part_cols * static_cast<double>(p.k) * pack_cost(p.v);
  const double multiplying = part_cols * static_cast<double>(p.k * part_rows) / static_cast<double>(2 * p.lanes);
  p.own_panels = p.row_parts == 1 || packing < kPackAgain * multiplying;
  const std::int64_t thread_panels = divide_up(p.panels, p.column_parts);
  p.chunk_panels = !p.own_panels ? std::clamp<std::int64_t>(kPackedFloats / (p.panel * p.steps), 1, p.panels)
                                 : std::clamp<std::int64_t>(own / (p.panel * p.steps), 1, thread_panels);
  if (p.own_panels) {
    // Chunks alike, since each of them packs the scalar side again; a little more than fits is better than a rest.
    const auto chunks = static_cast<double>(thread_panels * p.panel * p.steps) / static_cast<double>(own);
    p.chunk_panels = divide_up(thread_panels, std::max<std::int64_t>(std::llround(chunks), 1));
  }
  if (p.vectors_in_place) p.chunk_panels = p.own_panels ? thread_panels : p.panels;
  p.packed_steps = p.steps;
  p.rows_at_once = part_rows;
  p.deferred = !p.straight && p.k > p.steps;
  if (!p.deferred) return p;
  // Sums can't wait in a result of 16 bits. Either panels of all steps are packed, and a block's sums are done before
  // the next block's, or they wait beside it.
  const std::int64_t deep = kDeepFloats / (p.panel * p.k);
  if (p.own_panels && !p.vectors_in_place && part_rows > p.block_rows &&
      deep >= std::min(kDeepColumns / p.panel, thread_panels)) {
    p.deferred = false;
    p.packed_steps = p.k;
    p.chunk_panels = divide_up(thread_panels, divide_up(thread_panels, deep));
    return p;
  }
  const std::int64_t most = std::max<std::int64_t>(kResultFloats / (p.panel * part_rows), 1);
  if (!p.own_panels) {
    p.chunk_panels = std::min(p.chunk_panels, most * p.column_parts);
  } else if (most < p.chunk_panels) {
    // Panels are packed again for other rows.
    p.rows_at_once = std::max(kResultFloats / (p.panel * p.chunk_panels) / p.block_rows * p.block_rows, p.block_rows);
    p.chunk_panels = std::max<std::int64_t>(kResultFloats / (p.panel * p.rows_at_once), 1);
  }
  return p;
}

GemmPlan make_plan(const GemmArgs& g, int threads) {
  GemmPlan p = block_plan(g, threads);
  if (p.own_panels) share_out(p);
  return p;
}

/// What a worker has packed, so that it doesn't again for its next job.
struct alignas(64) Held {
  std::int64_t panels = -1, k0 = -1, rows = -1;
};

struct Scratch {
  float* packed;   // panels of the vector side, each [k][panel]; a part for each thread that packs its own
  float* bias;     // as float32
  float* scalars;  // packed scalar side, a part for each thread
  float* results;  // likewise
  Held* held;      // likewise
  std::int64_t packed_floats, scalars_floats, results_floats;
};

Scratch carve(const GemmArgs& g, const GemmPlan& p, int threads, Carver& carver) {
  Scratch s = {};
  // A last, partial panel is packed even when the others are read in place.
  s.packed_floats = (p.vectors_in_place ? 1 : p.chunk_panels) * p.panel * p.packed_steps;
  s.packed = carver.floats(s.packed_floats * (p.own_panels ? threads : 1));
  if (g.bias != nullptr) s.bias = carver.floats(g.n);
  const std::int64_t tiles = divide_up(p.block_rows, p.max_rows) + 1;
  if (p.scalars == Scalars::packed_rows) s.scalars_floats = round_up(p.block_rows * p.packed_stride, 16);
  if (p.scalars == Scalars::packed_steps) s.scalars_floats = round_up(tiles * p.steps * p.packed_stride, 16);
  if (p.keeps_scalars) s.scalars_floats *= p.goes();
  s.results_floats = p.straight   ? p.max_rows * p.panel
                     : p.deferred ? p.rows_at_once * p.panel *
                                        (p.own_panels ? p.chunk_panels : divide_up(p.chunk_panels, p.column_parts))
                                  : p.block_rows * std::min(p.chunk_panels, kPanelsPerBlock) * p.panel;
  s.results_floats = round_up(s.results_floats, 16);
  s.scalars = carver.floats(s.scalars_floats * threads);
  s.results = carver.floats(s.results_floats * threads);
  s.held = static_cast<Held*>(carver.bytes(static_cast<std::size_t>(threads) * sizeof(Held)));
  return s;
}

class Blocked {
 public:
  Blocked(const GemmArgs& g, const GemmPlan& p, const Scratch& scratch)
      : g_(g), p_(p), scratch_(scratch), kernels_(gemm_kernels()) {}

  void run() {
    if (g_.bias != nullptr) kernels_.widen(g_.bias_dtype, g_.bias, g_.n, scratch_.bias);
    const std::int64_t threads = p_.row_parts * p_.column_parts, chunk = p_.chunk_panels;
    if (p_.own_panels) {
      std::uninitialized_fill_n(scratch_.held, threads, Held());
      parallel_jobs(threads * p_.chunks * p_.pieces, threads, [&](std::int64_t job, std::int64_t worker) {
        run_job(job / (p_.chunks * p_.pieces), job / p_.pieces % p_.chunks, job % p_.pieces, worker);
      });
      return;
    }
    // Threads share the packing, and wait for each other.
    for (std::int64_t first = 0; first < p_.panels; first += chunk) {
      const std::int64_t last = std::min(first + chunk, p_.panels), count = last - first;
      for (std::int64_t k0 = 0; k0 < p_.k; k0 += p_.packed_steps) {
        const std::int64_t steps = std::min(p_.packed_steps, p_.k - k0);
        parallel_for(count, divide_up(count, threads), [&](std::int64_t begin, std::int64_t end) {
          pack_panels({scratch_.packed, first, first + begin, first + end, k0, steps});
        });
        parallel_for(threads, 1, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t t = begin; t < end; ++t) {
            const std::int64_t row = t / p_.column_parts, column = t % p_.column_parts;
            compute({t, scalars_of(t), false},
                    {scratch_.packed, first, first + count * column / p_.column_parts,
                     first + count * (column + 1) / p_.column_parts, k0, steps},
                    first_row(row), first_row(row + 1));
          }
        });
      }
    }
  }

 private:
  /// Panels [begin, end) of the vector side, `steps` of the sum from k0 on, packed from panel `first` on at `packed`.
  struct Panels {
    float* packed;
    std::int64_t first, begin, end, k0, steps;
  };

  std::int64_t width(std::int64_t panel) const { return std::min(p_.panel, p_.cols - panel * p_.panel); }
  bool whole_vectors(std::int64_t panel) const { return width(panel) % p_.lanes == 0; }
  bool in_place(std::int64_t panel) const { return p_.vectors_in_place && width(panel) == p_.panel; }

  /// Of a part of the rows: a multiple of 16, so that threads write whole lines of a turned result.
  std::int64_t first_row(std::int64_t part) const {
    return part == p_.row_parts ? p_.rows : p_.rows * part / p_.row_parts / 16 * 16;
  }
  /// Of a piece of `rows` rows, likewise, and of whole blocks where there are many.
  std::int64_t first_of_piece(std::int64_t rows, std::int64_t piece) const {
    const std::int64_t unit = rows >= 4 * p_.pieces * p_.block_rows ? p_.block_rows : 16;
    return piece == p_.pieces ? rows : rows * piece / p_.pieces / unit * unit;
  }

  /// The part's chunk, one piece of the rows.
  void run_job(std::int64_t part, std::int64_t chunk, std::int64_t piece, std::int64_t worker) {
    const std::int64_t row = part / p_.column_parts, column = part % p_.column_parts;
    const std::int64_t first = first_row(row), rows = first_row(row + 1) - first;
    const std::int64_t r0 = first + first_of_piece(rows, piece), r1 = first + first_of_piece(rows, piece + 1);
    const std::int64_t q0 = first_panel(column) + chunk * p_.chunk_panels;
    const std::int64_t q1 = std::min(q0 + p_.chunk_panels, first_panel(column + 1));
    if (r0 >= r1 || q0 >= q1) return;
    Held& held = scratch_.held[worker];
    const std::int64_t go_floats = scratch_.scalars_floats / p_.goes();
    if (p_.keeps_scalars && held.rows != r0) {
      for (std::int64_t k0 = 0; k0 < p_.k; k0 += p_.steps) {
        pack_scalars(scalars_of(worker) + k0 / p_.steps * go_floats, r0, r1, tile_rows_of(r1 - r0), k0,
                     std::min(p_.steps, p_.k - k0));
      }
      held.rows = r0;
    }
    for (std::int64_t r = r0; r < r1; r += p_.rows_at_once) {
      for (std::int64_t k0 = 0; k0 < p_.k; k0 += p_.packed_steps) {
        const Panels panels = {
            scratch_.packed + worker * scratch_.packed_floats, q0, q0, q1, k0, std::min(p_.packed_steps, p_.k - k0)};
        if (held.panels != q0 || held.k0 != k0) pack_panels(panels);
        held.panels = q0, held.k0 = k0;
        compute({worker, scalars_of(worker) + (p_.keeps_scalars ? k0 / p_.steps * go_floats : 0), p_.keeps_scalars},
                panels, r, std::min(r + p_.rows_at_once, r1));
      }
    }
  }

  std::int64_t first_panel(std::int64_t part) const { return p_.panels * part / p_.column_parts; }

  float* packed(const Panels& panels, std::int64_t q) const {
    return panels.packed + (p_.vectors_in_place ? 0 : q - panels.first) * p_.panel * p_.packed_steps;
  }

  void pack_panels(const Panels& panels) const {
    for (std::int64_t q = panels.begin; q < panels.end; ++q) {
      if (in_place(q)) continue;
      kernels_.pack(p_.v.dtype, p_.v.at(q * p_.panel, panels.k0), p_.v.outer, p_.v.k, width(q), panels.steps, p_.panel,
                    packed(panels, q));
    }
  }

  float* scalars_of(std::int64_t t) const { return scratch_.scalars + t * scratch_.scalars_floats; }
  /// Rows of a tile where `rows` are cut into as few tiles as can be, all but the last alike.
  std::int64_t tile_rows_of(std::int64_t rows) const { return divide_up(rows, divide_up(rows, p_.max_rows)); }

  /// The thread that computes, and its packed scalars of the rows and steps, or room for those of a block.
  struct Own {
    std::int64_t worker;
    float* scalars;
    bool scalars_packed;
  };

  /// These panels of rows [r0, r1).
  void compute(const Own& own, const Panels& panels, std::int64_t r0, std::int64_t r1) const {
    if (r0 == r1 || panels.begin == panels.end) return;
    const bool scalars_packed = own.scalars_packed;
    float* const scalars = own.scalars;
    float* const results = scratch_.results + own.worker * scratch_.results_floats;
    const std::int64_t all = panels.end - panels.begin, group = p_.straight || p_.deferred ? all : kPanelsPerBlock;
    for (std::int64_t b0 = r0; b0 < r1; b0 += p_.block_rows) {
      const std::int64_t b1 = std::min(b0 + p_.block_rows, r1);
      const std::int64_t tile_rows = tile_rows_of(b1 - b0);
      for (std::int64_t g0 = panels.begin; g0 < panels.end; g0 += group) {
        const std::int64_t g1 = std::min(g0 + group, panels.end), ld = (g1 - g0) * p_.panel;
        // Sums of the group: of this block, or of all rows of the thread where other steps will add to them.
        float* const sums = p_.deferred ? results + (b0 - r0) * ld : results;
        const std::int64_t stride = g1 - g0 <= kFewPanels && !scalars_packed ? tile_rows : b1 - b0;
        const std::int64_t end = panels.k0 + panels.steps;
        for (std::int64_t k0 = panels.k0; k0 < end; k0 += p_.steps) {
          const std::int64_t steps = std::min(p_.steps, end - k0);
          for (std::int64_t s0 = b0; s0 < b1; s0 += stride) {
            const std::int64_t s1 = std::min(s0 + stride, b1);
            if (!scalars_packed) pack_scalars(scalars, s0, s1, tile_rows, k0, steps);
            // What is packed next, if it isn't what has been packed before for other columns.
            Rows next = {};
            if (s1 < b1) {
              next = {s1, std::min(s1 + stride, b1), k0, steps};
            } else if (k0 + steps < end) {
              next = {b0, std::min(b0 + stride, b1), k0 + steps, std::min(p_.steps, end - k0 - steps)};
            } else if (g1 == panels.end && b1 < r1) {
              next = {b1, std::min(b1 + stride, r1), panels.k0, std::min(p_.steps, panels.steps)};
            }
            std::int64_t tiles = (g1 - g0) * divide_up(s1 - s0, tile_rows);
            for (std::int64_t q = g0; q < g1; ++q) {
              for (std::int64_t r = s0; r < s1; r += tile_rows) {
                fetch(next, tiles--);
                tile(panels, q, k0, steps, s0, r, std::min(tile_rows, b1 - r), tile_rows, scalars,
                     p_.straight ? results : sums + (r - b0) * ld + (q - g0) * p_.panel, ld);
              }
            }
          }
        }
        if (p_.straight || end < p_.k) continue;
        const std::int64_t waiting = !p_.rounds ? g0 : whole_vectors(g1 - 1) ? g1 : g1 - 1;
        if (waiting < g1) finish(sums + (waiting - g0) * p_.panel, ld, b0, b1, waiting, g1);
      }
    }
  }

  /// Rows of the scalar side, `steps` of the sum from k0 on.
  struct Rows {
    std::int64_t begin, end, k0, steps;
  };

  /// Fetches one of `parts` parts of what is left of the rows into the second-level cache, for pack_scalars(). Where
  /// packing reads from memory itself, it takes as long as a tenth of the multiplications.
  void fetch(Rows& rows, std::int64_t parts) const {
    constexpr std::int64_t kLine = 64, kFewSteps = 64;  // steps of rows that are read once the tile has them
    const bool in_place = p_.scalars == Scalars::rows_in_place && p_.k >= kFewSteps;
    if (p_.scalars != Scalars::packed_rows && !in_place) return;
    const std::int64_t end = rows.begin + divide_up(rows.end - rows.begin, parts);
    for (; rows.begin < end; ++rows.begin) {
      const char* const row = p_.s.at(rows.begin, rows.k0);
      const std::int64_t bytes = rows.steps * static_cast<std::int64_t>(item_size(p_.s.dtype));
      for (std::int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(row + i, 0, 2);
    }
  }

  void pack_scalars(float* to, std::int64_t b0, std::int64_t b1, std::int64_t tile_rows, std::int64_t k0,
                    std::int64_t steps) const {
    if (p_.scalars == Scalars::packed_rows) {
      for (std::int64_t r = b0; r < b1; ++r, to += p_.packed_stride) {
        kernels_.widen(p_.s.dtype, p_.s.at(r, k0), steps, to);
      }
    } else if (p_.scalars == Scalars::packed_steps && p_.s.outer == 1 && p_.packed_stride == p_.lanes) {
      const void* rows[kGemmMostSteps];
      for (std::int64_t i = 0; i < steps; ++i) rows[i] = p_.s.at(b0, k0 + i);
      kernels_.gather(p_.s.dtype, rows, steps, 0, b1 - b0, tile_rows, p_.steps * p_.packed_stride, to, p_.lanes);
    } else if (p_.scalars == Scalars::packed_steps) {
      for (std::int64_t r = b0; r < b1; r += tile_rows, to += p_.steps * p_.packed_stride) {
        kernels_.pack(p_.s.dtype, p_.s.at(r, k0), p_.s.outer, p_.s.k, std::min(tile_rows, b1 - r), steps,
                      p_.packed_stride, to);
      }
    }
  }

  /// `steps` of the sum from k0 on, of rows [r, r + rows) of panel q; scalars are packed from row s0 on.
  void tile(const Panels& panels, std::int64_t q, std::int64_t k0, std::int64_t steps, std::int64_t s0, std::int64_t r,
            std::int64_t rows, std::int64_t tile_rows, const float* scalars, float* results,
            std::int64_t results_ld) const {
    GemmTile t = {};
    t.k = steps;
    switch (p_.scalars) {
      case Scalars::rows_in_place:
        t.s = reinterpret_cast<const float*>(p_.s.at(r, k0));
        t.s_stride = p_.s.outer;
        break;
      case Scalars::steps_in_place:
        t.s = reinterpret_cast<const float*>(p_.s.at(r, k0));
        t.s_stride = p_.s.k;
        break;
      case Scalars::packed_rows:
        t.s = scalars + (r - s0) * p_.packed_stride;
        t.s_stride = p_.packed_stride;
        break;
      case Scalars::packed_steps:
        t.s = scalars + (r - s0) / tile_rows * p_.steps * p_.packed_stride;
        t.s_stride = p_.packed_stride;
        break;
    }
    const GemmScalars kind = p_.scalars == Scalars::rows_in_place ? GemmScalars::rows
                             : p_.scalars == Scalars::packed_rows ? GemmScalars::packed_rows
                                                                  : GemmScalars::steps;
    if (in_place(q)) {
      t.v = reinterpret_cast<const float*>(p_.v.at(q * p_.panel, k0));
      t.v_stride = p_.v.k;
    } else {
      t.v = packed(panels, q) + (k0 - panels.k0) * p_.panel;
      t.v_stride = p_.panel;
    }
    const std::int64_t columns = width(q);
    const int vectors = columns > p_.lanes ? 2 : 1;
    const GemmTileFn run = kernels_.tile(kind, vectors, rows);
    if (!p_.straight) {
      t.c = results;
      t.ldc = results_ld;
      t.accumulate = k0 > 0;
      if (!p_.rounds || k0 + steps < p_.k || !whole_vectors(q)) return run(t);
      const GemmEpilogue f = epilogue(g_, false, results, results_ld, r, rows, q * p_.panel, columns, scratch_.bias);
      t.rounded = f.c, t.rounded_stride = f.row_stride;
      t.bias = f.bias, t.relu = f.relu;
      return kernels_.rounded_tile(g_.c_dtype, vectors, rows)(t);
    }
    float* const c = static_cast<float*>(g_.c) + r * g_.ldc + q * p_.panel;
    const bool add = g_.beta != 0 || k0 > 0;
    if (whole_vectors(q)) {
      t.c = c;
      t.ldc = g_.ldc;
      t.accumulate = add;
      return run(t);
    }
    t.c = results;
    t.ldc = p_.panel;
    run(t);
    GemmEpilogue f = {};
    f.from = results;
    f.ld = p_.panel;
    f.rows = rows;
    f.cols = columns;
    f.c = c;
    f.dtype = DType::f32;
    f.row_stride = g_.ldc;
    f.col_stride = 1;
    f.add_c = add;
    kernels_.finish(f);
  }

  void finish(const float* results, std::int64_t ld, std::int64_t b0, std::int64_t b1, std::int64_t g0,
              std::int64_t g1) const {
    const std::int64_t first = g0 * p_.panel, last = std::min(g1 * p_.panel, p_.cols);
    kernels_.finish(epilogue(g_, p_.swap, results, ld, b0, b1 - b0, first, last - first, scratch_.bias));
  }

  const GemmArgs& g_;
  const GemmPlan& p_;
  const Scratch& scratch_;
  const GemmKernels& kernels_;
};

}  // namespace

std::size_t blocked_workspace(const GemmArgs& args, int threads) {
  const GemmPlan plan = make_plan(args, threads);
  Carver carver(nullptr);
  carve(args, plan, threads, carver);
  return carver.used();
}

void gemm_blocked(const GemmArgs& args, int threads, void* workspace) {
  const GemmPlan plan = make_plan(args, threads);
  Carver carver(workspace);
  const Scratch scratch = carve(args, plan, threads, carver);
  Blocked(args, plan, scratch).run();
}

}  // namespace halfstep::cpu
