// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/elementwise.h"

#include <cstring>

#include "halfstep/backends/cpu/move.h"
#include "halfstep/backends/cpu/strided_loop.h"

namespace halfstep::cpu {
namespace {

// Elements of a block on the stack: with four inputs and an output of eight bytes, 20 KB, which stay in the first
// cache.
constexpr std::int64_t kElementwiseBlock = 512;

// Some rows of a few elements each. In memory elements are `across` apart and rows `down`.
struct ShortRuns {
  std::int64_t width, rows;
};
// Along the columns, which are longer than the runs.
void gather(std::size_t size, void* to, const void* from, std::int64_t across, std::int64_t down, ShortRuns r) {
  visit_bytes(size, [&]<class U>(std::type_identity<U>) {
    for (std::int64_t k = 0; k < r.width; ++k) {
      auto* t = static_cast<U*>(to) + k;
      const auto* f = static_cast<const U*>(from) + k * across;
      for (std::int64_t i = 0; i < r.rows; ++i) t[i * r.width] = f[i * down];
    }
  });
}
void scatter(std::size_t size, void* to, std::int64_t across, std::int64_t down, const void* from, ShortRuns r) {
  visit_bytes(size, [&]<class U>(std::type_identity<U>) {
    for (std::int64_t k = 0; k < r.width; ++k) {
      auto* t = static_cast<U*>(to) + k * across;
      const auto* f = static_cast<const U*>(from) + k;
      for (std::int64_t i = 0; i < r.rows; ++i) t[i * down] = f[i * r.width];
    }
  });
}
// A single run, as rows of one element.
void gather(std::size_t size, void* to, const void* from, std::int64_t step, std::int64_t n) {
  gather(size, to, from, 0, step, {1, n});
}
void scatter(std::size_t size, void* to, std::int64_t step, const void* from, std::int64_t n) {
  scatter(size, to, 0, step, from, {1, n});
}

// One run of any strides: what is not contiguous goes through blocks.
template <int N>
void run_through_blocks(const Runs& runs, const void* state, char* const* base, const std::size_t* size,
                        const std::int64_t* step, std::int64_t n) {
  alignas(64) char blocks[N + 1][kElementwiseBlock * 8];
  for (int k = 1; k <= N; ++k) {
    if (step[k] == 0) gather(size[k], blocks[k], base[k], 0, std::min(n, kElementwiseBlock));
  }
  for (std::int64_t at = 0; at < n; at += kElementwiseBlock) {
    const std::int64_t m = std::min(n - at, kElementwiseBlock);
    const void* in[N + 1] = {};
    for (int k = 1; k <= N; ++k) {
      const char* from = base[k] + at * step[k] * static_cast<std::int64_t>(size[k]);
      if (step[k] != 1 && step[k] != 0) gather(size[k], blocks[k], from, step[k], m);
      in[k - 1] = step[k] == 1 ? from : blocks[k];
    }
    char* to = base[0] + at * step[0] * static_cast<std::int64_t>(size[0]);
    if (step[0] == 1) {
      runs.straight(state, to, in, m);
    } else {
      runs.straight(state, blocks[0], in, m);
      scatter(size[0], to, step[0], blocks[0], m);
    }
  }
}

// Whether runs along dimension 0 are so short that a block should have many of them.
template <int N>
bool has_short_runs(const StridedLoop<N>& loop) {
  constexpr std::int64_t kShort = 32, kWorth = 128;
  return loop.ndim >= 2 && loop.sizes[0] <= kShort && loop.sizes[0] * loop.sizes[1] >= kWorth;
}
// Such runs, block by block: operands whose runs don't lie behind each other go through blocks of memory.
template <int N>
void run_short_runs(const Runs& runs, const void* state, const StridedLoop<N + 1>& loop, char* const* data,
                    const std::size_t* size) {
  const std::int64_t width = loop.sizes[0], together = kElementwiseBlock / width;
  const std::int64_t grain = std::max<std::int64_t>(1, runs.grain / (width * std::min(together, loop.sizes[1])));
  const auto behind = [&](int k) { return loop.strides[k][0] == 1 && loop.strides[k][1] == width; };
  parallel_for(loop.pieces(together), grain, [&](std::int64_t begin, std::int64_t end) {
    alignas(64) char blocks[N + 1][kElementwiseBlock * 8];
    // What a block has, where that is the same for all rows.
    const char* held[N + 1] = {};
    std::int64_t held_rows[N + 1] = {};
    loop.for_pieces(begin, end, together, [&](const std::int64_t* at, std::int64_t rows) {
      const void* in[N + 1] = {};
      const auto base = [&](int k) { return data[k] + at[k] * static_cast<std::int64_t>(size[k]); };
      for (int k = 1; k <= N; ++k) {
        const char* const from = base(k);
        in[k - 1] = behind(k) ? from : blocks[k];
        if (behind(k) || (held[k] == from && loop.strides[k][1] == 0 && held_rows[k] >= rows)) continue;
        gather(size[k], blocks[k], from, loop.strides[k][0], loop.strides[k][1], {width, rows});
        held[k] = from;
        held_rows[k] = rows;
      }
      runs.straight(state, behind(0) ? base(0) : blocks[0], in, width * rows);
      if (!behind(0)) scatter(size[0], base(0), loop.strides[0][0], loop.strides[0][1], blocks[0], {width, rows});
    });
  });
}

template <int N>
Status run(const Runs& runs, const void* state, const TensorView* in, TensorView* out) {
  std::size_t size[N + 1] = {};
  char* data[N + 1] = {};
  std::array<const TensorView*, N + 1> views = {};
  views[0] = out;
  bool straight = out->contiguous;
  for (int k = 0; k < N; ++k) {
    views[k + 1] = &in[k];
    straight = straight && in[k].contiguous && in[k].numel == out->numel;
  }
  for (int k = 0; k <= N; ++k) {
    size[k] = item_size(views[k]->dtype);
    data[k] = static_cast<char*>(views[k]->data);
  }
  if (straight) {
    if (out->numel == 0) return Status::ok;
    const void* inputs[N + 1] = {};
    if (out->numel < 2 * runs.grain) {
      for (int k = 0; k < N; ++k) inputs[k] = data[k + 1];
      runs.straight(state, data[0], inputs, out->numel);
      return Status::ok;
    }
    parallel_for(out->numel, runs.grain, [&](std::int64_t begin, std::int64_t end) {
      const void* from[N + 1] = {};
      for (int k = 0; k < N; ++k) from[k] = data[k + 1] + begin * static_cast<std::int64_t>(size[k + 1]);
      runs.straight(state, data[0] + begin * static_cast<std::int64_t>(size[0]), from, end - begin);
    });
    return Status::ok;
  }
  const StridedLoop<N + 1> loop(views);
  if (has_short_runs(loop)) {
    run_short_runs<N>(runs, state, loop, data, size);
    return Status::ok;
  }
  loop.for_each_run(runs.grain, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* step) {
    char* base[N + 1] = {};
    const void* from[N + 1] = {};
    int odd = step[0] != 1;  // operands that are not contiguous
    int which = 0;
    for (int k = 0; k <= N; ++k) {
      base[k] = data[k] + at[k] * static_cast<std::int64_t>(size[k]);
      if (k > 0) {
        from[k - 1] = base[k];
        if (step[k] != 1) {
          ++odd;
          which = k;
        }
      }
    }
    if (odd == 0) {
      runs.straight(state, base[0], from, n);
    } else if (odd == 1 && (which == 1 || which == 2) && step[which] == 0 && runs.repeated[which - 1]) {
      runs.repeated[which - 1](state, base[0], from, n);
    } else {
      run_through_blocks<N>(runs, state, base, size, step, n);
    }
  });
  return Status::ok;
}

}  // namespace

Status run_elementwise(const Runs& runs, const void* state, const TensorView* in, int n_in, TensorView* out) {
  switch (n_in) {
    case 0:
      return run<0>(runs, state, in, out);
    case 1:
      return run<1>(runs, state, in, out);
    case 2:
      return run<2>(runs, state, in, out);
    case 3:
      return run<3>(runs, state, in, out);
    case 4:
      return run<4>(runs, state, in, out);
    default:
      return Status::unsupported;
  }
}

}  // namespace halfstep::cpu
