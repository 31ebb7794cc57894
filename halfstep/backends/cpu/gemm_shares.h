// SPDX-License-Identifier: Apache-2.0
// How threads share a product: a share is some of the rows times some of the columns.
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

/// Shares such that `threads` threads take the least time. cost(rows, columns): cycles of a share. Each thread has
/// several shares where that costs little, so that idle threads can steal some.
template <class Cost>
GemmShares share_product(std::int64_t rows, std::int64_t columns, std::int64_t panel, std::int64_t threads,
                         const Cost& cost) {
  constexpr std::int64_t kMostShares = 4;  // of a thread
  constexpr double kLeastCycles = 60'000;  // of a share, when there are several
  constexpr double kAllowed = 1.03;        // of the time that one share a thread takes
  GemmShares shares = {rows, columns, panel, 1, threads};
  double one = 0;
  for (std::int64_t each = 1; each <= kMostShares; each *= 2) {
    if (each > 1 && (threads == 1 || one < static_cast<double>(each) * kLeastCycles)) break;
    GemmShares more = shares;
    double least = 0;
    for (std::int64_t parts = 1; parts <= threads * each; ++parts) {
      if (threads * each % parts != 0) continue;
      const std::int64_t others = threads * each / parts;
      const double time = cost(round_up(divide_up(rows, parts), panel), round_up(divide_up(columns, others), panel));
      if (parts == 1 || time < least) least = time, more.row_parts = parts, more.column_parts = others;
    }
    if (each == 1) {
      one = least;
    } else if (least < kLeastCycles || least * static_cast<double>(each) > kAllowed * one) {
      break;
    }
    shares = more;
  }
  return shares;
}

}  // namespace halfstep::cpu
