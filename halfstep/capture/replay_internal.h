// SPDX-License-Identifier: Apache-2.0
// Internal: what kernels ask for in a replay.
#pragma once

#include <string>

#include "halfstep/capture/recording_internal.h"

namespace halfstep::detail {

struct Recording::Context : KernelContext {
  Recording& recording;
  Step* step = nullptr;
  Scratch* scratch = nullptr;
  std::string error;
  CpuKernelState storages;

  explicit Context(Recording& r);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  /// The kernel of `s` runs next.
  void begin(Step& s);
};

}  // namespace halfstep::detail
