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
  std::size_t worked = 0;  ///< bytes of the step's planned memory that its kernel has got
  std::string error;
  CpuKernelState storages;

  explicit Context(Recording& r);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  /// The kernel of `s` runs next.
  void begin(Step& s);
  /// The next so many bytes of the step's planned memory; null where it hasn't as many.
  void* work(std::uint64_t bytes);
};

}  // namespace halfstep::detail
