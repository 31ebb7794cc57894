// SPDX-License-Identifier: Apache-2.0
// Work of a queue that is recorded once and launched again and again: the table's graphs, by stream capture.
#pragma once

#include <cuda_runtime.h>

#include "halfstep/runtime/plugin.h"

namespace hscuda::graphs {

/// False: HALFSTEP_CUDA_GRAPHS=0.
bool wanted();

// The table's entries (halfstep/runtime/plugin.h).
halfstep_status begin(halfstep_queue* queue);
halfstep_status end(halfstep_queue* queue, halfstep_graph** graph);
halfstep_status launch(halfstep_graph* graph, halfstep_queue* queue);
halfstep_status destroy(halfstep_graph* graph);

/// How many were launched since the program's start.
uint64_t launches();

/// While it lives, this thread may call what CUDA forbids a thread that records: allocate memory, ask for events, wait.
/// For what Halfstep does of its own accord and a graph needn't repeat. In kernels the ban stays: a library that
/// allocated or waited there would do so once only, when the kernel is recorded, so that the capture must fail.
class Unrecorded {
 public:
  Unrecorded() : changed_(cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess) {}
  ~Unrecorded() {
    if (changed_) cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  Unrecorded(const Unrecorded&) = delete;
  Unrecorded& operator=(const Unrecorded&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  const bool changed_;
};

}  // namespace hscuda::graphs
