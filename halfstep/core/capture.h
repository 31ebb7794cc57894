// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "halfstep/core/export.h"
#include "halfstep/core/storage.h"

namespace halfstep {

/// What a thread tells of a step that is being captured on it (autograd/capture.h). Ops see more of it: ops/recorder.h.
class HS_API CaptureSink {
 public:
  virtual ~CaptureSink();
  /// Where the CPU's memory comes from meanwhile; null: from where it always does.
  virtual Allocator* memory() = 0;
  /// The step did something that a replay could not do again. It goes on; the first reason counts.
  virtual void refuse(std::string why) = 0;
};

/// This thread's, or null.
HS_API CaptureSink*& capture_sink();

/// Nothing is captured on this thread while it lives.
class HS_API CapturePause {
 public:
  CapturePause() : was_(capture_sink()) { capture_sink() = nullptr; }
  ~CapturePause() { capture_sink() = was_; }
  CapturePause(const CapturePause&) = delete;
  CapturePause& operator=(const CapturePause&) = delete;

 private:
  CaptureSink* was_;
};

/// Raised when something changes on the host that captured steps may have looked at, such as a module's mode: they are
/// captured anew.
HS_API std::atomic<std::uint64_t>& capture_generation();

}  // namespace halfstep
