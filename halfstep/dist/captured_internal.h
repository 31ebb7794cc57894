// SPDX-License-Identifier: Apache-2.0
// Internal: collectives inside of steps that may be captured.
#pragma once

#include <functional>
#include <initializer_list>
#include <span>

#include "halfstep/ops/recorder.h"

namespace halfstep::dist::detail {

/// Does `work`, by which ranks read and write these tensors, here and at this place of every replay of a step that is
/// being captured. On a device, `work` finds what the kernels before it left on the current queue, as in a step that
/// isn't captured, and has to wait for what those behind it read.
inline void repeated(std::span<const Tensor> tensors, const std::function<void()>& work) {
  KernelRecorder* const recorder = kernel_recorder();
  if (!recorder) {
    work();
    return;
  }
  for (const Tensor& t : tensors) {
    // Results of a fallback may still be on the host: unless they are brought now, while it is recorded, replays send
    // what the device's memory had before.
    t.storage()->data();
    recorder->uses(t);
    if (recorder->owns(*t.storage())) recorder->keep(t);
  }
  recorder->exchange(tensors, work);
  const CapturePause pause;
  work();
  for (const Tensor& t : tensors) t.storage()->data();  // as in a replay
}

inline void repeated(std::initializer_list<Tensor> tensors, const std::function<void()>& work) {
  repeated(std::span(tensors.begin(), tensors.size()), work);
}

}  // namespace halfstep::dist::detail
