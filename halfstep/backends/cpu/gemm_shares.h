// SPDX-License-Identifier: Apache-2.0
// How threads share a product: each takes some of the rows times some of the columns.
#pragma once

#include <algorithm>
#include <cstdint>

#include "halfstep/backends/cpu/round_up.h"

namespace halfstep::cpu {

/// `row_parts` parts of the rows by `column_parts` parts of the columns. They begin at multiples of `panel`.
struct GemmShares {
  std::int64_t rows, columns, panel;
  std::int64_t row_parts, column_parts;

  std::int64_t count() const { return row_parts * column_parts; }
  std::int64_t first_row(std::int64_t share) const { return edge(rows, row_parts, share / column_parts); }
  std::int64_t end_row(std::int64_t share) const { return edge(rows, row_parts, share / column_parts + 1); }
  std::int64_t first_column(std::int64_t share) const { return edge(columns, column_parts, share % column_parts); }
  std::int64_t end_column(std::int64_t share) const { return edge(columns, column_parts, share % column_parts + 1); }
  /// The most of a share.
  std::int64_t most_rows() const { return most(rows, row_parts); }
  std::int64_t most_columns() const { return most(columns, column_parts); }

 private:
  std::int64_t edge(std::int64_t of, std::int64_t parts, std::int64_t i) const {
    return i == parts ? of : of * i / parts / panel * panel;
  }
  std::int64_t most(std::int64_t of, std::int64_t parts) const {
    return parts == 1 ? of : std::min(of, divide_up(of, parts) + panel - 1);
  }
};

/// As many shares as threads, so that cost(rows, columns) of a share is least.
template <class Cost>
GemmShares share_product(std::int64_t rows, std::int64_t columns, std::int64_t panel, std::int64_t threads,
                         const Cost& cost) {
  GemmShares shares = {rows, columns, panel, 1, threads};
  double least = 0;
  for (std::int64_t parts = 1; parts <= threads; ++parts) {
    if (threads % parts != 0) continue;
    const double time =
        cost(round_up(divide_up(rows, parts), panel), round_up(divide_up(columns, threads / parts), panel));
    if (parts == 1 || time < least) least = time, shares.row_parts = parts, shares.column_parts = threads / parts;
  }
  return shares;
}

}  // namespace halfstep::cpu
