// SPDX-License-Identifier: Apache-2.0
// Internal: what is said of a rank that failed.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "halfstep/core/export.h"
#include "halfstep/dist/control_messages_internal.h"

namespace halfstep::dist::detail {

/// What is known of a rank.
struct RankState {
  std::string host;
  std::int64_t pid = 0;
  Activity activity;
  std::chrono::steady_clock::time_point heard;  ///< when it last said anything
  bool here = false;                            ///< it has connected
  bool left = false;                            ///< it has said goodbye
};

/// `rank 2 (host b, pid 4711)`.
std::string rank_text(const std::vector<RankState>& ranks, int rank);
/// `all_reduce #41 (bucket 3, fc1.weight, 4.0 MiB)`.
std::string collective_text(const Activity& activity);
/// `1.5 s`.
std::string seconds_text(std::chrono::milliseconds time);
/// What the rank did, and what the other ranks do: `it was in all_reduce #41 (...); ranks 0, 1, 3 wait in the same`.
/// Nothing is said of the ranks in `silent`.
std::string circumstances(const std::vector<RankState>& ranks, int rank, const std::vector<int>& silent = {});

/// The rank for which others have waited longer than `limit` in a collective that it isn't in, and what to say of it;
/// -1: there is none. Activities are as of `now`.
HS_API int out_of_step(const std::vector<RankState>& ranks, std::chrono::milliseconds limit, std::string& text);
/// The rank in which nothing has moved for `limit` while others have waited for a third of that in a collective that
/// it isn't in, and what to say of it; -1: there is none.
HS_API int hung_rank(const std::vector<RankState>& ranks, std::chrono::milliseconds limit, std::string& text);

}  // namespace halfstep::dist::detail
