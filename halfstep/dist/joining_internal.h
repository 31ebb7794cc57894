// SPDX-License-Identifier: Apache-2.0
// Internal: DataParallelBase::join().
#pragma once

#include <cstdint>

#include "halfstep/dist/data_parallel.h"

namespace halfstep::dist::detail {

/// Ranks whose loops have different numbers of steps. Ahead of each of its collectives a rank tells what it is about to
/// do; one whose loop is over hears it and takes part.
class Joining {
 public:
  enum class Turn : std::int64_t { none, reduce, buffers };

  Joining(ProcessGroup group, const JoinOptions& options) : group_(std::move(group)), options_(options) {}
  const JoinOptions& options() const { return options_; }

  /// Returns what those ranks do whose loops go on; `none`: there are none. Throws DistError where that is the wish.
  Turn announce(Turn own);
  /// The first of the ranks whose loops went on at the last turn of any.
  int first_active() const { return first_; }
  /// By which a mean over all ranks becomes one over those whose loops go on; 1 unless the options say so.
  double factor() const;
  /// Whether a rank has taken part in the turn of another.
  bool shadowed() const { return shadowed_; }

 private:
  ProcessGroup group_;
  JoinOptions options_;
  int active_ = 0;
  int first_ = 0;
  bool shadowed_ = false;
};

}  // namespace halfstep::dist::detail
