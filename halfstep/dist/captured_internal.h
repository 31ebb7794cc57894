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

/// The same for one tensor whose memory the step frees before it ends: a recording doesn't keep it. `work` gets it, or
/// a tensor in its place, which is valid as long as the recording.
inline void repeated_in(const Tensor& tensor, const std::function<void(const Tensor&)>& work) {
  KernelRecorder* const recorder = kernel_recorder();
  const Tensor place = recorder ? recorder->stand_in(tensor) : Tensor();
  if (!place.defined()) {
    repeated({tensor}, [tensor, work] { work(tensor); });
    return;
  }
  const auto on_place = [place, work] { work(place); };
  recorder->exchange({&place, 1}, on_place);
  const CapturePause pause;
  on_place();
  tensor.storage()->bump_version();
  tensor.storage()->forget_derived();
}

}  // namespace halfstep::dist::detail
