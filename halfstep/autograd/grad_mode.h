// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/ops/op.h"

namespace halfstep {

/// Sets whether this thread records operations for the guard's lifetime, then restores the previous mode.
class HS_API GradMode {
 public:
  explicit GradMode(bool enabled) : was_(thread_state().grad_enabled) { thread_state().grad_enabled = enabled; }
  ~GradMode() { thread_state().grad_enabled = was_; }
  GradMode(const GradMode&) = delete;
  GradMode& operator=(const GradMode&) = delete;
  /// Whether this thread currently records.
  static bool is_enabled() { return thread_state().grad_enabled; }

 private:
  bool was_;
};

/// Disables recording on this thread for its lifetime: `NoGrad no_grad;`
class HS_API NoGrad : public GradMode {
 public:
  NoGrad() : GradMode(false) {}
};

/// Re-enables recording inside a NoGrad region.
class HS_API EnableGrad : public GradMode {
 public:
  EnableGrad() : GradMode(true) {}
};

}  // namespace halfstep
