// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/int8_shares.h"

#include <algorithm>

namespace halfstep::cpu {
namespace {

// Multiply-adds that are worth a thread: about 5 microseconds of VNNI.
constexpr double kInt8SharesWorkPerThread = 2e6;
// The same where each weight is used once: reading them is what takes the time.
constexpr double kWeightsPerThread = 5e5;
constexpr std::int64_t kMostChannelParts = 4;
constexpr std::int64_t kChannelBlock = 64;  // of the order of packed weights, at most

double multiply_adds(const ConvGeometry& g) {
  return static_cast<double>(g.n * g.oh) * static_cast<double>(g.ow * g.o) * static_cast<double>(g.c / g.groups) *
         static_cast<double>(g.kh * g.kw);
}

std::vector<std::vector<Int8Piece>> channel_parts(const ConvGeometry& g, int threads) {
  const std::int64_t blocks = (g.o + kChannelBlock - 1) / kChannelBlock;
  const std::int64_t parts =
      std::min({std::clamp<std::int64_t>(static_cast<std::int64_t>(multiply_adds(g) / kWeightsPerThread), 1, threads),
                kMostChannelParts, blocks});
  std::vector<std::vector<Int8Piece>> shares;
  for (std::int64_t p = 0; p < parts; ++p) {
    const std::int64_t first = p * blocks / parts * kChannelBlock,
                       last = std::min(g.o, (p + 1) * blocks / parts * kChannelBlock);
    Int8Piece piece{g, 0, 0, first};
    piece.geometry.o = last - first;
    shares.push_back({piece});
  }
  return shares;
}

bool single_places(const ConvGeometry& g) {
  for (int d = 0; d < 2; ++d) {
    if (g.stride[d] != 1 || g.before[d] != 0 || g.after[d] != 0) return false;
  }
  return g.kh == 1 && g.kw == 1;
}

// Rows [begin, end) of the output of one image; false where they see padding alone.
bool rows_of(const ConvGeometry& g, std::int64_t image, std::int64_t begin, std::int64_t end, Int8Piece& piece) {
  const std::int64_t extent = g.dilation[0] * (g.kh - 1) + 1, low = begin * g.stride[0] - g.before[0],
                     high = (end - 1) * g.stride[0] - g.before[0] + extent;
  const std::int64_t first = std::max<std::int64_t>(low, 0);
  piece = {g, (image * g.h + first) * g.w, (image * g.oh + begin) * g.ow};
  ConvGeometry& one = piece.geometry;
  one.n = 1;
  one.oh = end - begin;
  one.h = std::min(high, g.h) - first;
  one.before[0] = first - low;
  one.after[0] = std::max<std::int64_t>(high - g.h, 0);
  return one.h > 0;
}

}  // namespace

std::vector<std::vector<Int8Piece>> int8_shares(const ConvGeometry& whole, int threads) {
  ConvGeometry g = whole;
  const bool flat = single_places(g);
  if (flat) {
    g.ow = g.w = g.n * g.h * g.w;
    g.n = g.h = g.oh = 1;
  }
  if (flat && g.ow == 1 && g.groups == 1) return channel_parts(g, threads);
  const std::int64_t units = flat ? g.ow : g.n * g.oh;
  const std::int64_t count = std::min(
      units,
      std::clamp<std::int64_t>(static_cast<std::int64_t>(multiply_adds(g) / kInt8SharesWorkPerThread), 1, threads));
  std::vector<std::vector<Int8Piece>> shares(static_cast<std::size_t>(std::max<std::int64_t>(count, 0)));
  for (std::int64_t t = 0; t < count; ++t) {
    auto& share = shares[static_cast<std::size_t>(t)];
    std::int64_t at = t * units / count;
    const std::int64_t end = (t + 1) * units / count;
    if (flat) {
      share.push_back({g, at, at});
      share.back().geometry.w = share.back().geometry.ow = end - at;
      continue;
    }
    while (at < end) {
      const std::int64_t image = at / g.oh, row = at % g.oh, images = (end - at) / g.oh;
      if (row == 0 && images > 0) {
        share.push_back({g, image * g.h * g.w, image * g.oh * g.ow});
        share.back().geometry.n = images;
        at += images * g.oh;
      } else {
        const std::int64_t last = std::min(g.oh, row + end - at);
        Int8Piece piece;
        if (!rows_of(g, image, row, last, piece)) return {};
        share.push_back(piece);
        at += last - row;
      }
    }
  }
  return shares;
}

}  // namespace halfstep::cpu
