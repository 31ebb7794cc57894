// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/conv_weight.h"

#include <algorithm>
#include <cstring>

#include "halfstep/backends/cpu/conv_images.h"
#include "halfstep/backends/cpu/conv_weight_plan.h"
#include "halfstep/backends/cpu/conv_weight_sums.h"
#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/backends/cpu/gemm_kernels.h"
#include "halfstep/backends/cpu/pair_tile.h"
#include "halfstep/backends/cpu/round_up.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/backends/cpu/window_lines.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kLineBytes = 64;
// The longest lines that tiles read in place. Measured on an Emerald Rapids: of ResNet-50's 1x1 convolutions those of
// 64 channels or filters take 0.79 to 0.91 of the time, others 1.00 to 1.29.
constexpr std::int64_t kInPlace = 64;

// What is multiplied: float32, a place a step, or bfloat16 on the processor's units, two places a step.
template <class E>
constexpr std::int64_t kTogether = static_cast<std::int64_t>(sizeof(float) / sizeof(E));

template <class E>
void load_elements(DType dtype, const void* data, std::int64_t first, std::int64_t n, E* to) {
  if constexpr (std::is_same_v<E, float>) {
    load_floats(dtype, data, first, n, to);
  } else {
    std::memcpy(to, static_cast<const E*>(data) + first, static_cast<std::size_t>(n) * sizeof(E));
  }
}

// Columns [from, to) of the window of output place (n, p, q).
template <class E>
void load_window(const ConvGeometry& g, const TensorView& x, std::int64_t n, std::int64_t p, std::int64_t q,
                 std::int64_t from, std::int64_t to, E* out) {
  const std::int64_t width = g.kw * g.c, j0 = q * g.stride[1] - g.before[1];
  for (std::int64_t k = from / width; k * width < to; ++k) {
    // Elements [begin, end) of the kw * c of this row of the window.
    const std::int64_t begin = std::max<std::int64_t>(from - k * width, 0), end = std::min(to - k * width, width);
    const std::int64_t i = p * g.stride[0] - g.before[0] + k * g.dilation[0];
    E* const at = out + k * width + begin - from;
    if (i < 0 || i >= g.h) {
      std::fill_n(at, end - begin, E{0});
      continue;
    }
    const std::int64_t line = (n * g.h + i) * g.w * g.c;
    if (g.dilation[1] == 1) {
      // One run of memory, of which a part may be outside.
      const std::int64_t lo = std::clamp(-j0 * g.c, begin, end), hi = std::clamp((g.w - j0) * g.c, lo, end);
      std::fill_n(at, lo - begin, E{0});
      if (hi > lo) load_elements(x.dtype, x.data, line + j0 * g.c + lo, hi - lo, at + lo - begin);
      std::fill_n(at + hi - begin, end - hi, E{0});
      continue;
    }
    for (std::int64_t l = begin / g.c; l * g.c < end; ++l) {
      const std::int64_t lo = std::max(begin, l * g.c), hi = std::min(end, (l + 1) * g.c);
      const std::int64_t j = j0 + l * g.dilation[1];
      if (j < 0 || j >= g.w) {
        std::fill_n(at + lo - begin, hi - lo, E{0});
      } else {
        load_elements(x.dtype, x.data, line + j * g.c + lo - l * g.c, hi - lo, at + lo - begin);
      }
    }
  }
}

// The lines of the input that output row (n, p) sees, kh of them, `size` elements each.
template <class E>
void load_lines(const ConvGeometry& g, const TensorView& x, std::int64_t n, std::int64_t p, std::int64_t size, E* to) {
  for (std::int64_t k = 0; k < g.kh; ++k, to += size) {
    const std::int64_t i = p * g.stride[0] - g.before[0] + k * g.dilation[0];
    const std::int64_t length = ((g.ow - 1) * g.stride[1] + g.kw) * g.c;
    if (i < 0 || i >= g.h) {
      std::fill_n(to, length, E{0});
      continue;
    }
    const std::int64_t lo = std::min(g.before[1] * g.c, length), hi = std::min(lo + g.w * g.c, length);
    std::fill_n(to, lo, E{0});
    load_elements(x.dtype, x.data, (n * g.h + i) * g.w * g.c, hi - lo, to + lo);
    std::fill_n(to + hi, length - hi, E{0});
  }
}

// Columns that are taken of a place at a time: far places are read in pieces that the processor fetches ahead, while
// the panels that are written side by side stay in the cache.
constexpr std::int64_t kGathered = 256;

template <class E>
void gather_rows(DType dtype, const void* const* rows, std::int64_t steps, std::int64_t first, std::int64_t n,
                 std::int64_t width, std::int64_t size, float* to, std::int64_t stride) {
  if constexpr (kTogether<E> == 2) {
    gather_pairs(rows, steps, first, n, width, size, to, stride);
  } else {
    gemm_kernels().gather(dtype, rows, steps, first, n, width, size, to, stride);
  }
}

/// One of the factors of a chunk: element j of step i at at[j / width * panel + j % width + i * stride], `width` being
/// the rows or the columns of a tile.
struct Factor {
  const float* at;
  std::int64_t stride, panel;
};

/// Memory that will be wanted soon, `size` bytes every `stride`: fetched a few lines at a time between tiles, since the
/// processor doesn't foresee rows so far apart, and reading it at once would stop the arithmetic.
struct Ahead {
  const char* from = nullptr;
  std::int64_t size = 0, stride = 0, count = 0;
  std::int64_t row = 0, at = 0;
  std::int64_t lines() const { return count * (size / 64 + 1); }
  void fetch(std::int64_t n) {
    for (; n > 0 && row < count; --n) {
      __builtin_prefetch(from + row * stride + at, 0, 2);
      at += 64;
      if (at >= size + 64) at = 0, ++row;
    }
  }
};

// The elements of a step's places until they become one line of a chunk: floats are written there at once, the elements
// of two places become pairs.
template <class E>
struct StepLine {
  static constexpr std::int64_t kMost = kMostColumns + 64;  // what is written and read behind the last column
  alignas(64) E places[2][kMost];

  E* place(std::int64_t i, float* line) {
    if constexpr (kTogether<E> == 1) return line;
    return places[i];
  }
  // `line`, of n columns, with zeros behind it up to `end`.
  void finish(std::int64_t n, std::int64_t end, float* line) const {
    if constexpr (kTogether<E> == 2) {
      interleave_pairs(places[0], places[1], n, reinterpret_cast<std::uint32_t*>(line));
    }
    std::fill(line + n, line + end, 0.0f);
  }
};

// to[0 .. n) = from[0 .. n) in whole lines of 64 bytes, up to the end of which both may be used: a copy of the exact
// size would be a call, and take three times as long.
template <class E>
void copy_lines(const E* from, std::int64_t n, E* to) {
  constexpr std::int64_t kLine = kLineBytes / static_cast<std::int64_t>(sizeof(E));
  for (std::int64_t i = 0; i < n; i += kLine) std::memcpy(to + i, from + i, kLineBytes);
}

// The tiles that multiply the steps.
template <class E>
struct Tiles {
  const GemmKernels& kernels = gemm_kernels();
  const std::int64_t lanes = kTogether<E> == 2 ? kPairLanes : kernels.lanes;
  const std::int64_t columns = 2 * lanes;
  const std::int64_t rows = kTogether<E> == 2 ? GemmKernels::kMaxRows : kernels.max_rows;

  // Of so many places.
  static std::int64_t steps(std::int64_t places) { return divide_up(places, kTogether<E>); }

  GemmTileFn of(std::int64_t vectors, std::int64_t height) const {
    if constexpr (kTogether<E> == 2) return bfloat16_pair_tile(static_cast<int>(vectors), static_cast<int>(height));
    return kernels.tile(GemmScalars::steps, static_cast<int>(vectors), height);
  }
};

template <class E>
struct Job {
  const Tiles<E>& tiles;
  const ConvGeometry& g;
  const WeightPlan& plan;
  const TensorView &x, &y;
  float *g_chunk, *x_chunk;
  E* lines;
  const void** rows;  // of places of a chunk
  const void* zeros;  // as many as a place has channels or filters
  float* sums;

  // sums[o0 .. o1) of columns [first, last) over the output rows [r0, r1).
  void run(std::int64_t r0, std::int64_t r1, std::int64_t o0, std::int64_t o1, std::int64_t first,
           std::int64_t last) const {
    for (std::int64_t r = r0; r < r1; r += plan.chunk_rows) {
      const std::int64_t places = std::min(plan.chunk_rows, r1 - r) * g.ow;
      const std::int64_t steps = tiles.steps(places);
      Ahead ahead[2] = {next_filters(r, r1, o0, o1), next_lines(r, r1, first, last)};
      const Factor filters = load_filters(r * g.ow, places, steps, o0, o1);
      for (std::int64_t c0 = first; c0 < last; c0 += plan.block_columns) {
        const std::int64_t c1 = std::min(last, c0 + plan.block_columns);
        multiply(steps, filters, o0, o1, load_columns(r, places, steps, c0, c1), c0, c1, r != r0, ahead);
      }
    }
  }

  // Whether tiles read a factor where it lies: floats, of which lines are short, so that all steps of a chunk find room
  // in the first-level cache, or that few tiles read, so that a copy would take longer.
  static bool in_place(DType dtype, std::int64_t own, std::int64_t other) {
    return std::is_same_v<E, float> && dtype == DType::f32 && std::min(own, other) <= kInPlace;
  }

  // Windows of one place each, side by side.
  bool places_are_columns() const {
    return g.kh * g.kw == 1 && g.oh == g.h && g.ow == g.w && g.before[0] == 0 && g.before[1] == 0;
  }

  // What the next chunk reads.
  Ahead next_filters(std::int64_t r, std::int64_t r1, std::int64_t o0, std::int64_t o1) const {
    const std::int64_t next = r + plan.chunk_rows, rows = std::min(plan.chunk_rows, r1 - next);
    if (rows <= 0) return {};
    const std::int64_t item = static_cast<std::int64_t>(item_size(y.dtype));
    return {static_cast<const char*>(y.data) + (next * g.ow * g.o + o0) * item, (o1 - o0) * item, g.o * item,
            rows * g.ow};
  }
  Ahead next_lines(std::int64_t r, std::int64_t r1, std::int64_t c0, std::int64_t c1) const {
    const std::int64_t next = r + plan.chunk_rows, rows = std::min(plan.chunk_rows, r1 - next);
    if (rows <= 0) return {};
    const std::int64_t item = static_cast<std::int64_t>(item_size(x.dtype)), line = g.w * g.c * item;
    if (c1 - c0 < g.c && places_are_columns()) {
      return {static_cast<const char*>(x.data) + next * line + c0 * item, (c1 - c0) * item, g.c * item, rows * g.w};
    }
    const std::int64_t first = next / g.oh * g.h + std::min(next % g.oh * g.stride[0], g.h - 1);
    const std::int64_t count = std::min(rows * g.stride[0], g.n * g.h - first);
    return {static_cast<const char*>(x.data) + first * line, line, line, count};
  }

  void find_filters(std::int64_t first, std::int64_t places, std::int64_t steps) const {
    for (std::int64_t i = 0; i < steps * kTogether<E>; ++i) {
      rows[i] = i < places ? element(y.dtype, y.data, (first + i) * g.o) : zeros;
    }
  }

  Factor load_filters(std::int64_t first, std::int64_t places, std::int64_t steps, std::int64_t o0,
                      std::int64_t o1) const {
    if (in_place(y.dtype, g.o, plan.columns)) {
      return {static_cast<const float*>(y.data) + first * g.o + o0, g.o, tiles.rows};
    }
    find_filters(first, places, steps);
    const std::int64_t width = tiles.rows, size = steps * kFilterPanel;
    for (std::int64_t o = o0; o < o1; o += kGathered / width * width) {
      const std::int64_t n = std::min(kGathered / width * width, o1 - o);
      gather_rows<E>(y.dtype, rows, steps, o, n, width, size, g_chunk + (o - o0) / width * size, kFilterPanel);
    }
    return {g_chunk, kFilterPanel, size};
  }

  // Where tap (k, l) of the windows of `places` places from output row r on lies.
  void find_tap(std::int64_t r, std::int64_t places, std::int64_t steps, std::int64_t k, std::int64_t l) const {
    const std::int64_t offset = l * g.dilation[1] - g.before[1];
    // Places [lo, hi) of a row are inside the image.
    const std::int64_t lo = std::clamp<std::int64_t>((g.stride[1] - 1 - offset) / g.stride[1], 0, g.ow);
    const std::int64_t hi = std::clamp<std::int64_t>((g.w - offset + g.stride[1] - 1) / g.stride[1], lo, g.ow);
    const std::int64_t item = static_cast<std::int64_t>(item_size(x.dtype)), step = g.stride[1] * g.c * item;
    std::int64_t i = 0;
    for (std::int64_t row = r; i < places; ++row, i += g.ow) {
      const std::int64_t h = row % g.oh * g.stride[0] - g.before[0] + k * g.dilation[0];
      const bool inside = h >= 0 && h < g.h;
      const std::int64_t first = inside ? lo : g.ow, last = inside ? hi : g.ow;
      std::fill_n(rows + i, first, zeros);
      const char* at =
          static_cast<const char*>(x.data) + ((row / g.oh * g.h + h) * g.w + offset) * g.c * item + first * step;
      for (std::int64_t q = first; q < last; ++q, at += step) rows[i + q] = at;
      std::fill_n(rows + i + last, g.ow - last, zeros);
    }
    std::fill_n(rows + i, steps * kTogether<E> - i, zeros);
  }

  // Columns [c0, c1) of the windows of `places` places from output row r on, of as many channels as make whole vectors:
  // tap by tap as they lie.
  void gather_columns(std::int64_t r, std::int64_t places, std::int64_t steps, std::int64_t c0, std::int64_t c1) const {
    for (std::int64_t c = c0; c < c1;) {
      const std::int64_t tap = c / g.c, channel = c % g.c, n = std::min(g.c - channel, c1 - c);
      find_tap(r, places, steps, tap / g.kw, tap % g.kw);
      // A panel begins where the one before it ends: at a multiple of 32 columns, or in the middle of one.
      for (std::int64_t i = 0; i < n;) {
        const std::int64_t at = c + i - c0, inside = at % 32;
        const std::int64_t count = inside != 0 ? std::min(n - i, 32 - inside) : std::min(n - i, kGathered);
        gather_rows<E>(x.dtype, rows, steps, channel + i, count, 32, steps * 32,
                       x_chunk + at / 32 * steps * 32 + inside, 32);
        i += count;
      }
      c += n;
    }
  }

  // Columns [c0, c1) of the windows of `places` places from output row r on.
  Factor load_columns(std::int64_t r, std::int64_t places, std::int64_t steps, std::int64_t c0, std::int64_t c1) const {
    if (g.c % 16 == 0) {
      if (places_are_columns() && in_place(x.dtype, g.c, g.o)) {
        return {static_cast<const float*>(x.data) + r * g.w * g.c + c0, g.c, 32};
      }
      gather_columns(r, places, steps, c0, c1);
      return {x_chunk, 32, steps * 32};
    }
    // Lines of all columns, or panels of them.
    const std::int64_t size = plan.line_stride();
    if constexpr (kTogether<E> == 1) {
      if (plan.line > 0) {
        for (std::int64_t i = 0; i < places; i += g.ow, ++r) {
          load_lines(g, x, r / g.oh, r % g.oh, plan.line, lines);
          cut_windows({lines, plan.line, g.stride[1] * g.c, g.kh, g.kw * g.c, g.ow, x_chunk + i * size, size});
        }
        return {x_chunk, size, 32};
      }
    }
    StepLine<E> elements;
    for (std::int64_t step = 0; step < steps; ++step) {
      float* const line = x_chunk + step * size;
      for (std::int64_t i = 0; i < kTogether<E>; ++i) {
        const std::int64_t place = step * kTogether<E> + i, row = r + place / g.ow, q = place % g.ow;
        E* const to = elements.place(i, line);
        if (place >= places) {
          std::fill_n(to, c1 - c0, E{0});
        } else if (plan.line == 0) {
          load_window(g, x, row / g.oh, row % g.oh, q, c0, c1, to);
        } else {
          if (q == 0) load_lines(g, x, row / g.oh, row % g.oh, plan.line, lines);
          const std::int64_t width = g.kw * g.c;
          const E* const window = lines + q * g.stride[1] * g.c;
          for (std::int64_t k = 0; k < g.kh; ++k) copy_lines(window + k * plan.line, width, to + k * width);
        }
      }
      elements.finish(c1 - c0, size, line);
    }
    return {x_chunk, size, 32};
  }

  void multiply(std::int64_t steps, const Factor& filters, std::int64_t o0, std::int64_t o1, const Factor& columns,
                std::int64_t c0, std::int64_t c1, bool accumulate, Ahead (&ahead)[2]) const {
    const std::int64_t lanes = tiles.lanes;
    const std::int64_t count = divide_up(plan.share_columns, tiles.columns) * divide_up(o1 - o0, tiles.rows);
    const std::int64_t each[2] = {ahead[0].lines() / count + 1, ahead[1].lines() / count + 1};
    for (std::int64_t c = c0; c < c1; c += tiles.columns) {
      const std::int64_t vectors = divide_up(std::min(tiles.columns, c1 - c), lanes);
      for (std::int64_t o = o0; o < o1; o += tiles.rows) {
        const std::int64_t height = std::min(tiles.rows, o1 - o);
        GemmTile t = {};
        t.k = steps;
        t.s = filters.at + (o - o0) / tiles.rows * filters.panel;
        t.s_stride = filters.stride;
        t.v = columns.at + (c - c0) / 32 * columns.panel + (c - c0) % 32;
        t.v_stride = columns.stride;
        t.c = sums + o * plan.sum_stride() + c;
        t.ldc = plan.sum_stride();
        t.accumulate = accumulate;
        ahead[0].fetch(each[0]);
        ahead[1].fetch(each[1]);
        tiles.of(vectors, height)(t);
      }
    }
  }
};

}  // namespace

bool products_serve(const ConvCall& call) noexcept {
  return call.part == ConvPart::weight && call.geometry.groups == 1 && channels_last(call.input) &&
         channels_last(call.output);
}

bool pair_products_serve(const ConvCall& call, Isa isa) noexcept {
  return (isa == Isa::avx512_bf16 || isa == Isa::avx512_fp16) && products_serve(call) &&
         call.input.dtype == DType::bf16 && call.output.dtype == DType::bf16;
}

bool products_suit(const ConvGeometry& g) noexcept {
  // Measured: oneDNN's kernels come near the peak for 3 x 3 windows side by side on large images, not for single
  // places, strides, few channels or small images.
  return g.kh * g.kw == 1 || g.stride[1] > 1 || g.c < 16 || g.oh * g.ow <= 64;
}

namespace {

template <class E>
Status weight_by(KernelContext* context, ConvCall& call) {
  const ConvGeometry& g = call.geometry;
  const Tiles<E> tiles;
  const WeightPlan p = weight_plan(g, kTogether<E>);
  TensorView& w = call.weight;
  const std::int64_t places = p.chunk_rows * g.ow, all = g.o * p.sum_stride(), jobs = p.jobs();
  const std::int64_t workers = num_workers(jobs);
  const std::int64_t steps = tiles.steps(places);
  const bool direct = p.terms == 1 && w.dtype == DType::f32 && channels_last(w) && p.columns == p.sum_stride();
  const auto floats = [&](std::int64_t n) {
    return static_cast<float*>(context->workspace(context, static_cast<std::size_t>(n) * sizeof(float)));
  };
  const std::int64_t g_size = steps * kFilterPanel * divide_up(p.share_filters, tiles.rows),
                     x_size = steps * p.line_stride() + WindowLines::kBehind;
  const std::int64_t behind = p.line > 0 ? WindowLines::kBehind : 0;
  const std::int64_t chunk_size = g_size + x_size + g.kh * p.line + behind;
  float* const chunks = floats(workers * chunk_size);
  const std::int64_t most_rows = tiles.steps(places + g.ow) * kTogether<E>;
  const void** rows = nullptr;
  float* zeros = nullptr;
  if (!take_workspace(context, static_cast<std::size_t>(workers * most_rows), rows) ||
      !take_workspace(context, static_cast<std::size_t>(std::max(g.c, g.o)), zeros)) {
    return conv_out_of_memory(context);
  }
  float* const sums = direct ? static_cast<float*>(w.data) : floats(p.terms * all);
  float* const lines = direct ? sums : floats(weight_line_floats(g));
  if (chunks == nullptr || sums == nullptr || lines == nullptr) {
    return conv_out_of_memory(context);
  }
  if (runs_dry(context)) return Status::ok;
  std::fill_n(zeros, std::max(g.c, g.o), 0.0f);
  parallel_jobs(jobs, [&](std::int64_t job, std::int64_t worker) {
    const std::int64_t term = job / (p.by_filters * p.by_columns), r0 = term * p.rows / p.terms,
                       r1 = (term + 1) * p.rows / p.terms;
    const std::int64_t o0 = job / p.by_columns % p.by_filters * p.share_filters,
                       c0 = job % p.by_columns * p.share_columns;
    float* const chunk = chunks + worker * chunk_size;
    const Job<E> one{tiles,
                     g,
                     p,
                     call.input,
                     call.output,
                     chunk,
                     chunk + g_size,
                     reinterpret_cast<E*>(chunk + g_size + x_size),
                     rows + worker * most_rows,
                     zeros,
                     sums + term * all};
    const std::int64_t o1 = std::min(o0 + p.share_filters, g.o), c1 = std::min(c0 + p.share_columns, p.columns);
    one.run(r0, r1, o0, o1, c0, c1);
  });
  if (!direct) {
    const WeightSums done = {.sums = sums,
                             .terms = p.terms,
                             .all = all,
                             .filter = p.sum_stride(),
                             .taps = g.kh * g.kw,
                             .tap = g.c,
                             .channels = g.c,
                             .run = g.c,
                             .next_run = g.c};
    write_weight(g, done, lines, w);
  }
  return Status::ok;
}

}  // namespace

bool pair_products_suit(const ConvGeometry& g) noexcept {
  // Measured on a Zen 5, layer by layer of ResNet-50: where few channels are to be put together in pairs for each
  // product, and for 3 x 3 windows on large images, oneDNN's kernels are the faster ones by 5 to 30%.
  if (g.c < 16 || g.kh * g.kw * g.c * g.o <= 64 * 64) return false;
  return g.kh * g.kw == 1 || g.stride[1] > 1 || g.oh * g.ow <= 256;
}

Status weight_by_products(KernelContext* context, ConvCall& call) { return weight_by<float>(context, call); }
Status weight_by_pair_products(KernelContext* context, ConvCall& call) {
  return weight_by<std::uint16_t>(context, call);
}

}  // namespace halfstep::cpu
