// SPDX-License-Identifier: Apache-2.0
// Internal: how the samples of a batch are divided into parts, for ranks and for the shards of a reproducible run.
#pragma once

#include <algorithm>
#include <cstdint>

namespace halfstep::data::detail {

/// Where part `part` of `parts` begins among the `all` samples of a batch; it ends where the next one begins, the last
/// one at `all`. `whole` is the size of a whole batch, which the last of a pass may be smaller than.
///
/// Parts differ by at most one sample, and part 0 is never empty. Where whole batches have at least 2 samples a part, a
/// smaller one of 2 or more is divided into parts of at least 2 and empty ones: batch norm finds no variance in a
/// single sample.
inline std::int64_t part_begin(std::int64_t all, std::int64_t whole, std::int64_t part, std::int64_t parts) {
  if (part == 0) return 0;
  const std::int64_t least = whole / parts < 2 || all < 2 ? 1 : 2;
  const auto at = [=](std::int64_t n) { return (n * part + parts - 1) / parts; };  // rounded up
  if (all >= least * parts) return at(all);
  const std::int64_t pieces = all / least, before = at(pieces);
  return before == pieces ? all : before * least;
}

}  // namespace halfstep::data::detail
