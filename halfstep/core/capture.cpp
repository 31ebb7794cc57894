// SPDX-License-Identifier: Apache-2.0
#include "halfstep/core/capture.h"

namespace halfstep {

CaptureSink::~CaptureSink() = default;

CaptureSink*& capture_sink() {
  thread_local CaptureSink* sink = nullptr;
  return sink;
}

std::atomic<std::uint64_t>& capture_generation() {
  static std::atomic<std::uint64_t> generation{0};
  return generation;
}

}  // namespace halfstep
