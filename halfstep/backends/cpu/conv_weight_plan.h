// SPDX-License-Identifier: Apache-2.0
// How the gradient of a convolution's weight is laid out as sums of outer products.
#pragma once

#include <cstdint>

#include "halfstep/backends/cpu/onednn.h"
#include "halfstep/backends/cpu/round_up.h"

namespace halfstep::cpu {

inline constexpr std::int64_t kMostColumns = 512;  ///< of the window in a chunk
/// Lanes of a step in a panel of filters: a whole line, of which a tile takes 14 or 6.
inline constexpr std::int64_t kFilterPanel = 16;

/// How the work is laid out. What the sums' order depends on, terms and chunks, follows from the geometry alone; how
/// filters and columns are shared follows from the number of threads too.
struct WeightPlan {
  std::int64_t columns;        // KH KW C
  std::int64_t rows;           // of output places: N OH
  std::int64_t terms;          // parts of the output rows, with sums of their own, ...
  std::int64_t by_filters;     // ... times shares of the filters ...
  std::int64_t by_columns;     // ... times shares of the columns: the jobs
  std::int64_t share_filters;  // filters of a share
  std::int64_t share_columns;  // columns of a share
  std::int64_t block_columns;  // columns widened at a time
  std::int64_t chunk_rows;     // output rows at a time
  // Where the rows of windows are short, the lines of the input that an output row sees are widened first, with the
  // zeros around them: floats of a line, or 0.
  std::int64_t line;

  std::int64_t jobs() const { return terms * by_filters * by_columns; }
  /// Floats from one filter's sums to the next: whole tiles, with what they write behind the last column.
  std::int64_t sum_stride() const { return round_up(columns, 16); }
  /// Floats from one step's columns to the next where they are lines of a chunk: an odd number of the cache's lines.
  std::int64_t line_stride() const { return block_columns + 16; }
};

/// The plan for steps of `together` places each, for as many threads as parallel loops have.
WeightPlan weight_plan(const ConvGeometry& geometry, std::int64_t together);

}  // namespace halfstep::cpu
