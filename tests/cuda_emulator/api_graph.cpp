// SPDX-License-Identifier: Apache-2.0
// The runtime's functions for graphs: work of a stream is captured, and launched as often as wanted. A graph is a list
// here, for a capture stays in one stream. Where CUDA's manual leaves open what it forbids, more is forbidden here.
#include "machine.h"

using namespace hscuda::emulator;

namespace {

cudaStreamCaptureMode& thread_mode() {
  static thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  return mode;
}

}  // namespace

namespace hscuda::emulator {

cudaError_t Machine::may_enqueue(CUstream_st* stream) {
  if (stream->capture) return stream->capture->broken ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
  if (stream != devices[static_cast<std::size_t>(stream->device)].legacy) return cudaSuccess;
  // The legacy stream runs in step with those that are not cudaStreamNonBlocking.
  cudaError_t error = cudaSuccess;
  for (CUstream_st* other : streams) {
    if (!other->capture || !other->blocking || other->device != stream->device) continue;
    other->capture->broken = true;
    error = cudaErrorStreamCaptureImplicit;
  }
  return error;
}

cudaError_t Machine::may_call() {
  if (thread_mode() == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  cudaError_t error = cudaSuccess;
  for (CUstream_st* stream : streams) {
    if (!stream->capture) continue;
    const Capture& capture = *stream->capture;
    const bool own = capture.thread == std::this_thread::get_id() && capture.mode != cudaStreamCaptureModeRelaxed;
    const bool global = capture.mode == cudaStreamCaptureModeGlobal && thread_mode() == cudaStreamCaptureModeGlobal;
    if (!own && !global) continue;
    stream->capture->broken = true;
    error = cudaErrorStreamCaptureUnsupported;
  }
  return error;
}

cudaError_t Machine::may_wait(CUstream_st* stream) {
  if (!stream->capture) {
    if (const cudaError_t error = may_enqueue(stream); error != cudaSuccess) return error;
    return may_call();
  }
  if (stream->capture->broken) return cudaErrorStreamCaptureInvalidated;
  stream->capture->broken = true;
  return cudaErrorStreamCaptureUnsupported;
}

// Of whatever thread and mode.
cudaError_t Machine::may_wait(int device) {
  cudaError_t error = may_call();
  for (CUstream_st* stream : streams) {
    if (!stream->capture || stream->device != device) continue;
    stream->capture->broken = true;
    error = cudaErrorStreamCaptureUnsupported;
  }
  return error;
}

cudaError_t Machine::may_wait(CUevent_st* event) {
  if (!event->capture) return may_call();
  event->capture->broken = true;
  return cudaErrorCapturedEvent;
}

}  // namespace hscuda::emulator

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  if (*mode < cudaStreamCaptureModeGlobal || *mode > cudaStreamCaptureModeRelaxed) return noted(cudaErrorInvalidValue);
  std::swap(*mode, thread_mode());
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  CUstream_st* stream = m.stream(handle);
  if (stream == nullptr) return noted(m.devices.empty() ? cudaErrorNoDevice : cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = m.unusable(stream->device); error != cudaSuccess) return noted(error);
  if (mode < cudaStreamCaptureModeGlobal || mode > cudaStreamCaptureModeRelaxed) return noted(cudaErrorInvalidValue);
  if (handle == nullptr) return noted(cudaErrorStreamCaptureUnsupported);
  if (stream->capture) return noted(cudaErrorIllegalState);
  stream->capture = std::make_shared<Capture>(Capture{mode, std::this_thread::get_id(), false, {}});
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  *graph = nullptr;
  CUstream_st* stream = m.stream(handle);
  if (stream == nullptr) return noted(m.devices.empty() ? cudaErrorNoDevice : cudaErrorInvalidResourceHandle);
  if (!stream->capture) return noted(cudaErrorIllegalState);
  Capture& capture = *stream->capture;
  if (capture.mode != cudaStreamCaptureModeRelaxed && capture.thread != std::this_thread::get_id()) {
    return noted(cudaErrorStreamCaptureWrongThread);
  }
  if (m.fault("capture") != cudaSuccess) capture.broken = true;
  cudaError_t error = m.unusable(stream->device);
  if (error == cudaSuccess && capture.broken) error = cudaErrorStreamCaptureInvalidated;
  if (error == cudaSuccess) {
    *graph = new CUgraph_st{stream->device, std::move(capture.nodes)};
    m.graphs.insert(*graph);
  }
  stream->capture = nullptr;  // events that were recorded in it stand for nothing until they are recorded again
  return noted(error);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  CUstream_st* stream = m.stream(handle);
  if (stream == nullptr) return noted(m.devices.empty() ? cudaErrorNoDevice : cudaErrorInvalidResourceHandle);
  *status = !stream->capture          ? cudaStreamCaptureStatusNone
            : stream->capture->broken ? cudaStreamCaptureStatusInvalidated
                                      : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (!m.graphs.contains(graph) || flags != 0) return noted(cudaErrorInvalidValue);
  if (const cudaError_t error = m.unusable(graph->device); error != cudaSuccess) return noted(error);
  if (const cudaError_t error = m.fault("instantiate"); error != cudaSuccess) return noted(error);
  *executable = new CUgraphExec_st{*graph};
  m.executables.insert(*executable);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  CUstream_st* stream = m.stream(handle);
  if (stream == nullptr) return noted(m.devices.empty() ? cudaErrorNoDevice : cudaErrorInvalidResourceHandle);
  if (!m.executables.contains(executable) || executable->device != stream->device) return noted(cudaErrorInvalidValue);
  if (const cudaError_t error = m.unusable(stream->device); error != cudaSuccess) return noted(error);
  if (const cudaError_t error = m.fault("graph"); error != cudaSuccess) return noted(error);
  if (const cudaError_t error = m.may_enqueue(stream); error != cudaSuccess) return noted(error);
  if (stream->capture) {
    // CUDA makes it a part of the other graph.
    stream->capture->broken = true;
    return noted(cudaErrorStreamCaptureUnsupported);
  }
  for (const auto& node : executable->nodes) m.enqueue(stream, {node, nullptr, nullptr});
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (m.graphs.erase(graph) == 0) return noted(cudaErrorInvalidValue);
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (m.executables.erase(executable) == 0) return noted(cudaErrorInvalidValue);
  delete executable;
  return cudaSuccess;
}
