// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "halfstep/core/export.h"
#include "halfstep/core/storage.h"

namespace halfstep {

/// What a thread reports about a step that is being captured on it (capture/capture.h). Ops see more of it:
/// ops/recorder.h.
class HS_API CaptureSink {
 public:
  virtual ~CaptureSink();
  /// Where memory of `device` comes from during the capture; null: the usual allocator.
  virtual Allocator* memory(Device device) = 0;
  /// The step did something that a replay could not repeat. It continues; the first reason is kept.
  virtual void refuse(std::string why) = 0;
};

/// The calling thread's, or null.
HS_API CaptureSink*& capture_sink();

/// Disables capture on this thread for its lifetime.
class HS_API CapturePause {
 public:
  CapturePause() : was_(capture_sink()) { capture_sink() = nullptr; }
  ~CapturePause() { capture_sink() = was_; }
  CapturePause(const CapturePause&) = delete;
  CapturePause& operator=(const CapturePause&) = delete;

 private:
  CaptureSink* was_;
};

/// Incremented when host state changes that captured steps may have read, such as a module's mode: they are then
/// captured again.
HS_API std::atomic<std::uint64_t>& capture_generation();

}  // namespace halfstep
