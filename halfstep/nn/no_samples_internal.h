// SPDX-License-Identifier: Apache-2.0
// Internal: forward passes of a rank that has no samples in a step, over a batch that stands in for none.
#pragma once

#include <utility>

#include "halfstep/core/export.h"

namespace halfstep::nn::detail {

/// While it lives with `on`, batches on this thread have no part in statistics: those of batch norm, running and across
/// ranks, and the ranges of quantization's observers.
class HS_API NoSamples {
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

}  // namespace halfstep::nn::detail
