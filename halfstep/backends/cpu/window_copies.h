// SPDX-License-Identifier: Apache-2.0
// The copies of images that convolve_windows() multiplies (conv_windows.h): which places they hold, and in what order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "halfstep/backends/cpu/amx_tile.h"
#include "halfstep/backends/cpu/conv.h"

namespace halfstep::cpu {

/// Rows and columns of a block of sums.
inline constexpr std::int64_t kWindowRows = 2 * kTileLanes, kWindowPanel = 2 * kTileLanes;

/// A convolution whose output, or input gradient, is computed from images [n, h, w, c] as images [n, oh, ow, o].
///
/// The input gradient of a convolution with strides is several of these, one for each phase: the places with the same
/// remainders by the strides. Those of a phase see the output's gradient without strides, through the taps that reach
/// them.
struct WindowGeometry {
  std::int64_t n, h, w, c, oh, ow, o, kh, kw;
  std::int64_t stride[2], dilation[2], before[2];
  bool turned;  ///< an input gradient: taps are in reverse order, and the sum is over filters
  TileParts tile_parts;
  std::int64_t parts;  ///< count_parts(tile_parts)
  /// Lines and columns of the tensor that the results are part of, and which of them they are.
  std::int64_t result_places[2], result_first[2], result_step[2];
  std::int64_t first_tap[2];  ///< the first of the weight's taps; the next are result_step apart

  explicit WindowGeometry(const ConvCall& call, std::int64_t phase = 0);
  static std::int64_t phases(const ConvCall& call) {
    return call.part == ConvPart::input ? call.geometry.stride[0] * call.geometry.stride[1] : 1;
  }
  /// The weight's line (d = 0) or column of taps that tap k of the windows is.
  std::int64_t tap(int d, std::int64_t k) const {
    return turned ? first_tap[d] + ((d == 0 ? kh : kw) - 1 - k) * result_step[d] : k;
  }
  /// The number of a result's place in an image of the tensor.
  std::int64_t result_place(std::int64_t line, std::int64_t column) const {
    return (result_first[0] + line * result_step[0]) * result_places[1] + result_first[1] + column * result_step[1];
  }
  const TensorView& from(const ConvCall& call) const { return turned ? call.output : call.input; }
  bool split() const { return parts > 1; }
};

/// The order of places in a copy of a band, that is, of what `height` lines of the result see of an image.
///
/// Places with the same remainders by the strides follow each other, `lines` lines of `width` places. The zeros behind
/// a line are those before the next one; `shared` more follow the last line. Behind all places there is room that the
/// last block of rows reads.
///
/// Each 32 channels have a plane of all places, 64 bytes each, so that 16 consecutive places are a tile. Elements of
/// several parts have planes for each part.
struct WindowCopies {
  std::int64_t height, bands;
  std::int64_t lines, width, shared;
  std::vector<std::int64_t> first;  ///< [stride * stride] number of the first place of a remainder; below 0: not seen
  std::int64_t places = 0;          ///< of a plane
  std::int64_t band;                ///< elements of all planes of a part
  std::vector<std::int64_t> runs;   ///< of each tap: where its place is in a plane, in pairs of channels
  std::int64_t run_steps, steps;    ///< pairs of channels of a tap, and of all taps

  WindowCopies(const WindowGeometry& g, std::int64_t height);
  /// Pairs from a plane to the next.
  std::int64_t plane() const { return places * kTileLanes; }
  /// Sets how the product's rows lie.
  void set_rows(TileProduct& product) const;
  /// Whether some tap sees each remainder.
  bool sees_all() const {
    return std::ranges::all_of(first, [](std::int64_t at) { return at >= 0; });
  }
  /// For TileResults::rows, of a band of `count` lines: how many places behind the band's first result each row's
  /// result goes; -1 for rows of padding.
  std::vector<std::int32_t> rows_of(const WindowGeometry& g, std::int64_t count) const;
};

/// Lines of the result in a band: images that don't fit the cache are cut.
std::int64_t band_height(const WindowGeometry& g);

/// Copies what the band that begins at line `line` of the result sees of an image to `to`, WindowCopies::band elements
/// a part. Number: the SplitNumber of these parts.
template <class Number>
void copy_band(const WindowGeometry& g, const WindowCopies& copies, const typename Number::Element* image,
               std::int64_t line, std::uint32_t* to);

}  // namespace halfstep::cpu
