// SPDX-License-Identifier: Apache-2.0
// Internal: forward passes of a rank that has no samples in a step, over a batch that stands in for none.
#pragma once

#include <utility>

namespace halfstep::dist::detail {

/// While it lives with `on`, batches on this thread have no part in the statistics of sync_batch_norm().
class NoSamples {
 public:
  explicit NoSamples(bool on) : was_(std::exchange(flag(), on)) {}
  ~NoSamples() { flag() = was_; }
  NoSamples(const NoSamples&) = delete;
  NoSamples& operator=(const NoSamples&) = delete;
  static bool active() { return flag(); }

 private:
  static bool& flag();
  bool was_;
};

}  // namespace halfstep::dist::detail
