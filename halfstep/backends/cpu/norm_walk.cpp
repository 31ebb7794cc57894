// SPDX-License-Identifier: Apache-2.0
// The geometry of a walk: once an op, so compiled once and not in every kernel that walks.
#include "halfstep/backends/cpu/norm_walk.h"

#include <numeric>

namespace halfstep::cpu {

DimGroup places_like(const TensorView& v, const TensorView& like) {
  int order[kMaxDims], n = 0;
  for (int i = 0; i < like.ndim; ++i) {
    if (i == 1) continue;
    // Behind all that are not closer together.
    int at = n++;
    for (; at > 0 && like.strides[order[at - 1]] < like.strides[i]; --at) order[at] = order[at - 1];
    order[at] = i;
  }
  DimGroup places;
  for (int i = n - 1; i >= 0; --i) places.push_outer(v.sizes[order[i]], v.strides[order[i]]);
  return places;
}

ChannelWalk::ChannelWalk(const TensorView& like, std::int64_t lanes) {
  const DimGroup group = places_like(like, like);
  channels = like.sizes[1];
  places = group.numel;
  rows = channels > 1 && like.strides[1] == 1 && (places <= 1 || group.inner_stride() != 1);
  run = std::max<std::int64_t>(1, group.inner_size());
  if (rows) {
    width = std::min(channels, kStrip);
    const std::int64_t step = lanes / std::gcd(channels, lanes);
    std::int64_t n = step;
    while (n * channels < 256) n += step;
    if (n * channels <= kStrip) together = written = n;
    while (written * channels * 2 <= kStrip && written * channels < 1024) written *= 2;
  }
  // At most 32 pieces, of 32,768 elements and 64 strips at least. Each is a term of the sums, so its size decides bits.
  constexpr std::int64_t kFewestElements = 32768;
  const std::int64_t least = rows ? std::max(64 * together, kFewestElements / channels) : kFewestElements;
  chunk = std::max({(places + 31) / 32, std::min(least, places), std::int64_t{1}});
  chunk = (chunk + together - 1) / together * together;
  chunks = (places + chunk - 1) / chunk;
}

StripPlaces::StripPlaces(const TensorView& v, const TensorView& like, const ChannelWalk& walk)
    : present(v.defined && v.numel > 0) {
  if (!present) return;
  places = places_like(v, like);
  channel_stride = v.strides[1];
  if (walk.rows) {
    together = channel_stride == 1 && (places.n == 0 || (places.n == 1 && places.strides[0] == walk.channels));
  } else {
    together = places.n == 0 || (places.inner_stride() == 1 && places.inner_size() % walk.run == 0);
  }
}

}  // namespace halfstep::cpu
