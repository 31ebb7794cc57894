// SPDX-License-Identifier: Apache-2.0
// How attention is cut into pieces whose scores fit a workspace: plain arithmetic, which tests check on the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace hscuda {

/// Bytes that the scores of a piece and what belongs to them may take.
inline constexpr int64_t kAttentionBytes = int64_t{192} << 20;

struct AttentionSizes {
  int64_t items, heads, queries, keys, width, value_width;
  int64_t query_group, key_group, value_group;  ///< neighbouring heads that share one of the query, key or value
};

/// The most that is done at once. With fewer heads than all it is one item, with fewer queries than all one set of
/// heads that share nothing with others.
struct AttentionPiece {
  int64_t items, heads, queries;
};

/// Whether the groups of heads that share a query are made of whole groups that share a key, or the other way round: as
/// where the query or the keys have all heads. These are in one product; others are of one of them and of scores.
inline bool groups_nest(const AttentionSizes& s) {
  return s.query_group % s.key_group == 0 || s.key_group % s.query_group == 0;
}

/// `item`: bytes of a score; `copies`: matrices of scores that are kept at a time.
inline AttentionPiece attention_piece(const AttentionSizes& s, int64_t item, int64_t copies,
                                      int64_t most = kAttentionBytes) {
  // Beside the scores: operands and results in the type of the sums.
  const int64_t a_query = item * (copies * s.keys + 2 * (s.width + s.value_width));
  const int64_t a_head = s.queries * a_query + item * 2 * s.keys * (s.width + s.value_width);
  const int64_t set = std::lcm(s.query_group, std::lcm(s.key_group, s.value_group));
  const int64_t fit = std::max<int64_t>(most / std::max<int64_t>(a_head, 1), 0);
  if (fit >= s.heads) return {std::clamp<int64_t>(fit / std::max<int64_t>(s.heads, 1), 1, s.items), s.heads, s.queries};
  if (fit >= set) return {1, fit / set * set, s.queries};
  // Whole multiples of what tensor cores work on.
  const int64_t rows = most / std::max<int64_t>(set * a_query, 1) / 64 * 64;
  return {1, set, std::clamp<int64_t>(rows, std::min<int64_t>(64, s.queries), s.queries)};
}

}  // namespace hscuda
