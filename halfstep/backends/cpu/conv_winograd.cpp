// SPDX-License-Identifier: Apache-2.0
// Tiles are taken a block at a time, so that what their transforms write stays in the second-level cache until it is
// read: transformed input [t t][tiles][C], by transformed weights [t t][C][O], is transformed output [t t][tiles][O].
#include "halfstep/backends/cpu/conv_winograd.h"

#include <algorithm>
#include <atomic>

#include "halfstep/backends/cpu/conv_images.h"
#include "halfstep/backends/cpu/conv_winograd_kernels.h"
#include "halfstep/backends/cpu/gemm_kernels.h"
#include "halfstep/backends/cpu/round_up.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kWinogradBlockBytes = 512 << 10;  // of a block's transformed input and output
// Every block reads all weights: a tile for each so many of their bytes makes up for it.
constexpr std::int64_t kWinogradTileWeights = 128 << 10;
constexpr std::int64_t kWinogradRow = 16;  // floats of the widest vector, and between rows of a block
constexpr std::int64_t kWeightPiece = 64;  // weights of a filter transformed at a time

/// The convolution that is computed: of `from` to `to`, with the weights turned by 180 degrees for the input gradient.
struct WinogradWork {
  int m;
  bool back;
  const TensorView& weight;
  WinogradImages from, to;
  const WinogradKernels& transforms;
  const GemmKernels& kernels = gemm_kernels();
  std::int64_t numbers = std::int64_t{m + 2} * (m + 2);
  std::int64_t columns = kernels.columns;
  std::int64_t panels = divide_up(to.channels, columns);
  std::int64_t panel = from.channels * columns;  // floats of one: [from][columns]
  std::int64_t from_row = round_up(from.channels, kWinogradRow) + kWinogradRow;
  std::int64_t to_row = panels * columns + kWinogradRow;
  std::int64_t tiles = 0, block = 0, shares = 0;

  std::int64_t weights() const { return numbers * panels * panel; }
  std::int64_t piece() const { return (numbers + 9 + 9) * columns * kWeightPiece; }
  std::int64_t block_floats() const { return numbers * block * (from_row + to_row); }

  /// For filters [o0, o0 + columns) and each piece of channels: nine lines of weights, then their transforms, then a
  /// part of the panels.
  void transform_filters(std::int64_t o0, float* room, float* u) const {
    const std::int64_t o_all = weight.sizes[0], c_all = weight.sizes[1], o1 = std::min(o0 + columns, o_all);
    float* const lines = room + numbers * columns * kWeightPiece;
    float* const raw = lines + 9 * kWeightPiece;
    const std::int64_t apart = columns * kWeightPiece;
    for (std::int64_t c0 = 0; c0 < c_all; c0 += kWeightPiece) {
      const std::int64_t n = std::min(kWeightPiece, c_all - c0);
      for (std::int64_t o = o0; o < o1; ++o) {
        read_lines(o, c0, n, raw, lines);
        transforms.weight(lines, kWeightPiece, n, room + (o - o0) * kWeightPiece, apart);
      }
      for (std::int64_t k = 0; k < numbers; ++k) {
        float* const to_k = u + k * panels * panel;
        const float* const of_k = room + k * apart;
        if (!back) {
          kernels.pack(DType::f32, of_k, kWeightPiece, 1, o1 - o0, n, columns,
                       to_k + o0 / columns * panel + c0 * columns);
          continue;
        }
        for (std::int64_t c = 0; c < n; c += columns) {
          kernels.pack(DType::f32, of_k + c, 1, kWeightPiece, std::min(columns, n - c), o1 - o0, columns,
                       to_k + (c0 + c) / columns * panel + o0 * columns);
        }
      }
    }
  }

  /// lines[e * kWeightPiece + i]: element e of the window of filter o and channel c0 + i.
  void read_lines(std::int64_t o, std::int64_t c0, std::int64_t n, float* raw, float* lines) const {
    const TensorView& w = weight;
    const std::int64_t at = o * w.strides[0] + c0 * w.strides[1];
    const auto line = [&](int e) { return lines + (back ? 8 - e : e) * kWeightPiece; };
    if (w.strides[3] == 1 && w.strides[2] == 3 && w.strides[1] == 9) {
      // [n][9] turned to [9][n].
      kernels.pack(w.dtype, element(w.dtype, w.data, at), 9, 1, n, 9, kWeightPiece, back ? raw : lines);
      for (int e = 0; back && e < 9; ++e) std::copy_n(raw + e * kWeightPiece, n, line(e));
      return;
    }
    for (int e = 0; e < 9; ++e) {
      read_row(w, at + e / 3 * w.strides[2] + e % 3 * w.strides[3], w.strides[1], n, line(e));
    }
  }

  /// Tiles [first, first + count) of at most a block. Whether all results were finite.
  bool run_block(std::int64_t first, std::int64_t count, const float* u, const float* bias, float* room) const {
    float* const v = room;
    float* const p = room + numbers * block * from_row;
    transforms.input(from, {first, count, v, block * from_row, from_row});
    for (std::int64_t k = 0; k < numbers; ++k) {
      for (std::int64_t j = 0; j < panels; ++j) {
        const std::int64_t width = std::min(columns, to.channels - j * columns);
        const int vectors = width > kernels.lanes ? 2 : 1;
        for (std::int64_t i = 0; i < count; i += kernels.max_rows) {
          GemmTile t = {};
          t.k = from.channels;
          t.s = v + (k * block + i) * from_row;
          t.s_stride = from_row;
          t.v = u + (k * panels + j) * panel;
          t.v_stride = columns;
          t.c = p + (k * block + i) * to_row + j * columns;
          t.ldc = to_row;
          kernels.tile(GemmScalars::rows, vectors, std::min<std::int64_t>(kernels.max_rows, count - i))(t);
        }
      }
    }
    return transforms.output({first, count, p, block * to_row, to_row}, bias, to);
  }
};

}  // namespace

bool winograd_serves(const ConvCall& call) noexcept {
  const ConvGeometry& g = call.geometry;
  return g.groups == 1 && g.kh == 3 && g.kw == 3 && g.stride[0] == 1 && g.stride[1] == 1 && g.dilation[0] == 1 &&
         g.dilation[1] == 1 && channels_last(call.input) && channels_last(call.output);
}

int winograd_tiles(ConvPart part, const ConvGeometry& g, int most, int speed) noexcept {
  const bool back = part == ConvPart::input, sums = part == ConvPart::weight;
  const std::int64_t height = back ? g.h : g.oh, width = back ? g.w : g.ow;
  // What tiles of products pad, too: results to whole vectors, filters of the weight's gradient to whole rows.
  const auto from = static_cast<double>(back ? g.o : g.c), to = static_cast<double>(back ? g.c : g.o);
  const auto padded = static_cast<double>(round_up(back ? g.c : g.o, sums ? 14 : 16));
  // In multiplications of the direct kernels, measured on a Zen 5: of a number of a tile, the transforms cost as much
  // as 12 of each input and 8 of each result (twice that in the larger tiles), and a weight as much as 64, or 160 where
  // all of them leave the caches. Direct weight gradients take 1.2 of the time of others.
  const double direct = (sums ? 10.8 : 9.0) * static_cast<double>(g.n * height * width) * (from + 4) * to / speed;
  int best = 0;
  double least = direct / 1.1;
  // Beside faster units the smaller tiles gain a few percent at most.
  for (int m = speed > 1 ? 4 : 2; m <= most; m += 2) {
    const auto tiles = static_cast<double>(g.n * divide_up(height, m) * divide_up(width, m));
    const double numbers = (m + 2) * (m + 2), weights = numbers * from * padded, larger = m / 2.0;
    const double weight = sums ? 60 : 64 + 96 * std::min(weights / (2 << 20), 1.0);
    const double cost = tiles * (weights + numbers * larger * (12 * from + (sums ? 12 : 8) * to)) + weights * weight;
    if (cost < least) least = cost, best = m;
  }
  return best;
}

Status convolve_winograd(KernelContext* context, ConvCall& call, int m) {
  const ConvGeometry& g = call.geometry;
  const bool back = call.part == ConvPart::input;
  const WinogradImages x = {call.input.dtype, call.input.data, g.h, g.w, g.c, g.c, 0, 0, {}, nullptr},
                       y = {call.output.dtype, call.output.data, g.oh, g.ow, g.o, g.o, 0, 0, {}, nullptr};
  WinogradWork work{m, back, call.weight, back ? y : x, back ? x : y, winograd_kernels(m)};
  WinogradImages &from = work.from, &to = work.to;
  for (int d = 0; d < 2; ++d) from.before[d] = back ? 2 - g.before[d] : g.before[d];
  from.rows = to.rows = divide_up(to.height, m);
  from.columns = to.columns = divide_up(to.width, m);
  work.tiles = g.n * to.rows * to.columns;
  const std::int64_t rows = work.kernels.max_rows;
  const std::int64_t tile_bytes = work.numbers * (work.from_row + work.to_row) * 4;
  const std::int64_t most = kWinogradBlockBytes / tile_bytes / rows * rows,
                     least = round_up(work.weights() * 4 / kWinogradTileWeights + 1, rows);
  work.block = std::min(std::max(most, least), round_up(work.tiles, rows));
  work.shares = in_parallel_region() ? 1 : std::min<std::int64_t>(num_threads(), divide_up(work.tiles, rows));
  const std::int64_t filters = divide_up(call.weight.sizes[0], work.columns);
  const std::int64_t weight_shares = std::min(filters, work.shares);
  float *u = nullptr, *rooms = nullptr, *bias = nullptr, *zeros = nullptr;
  const std::int64_t room = std::max(work.piece(), work.block_floats());
  const auto take = [&](std::int64_t n, float*& at) {
    return take_workspace(context, static_cast<std::size_t>(n), at);
  };
  if (!take(work.weights(), u) || !take(room * work.shares, rooms) || !take(from.channels, zeros) ||
      (call.bias != nullptr && !take(to.channels, bias))) {
    return conv_out_of_memory(context);
  }
  if (runs_dry(context)) return Status::ok;
  std::fill_n(zeros, from.channels, 0.0f);
  from.zeros = zeros;
  if (bias != nullptr) read_row(*call.bias, 0, call.bias->strides[0], to.channels, bias);
  parallel_for(weight_shares, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t s = begin; s < end; ++s) {
      for (std::int64_t f = s * filters / weight_shares; f < (s + 1) * filters / weight_shares; ++f) {
        work.transform_filters(f * work.columns, rooms + s * room, u);
      }
    }
  });
  std::atomic<bool> finite{true};
  parallel_for(work.shares, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t s = begin; s < end; ++s) {
      const std::int64_t last = (s + 1) * work.tiles / work.shares;
      for (std::int64_t first = s * work.tiles / work.shares; first < last; first += work.block) {
        const std::int64_t count = std::min(work.block, last - first);
        if (!work.run_block(first, count, u, bias, rooms + s * room)) finite.store(false, std::memory_order_relaxed);
      }
    }
  });
  return finite.load(std::memory_order_relaxed) ? Status::ok : Status::unsupported;
}

}  // namespace halfstep::cpu
