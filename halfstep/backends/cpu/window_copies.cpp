// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/window_copies.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "halfstep/backends/cpu/round_up.h"
#include "halfstep/backends/cpu/shared_padding.h"
#include "halfstep/backends/cpu/split_block.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kWindowChannels = 32, kPlaceBytes = 64;  // of a place in a plane
constexpr std::int64_t kAhead = 512;                            // numbers: places are read one after another, mostly
constexpr std::int64_t kBandBytes = 640 << 10;                  // a band's copies at most, of the second-level cache

}  // namespace

WindowGeometry::WindowGeometry(const ConvCall& call, std::int64_t phase) {
  const ConvGeometry& g = call.geometry;
  n = g.n;
  turned = call.part == ConvPart::input;
  tile_parts = cpu::tile_parts(call.input.dtype, call.precision);
  parts = count_parts(tile_parts);
  h = turned ? g.oh : g.h, w = turned ? g.ow : g.w, c = turned ? g.o : g.c;
  o = turned ? g.c : g.o;
  const std::int64_t window[] = {g.kh, g.kw};
  std::int64_t results[2], taps[2];
  for (int d = 0; d < 2; ++d) {
    const std::int64_t places[] = {turned ? g.h : g.oh, turned ? g.w : g.ow};
    stride[d] = turned ? 1 : g.stride[d];
    dilation[d] = g.dilation[d];
    result_places[d] = places[d];
    result_step[d] = turned ? g.stride[d] : 1;
    result_first[d] = !turned ? 0 : d == 0 ? phase / g.stride[1] : phase % g.stride[1];
    results[d] = divide_up(places[d] - result_first[d], result_step[d]);
    // Tap k of place y is at output q where q * stride - before + k = y. (With a step dilations are 1.)
    const std::int64_t shifted = turned ? result_first[d] + g.before[d] : 0;
    first_tap[d] = shifted % result_step[d];
    taps[d] = divide_up(std::max<std::int64_t>(window[d] - first_tap[d], 0), result_step[d]);
    before[d] = turned ? g.dilation[d] * (taps[d] - 1) - shifted / result_step[d] : g.before[d];
  }
  oh = results[0], ow = results[1], kh = taps[0], kw = taps[1];
}

WindowCopies::WindowCopies(const WindowGeometry& g, std::int64_t height)
    : height(height), bands(divide_up(g.oh, height)) {
  lines = height + (g.kh - 1) * g.dilation[0] / g.stride[0];
  const PaddedLine line = {g.ow, g.w, g.kw, g.stride[1], g.dilation[1], g.before[1]};
  shared = line.shared();
  width = line.seen() - shared;
  first.assign(static_cast<std::size_t>(g.stride[0] * g.stride[1]), -1);
  for (std::int64_t k = 0; k < g.kh; ++k) {
    for (std::int64_t l = 0; l < g.kw; ++l) {
      const TapPlace tap = tap_place(g.stride, k * g.dilation[0], l * g.dilation[1], width);
      std::int64_t& number = first[static_cast<std::size_t>(tap.phase)];
      if (number < 0) number = places, places += lines * width + shared;
      runs.push_back((number + tap.offset) * kTileLanes);
    }
  }
  // An odd number, so that planes don't take each other's sets of the cache.
  places = (places + kWindowRows) | 1;
  band = places * g.c;
  run_steps = g.c / 2;
  steps = static_cast<std::int64_t>(runs.size()) * run_steps;
}

void WindowCopies::set_rows(TileProduct& product) const {
  product.a_row = kTileLanes, product.a_rows = kTileLanes * kTileLanes;
  product.a_steps = plane(), product.a_part = band / 2;
}

std::vector<std::int32_t> WindowCopies::rows_of(const WindowGeometry& g, std::int64_t count) const {
  std::vector<std::int32_t> all(static_cast<std::size_t>(round_up((count - 1) * width + g.ow, kWindowRows)), -1);
  for (std::int64_t p = 0; p < count; ++p) {
    for (std::int64_t q = 0; q < g.ow; ++q) {
      all[static_cast<std::size_t>(p * width + q)] =
          static_cast<std::int32_t>(g.result_place(p, q) - g.result_place(0, 0));
    }
  }
  return all;
}

std::int64_t band_height(const WindowGeometry& g) {
  const std::int64_t whole = 2 * g.parts * WindowCopies(g, g.oh).band;
  return divide_up(g.oh, std::min(g.oh, divide_up(whole, kBandBytes)));
}

template <class Number>
void copy_band(const WindowGeometry& g, const WindowCopies& copies, const typename Number::Element* image,
               std::int64_t line, std::uint32_t* to) {
  using Element = typename Number::Element;
  const std::int64_t plane = copies.plane(), planes = g.parts * g.c / kWindowChannels;
  const auto zeros = [&](std::uint32_t* at, std::int64_t count) {
    for (std::int64_t p = 0; p < planes && count > 0; ++p) {
      for (std::int64_t v = 0; v < count; ++v) std::memset(at + p * plane + v * kTileLanes, 0, kPlaceBytes);
    }
  };
  const auto copy = [&](const Element* from, std::int64_t count, std::int64_t stride, std::uint32_t* at) {
    if constexpr (Number::kParts > 1) {
      for (std::int64_t v = 0; v < count; ++v) {
        split_along<Number>(from + v * stride, g.c, {at + v * kTileLanes, copies.band / 2}, plane, kAhead);
      }
    } else {
      for (std::int64_t p = 0; p < planes; ++p, from += kWindowChannels, at += plane) {
        for (std::int64_t v = 0; v < count; ++v) std::memcpy(at + v * kTileLanes, from + v * stride, kPlaceBytes);
      }
    }
  };
  for (std::int64_t phase = 0; phase < g.stride[0] * g.stride[1]; ++phase) {
    if (copies.first[static_cast<std::size_t>(phase)] < 0) continue;
    std::uint32_t* at = to + copies.first[static_cast<std::size_t>(phase)] * kTileLanes;
    // Place (u, v) of the copy is (u * stride + i, v * stride + j) of the image.
    const std::int64_t i = line * g.stride[0] + phase / g.stride[1] - g.before[0],
                       j = phase % g.stride[1] - g.before[1];
    // Those of a line that are inside.
    const std::int64_t begin = std::min(divide_up(std::max<std::int64_t>(-j, 0), g.stride[1]), copies.width),
                       behind = g.w > j ? divide_up(g.w - j, g.stride[1]) : 0,
                       end = std::clamp(behind, begin, copies.width);
    for (std::int64_t u = 0; u < copies.lines; ++u, at += copies.width * kTileLanes) {
      const std::int64_t y = u * g.stride[0] + i;
      if (y < 0 || y >= g.h) {
        zeros(at, copies.width);
        continue;
      }
      zeros(at, begin);
      copy(image + (y * g.w + j + begin * g.stride[1]) * g.c, end - begin, g.stride[1] * g.c, at + begin * kTileLanes);
      zeros(at + end * kTileLanes, copies.width - end);
    }
    zeros(at, copies.shared);
  }
}

template void copy_band<WholeBFloat>(const WindowGeometry&, const WindowCopies&, const std::uint16_t*, std::int64_t,
                                     std::uint32_t*);
template void copy_band<SplitHalf>(const WindowGeometry&, const WindowCopies&, const Half*, std::int64_t,
                                   std::uint32_t*);
template void copy_band<SplitFloatInTwo>(const WindowGeometry&, const WindowCopies&, const float*, std::int64_t,
                                         std::uint32_t*);
template void copy_band<SplitFloat>(const WindowGeometry&, const WindowCopies&, const float*, std::int64_t,
                                    std::uint32_t*);

}  // namespace halfstep::cpu
