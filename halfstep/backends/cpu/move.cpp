// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/move.h"

#include <algorithm>

#include "halfstep/backends/cpu/transpose_tile.h"

namespace halfstep::cpu {
namespace {

// Dimension of `loop` along which the source lies in order while the result does so along dimension 0; 0 where there is
// none, or where rows or columns are too short for tiles.
int turned_dimension(const StridedLoop<2>& loop) {
  constexpr std::int64_t kShort = 8;
  if (loop.ndim < 2 || loop.strides[0][0] != 1 || loop.strides[1][0] <= 1 || loop.sizes[0] < kShort) return 0;
  for (int d = 1; d < loop.ndim; ++d) {
    if (loop.strides[1][d] == 1 && loop.sizes[d] >= kShort) return d;
  }
  return 0;
}

template <class U>
void copy_rows(const U* from, std::int64_t from_step, U* to, std::int64_t to_step, std::int64_t rows, std::int64_t n) {
  for (std::int64_t row = 0; row < rows; ++row, from += from_step, to += to_step) copy_tile_row(from, n, to);
}

// Tile by tile: rows of the source are read in order into a block of the first-level cache, and rows of the result
// written in order from there, so that each line of either is touched once. Rows a multiple of a page apart share the
// sets of a cache, where walking along one of the two would lose each line before its next element is used.
template <class U>
void move_turned(const StridedLoop<2>& loop, int turned, U* to, const U* from) {
  constexpr std::int64_t kSide = tile_side(sizeof(U));
  const std::int64_t columns = (loop.sizes[0] + kSide - 1) / kSide, rows = (loop.sizes[turned] + kSide - 1) / kSide;
  std::int64_t tiles = columns * rows;
  for (int d = 1; d < loop.ndim; ++d) tiles *= d == turned ? 1 : loop.sizes[d];
  const std::int64_t step = loop.strides[0][turned], from_step = loop.strides[1][0];
  parallel_for(tiles, std::max<std::int64_t>(1, kGrain / (kSide * kSide)), [&](std::int64_t begin, std::int64_t end) {
    alignas(64) U read[kSide][kSide] = {}, written[kSide][kSide];
    for (std::int64_t tile = begin; tile < end; ++tile) {
      const std::int64_t column = tile % columns * kSide, row = tile / columns % rows * kSide;
      const std::int64_t width = std::min(kSide, loop.sizes[0] - column);
      const std::int64_t height = std::min(kSide, loop.sizes[turned] - row);
      std::int64_t rest = tile / columns / rows;
      U* o = to + column + row * step;
      const U* x = from + column * from_step + row;
      for (int d = 1; d < loop.ndim; ++d) {
        if (d == turned) continue;
        const std::int64_t i = rest % loop.sizes[d];
        rest /= loop.sizes[d];
        o += i * loop.strides[0][d];
        x += i * loop.strides[1][d];
      }
      copy_rows(x, from_step, read[0], kSide, width, height);
      transpose_tile(read[0], written[0]);
      copy_rows(written[0], kSide, o, step, height, width);
    }
  });
}

// Whether runs along dimension 0 are too short to be worth one each, and those along dimension 1 are not.
bool runs_are_short(const StridedLoop<2>& loop) { return loop.ndim >= 2 && loop.sizes[0] < 8 && loop.sizes[1] >= 16; }
// Such runs side by side: element by element of all the runs of a piece, whose lines stay in the first-level cache.
template <class U>
void move_short_runs(const StridedLoop<2>& loop, U* to, const U* from) {
  constexpr std::int64_t kTogether = 512;
  const std::int64_t to_step = loop.strides[0][1], from_step = loop.strides[1][1];
  const std::int64_t elements = loop.sizes[0] * std::min(kTogether, loop.sizes[1]);
  parallel_for(loop.pieces(kTogether), std::max<std::int64_t>(1, kGrain / elements), [&](auto begin, auto end) {
    loop.for_pieces(begin, end, kTogether, [&](const std::int64_t* at, std::int64_t steps) {
      for (std::int64_t k = 0; k < loop.sizes[0]; ++k) {
        U* const o = to + at[0] + k * loop.strides[0][0];
        const U* const x = from + at[1] + k * loop.strides[1][0];
        for (std::int64_t i = 0; i < steps; ++i) o[i * to_step] = x[i * from_step];
      }
    });
  });
}

}  // namespace

void move_elements(const TensorView& to, const TensorView& from) {
  const StridedLoop<2> loop({&to, &from});
  if (loop.numel == 0) return;
  const int turned = turned_dimension(loop);
  visit_bits(to.dtype, [&](auto tag) {
    using U = typename decltype(tag)::type;
    if (turned != 0) return move_turned(loop, turned, static_cast<U*>(to.data), static_cast<const U*>(from.data));
    if (runs_are_short(loop)) return move_short_runs(loop, static_cast<U*>(to.data), static_cast<const U*>(from.data));
    loop.for_each_run(kGrain, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* step) {
      U* o = static_cast<U*>(to.data) + at[0];
      const U* x = static_cast<const U*>(from.data) + at[1];
      if (step[0] == 1 && step[1] == 1) {
        if (o != x) std::memcpy(o, x, static_cast<std::size_t>(n) * sizeof(U));
      } else if (step[0] == 1 && step[1] == -1) {  // flipped: a step that the compiler knows turns vectors around
        for (std::int64_t i = 0; i < n; ++i) o[i] = x[-i];
      } else {
        for (std::int64_t i = 0; i < n; ++i) o[i * step[0]] = x[i * step[1]];
      }
    });
  });
}

}  // namespace halfstep::cpu
