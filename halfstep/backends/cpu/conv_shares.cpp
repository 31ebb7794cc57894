// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/conv_shares.h"

#include <algorithm>

namespace halfstep::cpu {
namespace {

// Multiply-adds that are worth a thread: about 10 microseconds of float32 on AVX-512.
constexpr double kConvSharesWorkPerThread = 500'000;
// How much longer the longest share may be than the mean one before images are cut into bands of rows.
constexpr double kUneven = 1.15;
// Rows of a band at least: a band reads the rows next to it again.
constexpr std::int64_t kFewestRows = 2;

double work(const ConvGeometry& g) {
  return static_cast<double>(g.n * g.oh) * static_cast<double>(g.ow * g.o) * static_cast<double>(g.c / g.groups) *
         static_cast<double>(g.kh * g.kw);
}

std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

/// Rows [begin, end) of the output (of the input, when that is computed) of one image; false where nothing of the other
/// tensor is seen from there.
bool band(ConvPart part, const ConvGeometry& g, std::int64_t image, std::int64_t begin, std::int64_t end,
          ConvPiece& piece) {
  const std::int64_t s = g.stride[0], extent = g.dilation[0] * (g.kh - 1) + 1;
  piece = {g, image, 0, 0};
  ConvGeometry& one = piece.geometry;
  one.n = 1;
  if (part != ConvPart::input) {
    const std::int64_t low = begin * s - g.before[0], high = (end - 1) * s - g.before[0] + extent;
    piece.output_row = begin;
    piece.input_row = std::max<std::int64_t>(low, 0);
    one.oh = end - begin;
    one.h = std::min(high, g.h) - piece.input_row;
    one.before[0] = piece.input_row - low;
    one.after[0] = std::max<std::int64_t>(high - g.h, 0);
    return one.h > 0;
  }
  // Output rows p whose windows p * s - before ... + extent meet the band.
  const std::int64_t low = std::max<std::int64_t>(floor_div(begin + g.before[0] - extent, s) + 1, 0),
                     high = std::min(floor_div(end - 1 + g.before[0], s) + 1, g.oh);
  piece.input_row = begin;
  piece.output_row = low;
  one.h = end - begin;
  one.oh = high - low;
  one.before[0] = begin + g.before[0] - low * s;
  one.after[0] = (one.oh - 1) * s + extent - one.h - one.before[0];
  return one.oh > 0 && one.before[0] >= 0;
}

double unevenness(std::int64_t units, std::int64_t shares) {
  return static_cast<double>((units + shares - 1) / shares * shares) / static_cast<double>(units);
}

}  // namespace

ConvShares conv_shares(ConvPart part, const ConvGeometry& g, int threads, std::int64_t most_images) {
  const std::int64_t most =
      std::clamp<std::int64_t>(static_cast<std::int64_t>(work(g) / kConvSharesWorkPerThread), 1, threads);
  ConvShares result;
  if (unevenness(g.n, most) > kUneven) {
    const std::int64_t rows = part == ConvPart::input ? g.h : g.oh;
    for (std::int64_t bands = 2; bands <= std::min(4 * most, rows / kFewestRows); ++bands) {
      if (unevenness(g.n * bands, most) > kUneven || (rows < 16 * bands && rows % bands != 0)) continue;
      std::vector<ConvPiece> pieces;
      for (std::int64_t i = 0; i < g.n * bands; ++i) {
        const std::int64_t b = i % bands;
        ConvPiece piece;
        if (!band(part, g, i / bands, rows * b / bands, rows * (b + 1) / bands, piece)) break;
        pieces.push_back(piece);
      }
      if (static_cast<std::int64_t>(pieces.size()) < g.n * bands) break;
      result.bands = true;
      for (std::int64_t t = 0; t < most; ++t) {
        const std::int64_t from = t * g.n * bands / most, to = (t + 1) * g.n * bands / most;
        result.shares.emplace_back(pieces.begin() + from, pieces.begin() + to);
      }
      return result;
    }
  }
  const std::int64_t shares = std::min(most, g.n);
  for (std::int64_t t = 0; t < shares; ++t) {
    const std::int64_t from = t * g.n / shares, to = (t + 1) * g.n / shares;
    const std::int64_t blocks = (to - from + most_images - 1) / most_images;
    auto& share = result.shares.emplace_back();
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::int64_t first = from + (to - from) * b / blocks, last = from + (to - from) * (b + 1) / blocks;
      ConvPiece& piece = share.emplace_back(ConvPiece{g, first, 0, 0});
      piece.geometry.n = last - first;
    }
  }
  return result;
}

}  // namespace halfstep::cpu
