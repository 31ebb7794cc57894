// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/conv_shares.h"

#include <algorithm>
#include <bit>

#include "halfstep/backends/cpu/round_up.h"

namespace halfstep::cpu {
namespace {

// Multiply-adds that are worth a thread: about 10 microseconds of float32 on AVX-512.
constexpr double kConvSharesWorkPerThread = 500'000;
// Shares for each thread where threads steal them, and their multiply-adds at least.
constexpr std::int64_t kSharesPerThread = 4;
constexpr double kStolenShareWork = 2e7;
// How much longer the longest share may be than the mean one before images are cut into bands of rows.
constexpr double kUneven = 1.15;
// Rows of a band at least: a band reads the rows next to it again.
constexpr std::int64_t kFewestRows = 2;
// Places of a term of a weight's gradient, and terms.
constexpr std::int64_t kFewestPlaces = 1024, kMostTerms = 16;

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

std::int64_t stolen_shares(const ConvGeometry& g, std::int64_t threads) noexcept {
  for (std::int64_t each = threads > 1 ? kSharesPerThread : 1; each > 1; --each) {
    const std::int64_t shares = threads * each;
    if (g.n % shares == 0 && work(g) >= kStolenShareWork * static_cast<double>(shares)) return shares;
  }
  return threads;
}

std::int64_t weight_terms(std::int64_t places) noexcept {
  const std::int64_t terms = std::clamp<std::int64_t>(places / kFewestPlaces, 1, kMostTerms);
  return static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(terms)));
}

ConvShares conv_shares(ConvPart part, const ConvGeometry& g, std::int64_t shares, std::int64_t most_images,
                       bool bands) {
  const std::int64_t most =
      std::clamp<std::int64_t>(static_cast<std::int64_t>(work(g) / kConvSharesWorkPerThread), 1, shares);
  ConvShares result;
  if (bands && unevenness(g.n, most) > kUneven) {
    const std::int64_t rows = part == ConvPart::input ? g.h : g.oh;
    // Bands are of whole lines.
    const std::int64_t line = part == ConvPart::input ? g.stride[0] : 1, lines = divide_up(rows, line);
    for (std::int64_t each = 2; each <= std::min(4 * most, lines / divide_up(kFewestRows, line)); ++each) {
      if (unevenness(g.n * each, most) > kUneven || (lines < 16 * each && lines % each != 0)) continue;
      const auto edge = [&](std::int64_t b) { return std::min(lines * b / each * line, rows); };
      std::vector<ConvPiece> pieces;
      for (std::int64_t i = 0; i < g.n * each; ++i) {
        const std::int64_t b = i % each;
        ConvPiece piece;
        if (!band(part, g, i / each, edge(b), edge(b + 1), piece)) break;
        pieces.push_back(piece);
      }
      const auto count = static_cast<std::int64_t>(pieces.size());
      if (count < g.n * each) break;
      result.bands = true;
      const std::int64_t all = std::min(most, count);
      for (std::int64_t t = 0; t < all; ++t) {
        result.shares.emplace_back(pieces.begin() + t * count / all, pieces.begin() + (t + 1) * count / all);
      }
      return result;
    }
  }
  const std::int64_t all = std::min(most, g.n);
  for (std::int64_t t = 0; t < all; ++t) {
    const std::int64_t from = t * g.n / all, to = (t + 1) * g.n / all;
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
