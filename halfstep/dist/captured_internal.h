// SPDX-License-Identifier: Apache-2.0
// Internal: collectives inside of steps that may be captured.
#pragma once

#include <functional>
#include <initializer_list>
#include <utility>

#include "halfstep/ops/recorder.h"

namespace halfstep::dist::detail {

/// Does `work`, which reads and writes these tensors on the host, here and at this place of every replay of a step that
/// is being captured. A step with such tensors on a device isn't captured: `work` would wait for it.
inline void repeated(std::initializer_list<const Tensor*> tensors, std::function<void()> work) {
  KernelRecorder* const recorder = kernel_recorder();
  if (!recorder) {
    work();
    return;
  }
  for (const Tensor* t : tensors) {
    if (!t->device().is_cpu()) recorder->refuse("ranks exchange tensors that are on a device");
    recorder->uses(*t);
    if (recorder->owns(*t->storage())) recorder->keep(*t);
  }
  recorder->host(work);
  const CapturePause pause;
  work();
}

}  // namespace halfstep::dist::detail
