// SPDX-License-Identifier: Apache-2.0
// Internal: the size of buckets that steps are quickest with, measured in the first ones.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "halfstep/dist/process_group.h"

namespace halfstep::dist::detail {

/// Tries sizes one after the other. A size's time is the shortest from the end of one reduction to the end of the next
/// one, over some of them: whole steps, since small buckets hide more and cost more messages. Ranks take the size whose
/// time on the slowest of them is shortest.
class BucketTuner {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr double kStart = 25;  ///< MiB, until the first size is tried
  static constexpr int kPasses = 4;     ///< that are measured of each size, behind one that isn't

  /// For gradients of so many bytes, of which no size is tried that gives one bucket as another one does.
  explicit BucketTuner(std::int64_t bytes);
  bool done() const { return done_; }
  const std::vector<double>& sizes() const { return sizes_; }

  /// A pass has ended; returns the size in MiB to go on with where that changes. All ranks call it after the same
  /// passes; the last call is a collective, and logs the choice.
  std::optional<double> passed(Clock::time_point now, ProcessGroup& group);

 private:
  std::vector<double> sizes_;    // MiB
  std::vector<double> seconds_;  // of those tried
  std::size_t at_ = 0;           // the size that is tried; sizes_.size() before the first
  int passes_ = 0;               // with it
  std::optional<Clock::time_point> last_;
  bool done_ = false;
};

}  // namespace halfstep::dist::detail
