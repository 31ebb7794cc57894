// SPDX-License-Identifier: Apache-2.0
// How batch and group normalisation walk a tensor [N, C, ...] of any layout: in strips, which lie in one piece in
// memory and have a fixed order of channels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "halfstep/backends/cpu/reduce_plan.h"

namespace halfstep::cpu {

/// Elements of a strip at most.
inline constexpr std::int64_t kStrip = 2048;
/// The same where a strip of one channel is summed: as many sums run side by side.
inline constexpr std::int64_t kSumStrip = 128;

/// The dimensions of `v` but the channels', in the order in which those of `like` lie in memory.
DimGroup places_like(const TensorView& v, const TensorView& like);

/// `count` places from `place` on of `width` channels from `channel` on, places outside. One of both is 1, or the width
/// is that of all channels.
struct Strip {
  std::int64_t place, count, channel, width;
  std::int64_t numel() const { return count * width; }
};

/// The walk over all places of a tensor. With `rows` channels lie next to each other (channels-last and [N, C]) and a
/// strip has some of one place, or all of several places, so that short rows fill vectors too and what a strip costs by
/// itself is little. Otherwise a strip has places of one channel. Depends on the tensor's geometry only.
struct ChannelWalk {
  bool rows;
  std::int64_t channels, places;
  std::int64_t together = 1;   ///< rows: places in a strip that is summed
  std::int64_t written = 1;    ///< rows: places in a strip that is written, a multiple of those
  std::int64_t width = 1;      ///< channels in a strip
  std::int64_t run = 1;        ///< without rows: how many places lie next to each other
  std::int64_t chunk, chunks;  ///< places that are summed by one thread, and how many such pieces there are

  /// `lanes`: elements of a vector, of which strips are multiples where that can be had.
  ChannelWalk(const TensorView& like, std::int64_t lanes);
  /// How often strips of the same places follow each other to cover all channels.
  std::int64_t blocks() const { return (channels + width - 1) / width; }
  std::int64_t block_width(std::int64_t channel) const { return std::min(width, channels - channel); }
  /// Elements in which a sum of strips is taken: `width` channels, repeated in order.
  std::int64_t sum_width(std::int64_t channel) const { return rows ? together * block_width(channel) : kSumStrip; }

  /// The strip to be summed that starts at `place` and ends before `end`.
  Strip summed_strip(std::int64_t place, std::int64_t end, std::int64_t channel) const {
    return strip(place, end, channel, together, kSumStrip);
  }
  /// How many whole ones follow each other from `place` on before `end`, at least 1, and how many elements lie between
  /// their beginnings.
  std::int64_t summed_in_turn(std::int64_t place, std::int64_t end) const {
    const std::int64_t left = rows ? end - place : std::min(end - place, run - place % run);
    return std::max<std::int64_t>(1, left / (rows ? together : kSumStrip));
  }
  std::int64_t summed_pitch() const { return rows ? together * channels : kSumStrip; }
  /// The same of a strip to be written.
  Strip written_strip(std::int64_t place, std::int64_t end, std::int64_t channel) const {
    return strip(place, end, channel, written, kStrip);
  }

 private:
  Strip strip(std::int64_t place, std::int64_t end, std::int64_t channel, std::int64_t count, std::int64_t most) const {
    if (rows) return {place, std::min(count, end - place), channel, block_width(channel)};
    return {place, std::min({most, run - place % run, end - place}), channel, 1};
  }
};

/// Where the strips of a tensor lie.
struct StripPlaces {
  bool present;           ///< whether there is a tensor with elements
  bool together = false;  ///< whether each strip lies in one piece, as the walk goes
  DimGroup places;
  std::int64_t channel_stride = 0;

  /// `v` may be absent. It has the sizes of `like`, which the walk was made for.
  StripPlaces(const TensorView& v, const TensorView& like, const ChannelWalk& walk);
};

}  // namespace halfstep::cpu
