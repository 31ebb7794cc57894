// SPDX-License-Identifier: Apache-2.0
// How normalisation divides its tensors among blocks: plain arithmetic, which tests check on the host.
#pragma once

#include "device/geometry.h"

namespace hscuda {

/// Whether two tensors of one shape have every element at the same place.
inline bool lie_alike(const halfstep_tensor& a, const halfstep_tensor& b) {
  for (int d = 0; d < a.ndim; ++d) {
    if (a.sizes[d] != 1 && a.strides[d] != b.strides[d]) return false;
  }
  return true;
}

/// How a tensor [N, C, ...] lies.
struct ChannelLayout {
  enum Kind {
    kRows,    ///< the channels of a place side by side, place behind place (channels-last, or [N, C])
    kPlanes,  ///< `run` places of a channel side by side, channel behind channel, sample behind sample (row-major)
    kOther
  };
  Kind kind = kOther;
  int64_t channels = 0, places = 0, run = 1;
};

inline ChannelLayout channel_layout(const halfstep_tensor& t) {
  ChannelLayout result;
  result.channels = t.sizes[1];
  result.places = result.channels == 0 ? 0 : t.numel / result.channels;
  if (t.numel == 0) return result;
  int order[HALFSTEP_MAX_DIMS], n = 0;
  for (int d = t.ndim - 1; d >= 0; --d) {
    if (t.sizes[d] != 1) order[n++] = d;
  }
  // Dense, in the order of the last `n` dimensions given?
  const auto dense = [&] {
    int64_t expected = 1;
    for (int i = 0; i < n; ++i) {
      if (t.strides[order[i]] != expected) return false;
      expected *= t.sizes[order[i]];
    }
    return true;
  };
  if (dense()) {
    result.kind = ChannelLayout::kPlanes;
    for (int d = 2; d < t.ndim; ++d) result.run *= t.sizes[d];
    if (result.channels == 1) result.run = t.numel;
    if (result.run > 1 || result.channels == 1) return result;
    result.kind = ChannelLayout::kRows;
    return result;
  }
  std::stable_sort(order, order + n, [&](int a, int b) { return t.strides[a] < t.strides[b]; });
  if (n > 0 && order[0] == 1 && dense()) result.kind = ChannelLayout::kRows;
  return result;
}

/// A table of rows of `channels` elements, divided among blocks of kThreads threads: `across` of them side by side,
/// each with the same `width` channels of row after row, `down` rows at a time. Block (k, t) has rows [k chunk, (k + 1)
/// chunk) and the t-th tile of channels.
struct RowsPlan {
  int64_t rows = 0, packs = 0;  ///< packs: accesses of a row, of `width` elements each
  int width = 1, across = 1, down = kThreads, across_bits = 0;
  int64_t chunk = 0;
  unsigned chunks = 0, tiles = 0;
};
/// `blocks`: how many there should be, unless a thread then has less than `least` rows.
inline RowsPlan rows_plan(int64_t rows, int64_t channels, int width, int64_t blocks, int least) {
  RowsPlan p;
  p.rows = rows;
  p.width = width;
  p.packs = channels / width;
  p.across_bits = 5;
  // Less than 128 bytes of a row at once would leave parts of what is fetched unused, idle threads cost as well.
  while (p.across_bits > 3 && p.packs % (1 << p.across_bits) != 0) --p.across_bits;
  while (p.across_bits > 0 && (1 << (p.across_bits - 1)) >= p.packs) --p.across_bits;
  p.across = 1 << p.across_bits;
  p.down = kThreads / p.across;
  p.tiles = static_cast<unsigned>(divide_up(p.packs, p.across));
  const int64_t wanted = std::max<int64_t>(1, blocks / p.tiles);
  p.chunk = std::max(divide_up(rows, wanted), int64_t{p.down} * least);
  p.chunk = divide_up(p.chunk, p.down) * p.down;
  p.chunks = static_cast<unsigned>(divide_up(rows, p.chunk));
  return p;
}

/// Planes of `run` elements, channel behind channel, sample behind sample: each channel's units (accesses of `width`
/// elements of one run) are divided among `chunks` blocks.
struct PlanesPlan {
  int64_t channels = 0, run = 0, units = 0, chunk = 0;
  int width = 1;
  unsigned chunks = 0;
  Divisor per_run;  ///< units of a run
  unsigned blocks() const { return static_cast<unsigned>(channels * chunks); }
};
/// `places`: of a channel, in all. Units fit 31 bits.
inline PlanesPlan planes_plan(int64_t places, int64_t channels, int64_t run, int width, int64_t blocks, int least) {
  PlanesPlan p;
  p.channels = channels;
  p.run = run;
  p.width = width;
  p.units = places / width;
  p.per_run = Divisor(static_cast<uint32_t>(run / width));
  const int64_t wanted = std::max<int64_t>(1, blocks / channels);
  p.chunk = std::max(divide_up(p.units, wanted), int64_t{kThreads} * least);
  p.chunks = static_cast<unsigned>(divide_up(p.units, p.chunk));
  return p;
}

/// Rows of `length` elements with statistics of their own, whose elements lie in the registers of the threads that
/// share a row: `packs` accesses of a row, `each` of them to a thread.
struct NormRowsPlan {
  bool fits = false;
  bool block = false;  ///< a block a row; else a warp a row
  int each = 0;        ///< 1, 2, 4 or 8
};
/// `most`: elements that a thread may hold.
inline NormRowsPlan norm_rows_plan(int64_t length, int width, int most) {
  NormRowsPlan p;
  if (length % width != 0 || length == 0) return p;
  const int64_t packs = length / width;
  for (const int threads : {32, kThreads}) {
    for (int each = 1; each <= 8 && each * width <= most; each *= 2) {
      if (packs <= int64_t{threads} * each) return {.fits = true, .block = threads != 32, .each = each};
    }
  }
  return p;
}

}  // namespace hscuda
