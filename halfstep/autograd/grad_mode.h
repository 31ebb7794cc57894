// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/ops/op.h"

namespace halfstep {

/// Sets whether this thread records operations while it lives, then puts back what was.
class HS_API GradMode {
 public:
  explicit GradMode(bool enabled) : was_(thread_state().grad_enabled) { thread_state().grad_enabled = enabled; }
  ~GradMode() { thread_state().grad_enabled = was_; }
  GradMode(const GradMode&) = delete;
  GradMode& operator=(const GradMode&) = delete;
  /// Whether this thread records now.
  static bool is_enabled() { return thread_state().grad_enabled; }

 private:
  bool was_;
};

/// Nothing is recorded on this thread while it lives: `NoGrad no_grad;`
class HS_API NoGrad : public GradMode {
 public:
  NoGrad() : GradMode(false) {}
};

/// Recording is on again inside a NoGrad region.
class HS_API EnableGrad : public GradMode {
 public:
  EnableGrad() : GradMode(true) {}
};

}  // namespace halfstep
