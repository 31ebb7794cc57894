// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/conv_weight_plan.h"

#include <algorithm>
#include <limits>

#include "halfstep/backends/cpu/conv_shares.h"
#include "halfstep/backends/cpu/round_up.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

// Multiply-adds in whose time an element is gathered into a panel.
constexpr double kGatherCost = 4;
// Weights whose sums fill a second-level cache, so that two terms would leave it where halves of one don't: threads
// share filters and columns alone.
constexpr std::int64_t kManyWeights = 128 << 10;
// Steps of a sum at a time: a panel of columns (32 lanes of 32 bits a step) and one of filters (16) fit the first-level
// cache together.
constexpr std::int64_t kSteps = 128;

/// Shares filters (in whole lines of the cache: gathering from the middle of lines takes 5 to 10% longer) and columns
/// (in whole panels) where there are fewer terms than threads. Each share of the filters gathers the columns again, and
/// each share of the columns the filters. What is cut out of lines isn't shared by columns.
void share_terms(WeightPlan& p, std::int64_t filters, std::int64_t threads) {
  p.by_filters = p.by_columns = 1, p.share_filters = filters, p.share_columns = p.columns;
  double least = std::numeric_limits<double>::infinity();
  for (std::int64_t f = 1; f <= std::min(threads, divide_up(filters, kFilterPanel)); ++f) {
    const std::int64_t most = p.line > 0 ? 1 : std::min(divide_up(threads, f), divide_up(p.columns, 32));
    for (std::int64_t c = 1; c <= most; ++c) {
      const std::int64_t own_filters = round_up(divide_up(filters, f), kFilterPanel),
                         own_columns = round_up(divide_up(p.columns, c), 32);
      const auto o = static_cast<double>(std::min(own_filters, filters)),
                 w = static_cast<double>(std::min(own_columns, p.columns));
      const auto turns = static_cast<double>(divide_up(p.terms * f * c, threads));
      const double cost = turns * (o * w + kGatherCost * (o + w));
      if (cost >= least) continue;
      least = cost;
      p.share_filters = own_filters, p.share_columns = own_columns;
      p.by_filters = divide_up(filters, own_filters), p.by_columns = divide_up(p.columns, own_columns);
    }
  }
}

}  // namespace

WeightPlan weight_plan(const ConvGeometry& g, std::int64_t together) {
  WeightPlan p = {};
  p.columns = g.kh * g.kw * g.c;
  p.rows = g.n * g.oh;
  p.terms = g.o * p.columns > kManyWeights ? 1 : std::min(weight_terms(p.rows * g.ow), p.rows);
  // Columns in equal blocks of whole panels.
  const std::int64_t blocks = divide_up(p.columns, kMostColumns);
  p.block_columns = round_up(divide_up(p.columns, blocks), 32);
  // Unless they would be padding, mostly.
  const std::int64_t seen = (g.ow - 1) * g.stride[1] + g.kw;
  if (g.kw * g.c < 64 && p.columns <= p.block_columns && g.dilation[1] == 1 && seen <= 2 * (g.w + g.kw)) {
    p.line = round_up(seen * g.c, 16);
  }
  p.chunk_rows = std::clamp<std::int64_t>((kSteps * together + g.ow / 2) / g.ow, 1, p.rows);
  share_terms(p, g.o, in_parallel_region() ? 1 : num_threads());
  return p;
}

}  // namespace halfstep::cpu
