// SPDX-License-Identifier: Apache-2.0
// Which places of a source the places of a result are made of, one dimension at a time: windows of pooling, neighbours
// of resampling, and the reverse of both. Kernels gather by these tables, so that no two threads write to one place and
// sums have one order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "halfstep/ops/attributes.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep::cpu {

struct Tap {
  std::int64_t at;      ///< the place in the source
  std::int64_t number;  ///< of the tap in its window, places outside of the source counted
  double weight;
};

/// Those of place i are taps[first[i]] to taps[first[i + 1]], in the order of the windows' elements, or of windows.
struct Taps {
  std::int64_t size = 0;  ///< places of the result
  std::int64_t* first = nullptr;
  Tap* taps = nullptr;
  const Tap* begin(std::int64_t i) const { return taps + first[i]; }
  const Tap* end(std::int64_t i) const { return taps + first[i + 1]; }
};

/// Memory for a table of `size` places and at most `count` taps; false where there is none left.
inline bool allocate_taps(KernelContext* context, std::int64_t size, std::int64_t count, Taps& to) {
  const std::size_t head = static_cast<std::size_t>(size + 1) * sizeof(std::int64_t);
  auto* memory =
      static_cast<char*>(context->workspace(context, head + static_cast<std::size_t>(count + 1) * sizeof(Tap)));
  if (!memory) return false;
  to.size = size;
  to.first = reinterpret_cast<std::int64_t*>(memory);
  to.taps = reinterpret_cast<Tap*>(memory + head);
  to.first[0] = 0;
  return true;
}

/// Windows of pooling along dimension d (0 height, 1 width).
inline bool window_taps(KernelContext* context, const PoolAttributes& a, int d, std::int64_t size, std::int64_t windows,
                        Taps& to) {
  if (!allocate_taps(context, windows, windows * std::min(a.kernel[d], size), to)) return false;
  std::int64_t n = 0;
  for (std::int64_t i = 0; i < windows; ++i) {
    const std::int64_t begin = i * a.stride[d] - a.padding[d];
    std::int64_t k = begin < 0 ? (-begin + a.dilation[d] - 1) / a.dilation[d] : 0;
    for (; k < a.kernel[d] && begin + k * a.dilation[d] < size; ++k) to.taps[n++] = {begin + k * a.dilation[d], k, 1};
    to.first[i + 1] = n;
  }
  return true;
}
/// Windows of adaptive pooling.
inline bool adaptive_taps(KernelContext* context, std::int64_t size, std::int64_t windows, Taps& to) {
  if (!allocate_taps(context, windows, windows * (size / windows + 2), to)) return false;
  std::int64_t n = 0;
  for (std::int64_t i = 0; i < windows; ++i) {
    const std::int64_t begin = i * size / windows, end = ((i + 1) * size + windows - 1) / windows;
    for (std::int64_t at = begin; at < end; ++at) to.taps[n++] = {at, at - begin, 1};
    to.first[i + 1] = n;
  }
  return true;
}

/// The reverse: for each of `size` places of the source the places of the result that it goes into, whose numbers and
/// weights stay.
inline bool reversed_taps(KernelContext* context, const Taps& from, std::int64_t size, Taps& to) {
  const std::int64_t count = from.first[from.size];
  if (!allocate_taps(context, size, count, to)) return false;
  std::fill_n(to.first, size + 1, std::int64_t{0});
  for (std::int64_t k = 0; k < count; ++k) ++to.first[from.taps[k].at + 1];
  for (std::int64_t i = 0; i < size; ++i) to.first[i + 1] += to.first[i];
  for (std::int64_t i = 0; i < from.size; ++i) {
    // first[i] moves on as its places fill, and back below.
    for (const Tap* t = from.begin(i); t != from.end(i); ++t) to.taps[to.first[t->at]++] = {i, t->number, t->weight};
  }
  for (std::int64_t i = size; i > 0; --i) to.first[i] = to.first[i - 1];
  to.first[0] = 0;
  return true;
}

/// The most taps that a place has.
inline std::int64_t most_taps(const Taps& taps) {
  std::int64_t most = 0;
  for (std::int64_t i = 0; i < taps.size; ++i) most = std::max(most, taps.first[i + 1] - taps.first[i]);
  return most;
}

}  // namespace halfstep::cpu
