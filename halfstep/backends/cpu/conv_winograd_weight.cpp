// SPDX-License-Identifier: Apache-2.0
// The weight's gradient by the transposed algorithm: transformed gradients [t t][tiles][O] by transformed input
// [t t][tiles][C], summed over all tiles, are t t numbers for each weight, of which nine are made at the end.
#include <algorithm>
#include <atomic>

#include "halfstep/backends/cpu/conv_images.h"
#include "halfstep/backends/cpu/conv_shares.h"
#include "halfstep/backends/cpu/conv_winograd.h"
#include "halfstep/backends/cpu/conv_winograd_kernels.h"
#include "halfstep/backends/cpu/gemm_kernels.h"
#include "halfstep/backends/cpu/round_up.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kWeightTileBytes = 512 << 10;  // of a block's transformed input and gradients
constexpr std::int64_t kFewestTiles = 48;             // of a block: steps of a sum between two visits to memory
// Every block reads and writes all sums: a tile for each so many of their bytes makes up for it.
constexpr std::int64_t kTileSums = 64 << 10;
constexpr std::int64_t kFewestFilters =
    28;  // of a share: the input's transforms cost as much as some filters' products

struct WinogradSums {
  const WinogradKernels& transforms;
  WinogradImages x, y;
  std::int64_t numbers;
  const GemmKernels& kernels = gemm_kernels();
  std::int64_t row = round_up(x.channels, 16);  // of sums
  std::int64_t x_row = row + 16, y_row = round_up(y.channels, 16) + 16;
  std::int64_t block = 0;

  std::int64_t all() const { return numbers * y.channels * row; }
  std::int64_t block_floats() const { return numbers * block * (x_row + y_row); }

  /// Adds tiles [first, first + count) of at most a block to filters [begin, end) of `sums`, or sets them.
  void add_block(std::int64_t first, std::int64_t count, std::int64_t begin, std::int64_t end, bool accumulate,
                 float* room, float* sums) const {
    float* const v = room;
    float* const q = room + numbers * block * x_row;
    transforms.input(x, {first, count, v, block * x_row, x_row});
    WinogradImages own = y;
    own.data = element(y.dtype, y.data, begin);
    own.channels = end - begin;
    transforms.gradient(own, {first, count, q, block * y_row, y_row});
    const std::int64_t lanes = kernels.lanes;
    for (std::int64_t k = 0; k < numbers; ++k) {
      for (std::int64_t c = 0; c < row; c += kernels.columns) {
        const int vectors = row - c > lanes ? 2 : 1;
        for (std::int64_t o = begin; o < end; o += kernels.max_rows) {
          GemmTile t = {};
          t.k = count;
          t.s = q + k * block * y_row + o - begin;
          t.s_stride = y_row;
          t.v = v + k * block * x_row + c;
          t.v_stride = x_row;
          t.c = sums + (k * y.channels + o) * row + c;
          t.ldc = row;
          t.accumulate = accumulate;
          kernels.tile(GemmScalars::steps, vectors, std::min<std::int64_t>(kernels.max_rows, end - o))(t);
        }
      }
    }
  }

  /// Filters [begin, end) of the sums of `terms` terms, added in their order, to the weight. `room`: 18 rows. Whether
  /// all were finite.
  bool write_filters(std::int64_t begin, std::int64_t end, float* sums, std::int64_t terms, float* room,
                     TensorView& w) const {
    bool finite = true;
    for (std::int64_t o = begin; o < end; ++o) {
      for (std::int64_t s = 1; s < terms; ++s) {
        for (std::int64_t k = 0; k < numbers; ++k) {
          float* const to = sums + (k * y.channels + o) * row;
          const float* const from = to + s * all();
          for (std::int64_t c = 0; c < x.channels; ++c) to[c] += from[c];
        }
      }
      finite &= transforms.weight_gradient(sums + o * row, y.channels * row, x.channels, room, row);
      if (w.strides[1] == 9 && w.strides[2] == 3 && w.strides[3] == 1) {
        float* const turned = room + 9 * row;
        for (std::int64_t c = 0; c < x.channels; ++c) {
          for (int e = 0; e < 9; ++e) turned[c * 9 + e] = room[e * row + c];
        }
        write_row(w, o * w.strides[0], 1, 9 * x.channels, turned);
        continue;
      }
      for (std::int64_t e = 0; e < 9; ++e) {
        write_row(w, o * w.strides[0] + e / 3 * w.strides[2] + e % 3 * w.strides[3], w.strides[1], x.channels,
                  room + e * row);
      }
    }
    return finite;
  }
};

}  // namespace

Status weight_by_winograd(KernelContext* context, ConvCall& call, int m) {
  const ConvGeometry& g = call.geometry;
  const std::int64_t rows = divide_up(g.oh, m), columns = divide_up(g.ow, m), tiles = g.n * rows * columns;
  WinogradSums work{
      winograd_kernels(m),
      {call.input.dtype, call.input.data, g.h, g.w, g.c, g.c, rows, columns, {g.before[0], g.before[1]}, nullptr},
      {call.output.dtype, call.output.data, g.oh, g.ow, g.o, g.o, rows, columns, {}, nullptr},
      std::int64_t{m + 2} * (m + 2)};
  const std::int64_t tile_bytes = work.numbers * (work.x_row + work.y_row) * 4;
  work.block = std::min(std::max({kWeightTileBytes / tile_bytes, work.all() * 4 / kTileSums, kFewestTiles}), tiles);
  // Terms follow from the geometry, so that bits do. Where there are fewer than threads, filters are shared too, and
  // each share transforms the input again.
  const std::int64_t threads = in_parallel_region() ? 1 : num_threads(), terms = weight_terms(tiles);
  const std::int64_t most_shares = divide_up(g.o, kFewestFilters);
  const std::int64_t own = round_up(divide_up(g.o, std::clamp<std::int64_t>(divide_up(threads, terms), 1, most_shares)),
                                    work.kernels.max_rows);
  const std::int64_t shares = divide_up(g.o, own), jobs = terms * shares, workers = num_workers(jobs);
  const std::int64_t room = std::max(work.block_floats(), 18 * work.row), most = std::max(g.c, g.o);
  float *rooms = nullptr, *sums = nullptr, *zeros = nullptr;
  const auto take = [&](std::int64_t n, float*& at) {
    return take_workspace(context, static_cast<std::size_t>(n), at);
  };
  if (!take(room * workers, rooms) || !take(work.all() * terms, sums) || !take(most, zeros)) {
    return conv_out_of_memory(context);
  }
  if (runs_dry(context)) return Status::ok;
  std::fill_n(zeros, most, 0.0f);
  work.x.zeros = work.y.zeros = zeros;
  parallel_jobs(jobs, [&](std::int64_t job, std::int64_t worker) {
    const std::int64_t term = job / shares, from = term * tiles / terms, last = (term + 1) * tiles / terms;
    const std::int64_t begin = job % shares * own, end = std::min(begin + own, g.o);
    for (std::int64_t first = from; first < last; first += work.block) {
      work.add_block(first, std::min(work.block, last - first), begin, end, first != from, rooms + worker * room,
                     sums + term * work.all());
    }
  });
  std::atomic<bool> finite{true};
  parallel_jobs(workers, [&](std::int64_t w, std::int64_t) {
    if (!work.write_filters(w * g.o / workers, (w + 1) * g.o / workers, sums, terms, rooms + w * room, call.weight)) {
      finite.store(false, std::memory_order_relaxed);
    }
  });
  return finite.load(std::memory_order_relaxed) ? Status::ok : Status::unsupported;
}

}  // namespace halfstep::cpu
