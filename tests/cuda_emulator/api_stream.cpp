// SPDX-License-Identifier: Apache-2.0
// The runtime's functions for streams and events.
#include "machine.h"

using namespace hscuda::emulator;

namespace {

// Pieces of work that asking for a stream or an event gets done: so that who asks again and again sees an end, and who
// asks once sees that it isn't there yet.
constexpr int kStepsOfQuery = 8;

cudaError_t create_stream(cudaStream_t* stream, unsigned flags, int priority) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (const cudaError_t error = m.unusable(current_device()); error != cudaSuccess) return noted(error);
  if (const cudaError_t error = m.fault("stream"); error != cudaSuccess) return noted(error);
  if (flags > cudaStreamNonBlocking) return noted(cudaErrorInvalidValue);
  *stream = new CUstream_st{current_device(), flags == cudaStreamDefault, priority, {}, nullptr};
  m.streams.insert(*stream);
  return cudaSuccess;
}

cudaError_t create_event(cudaEvent_t* event, unsigned flags) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (const cudaError_t error = m.unusable(current_device()); error != cudaSuccess) return noted(error);
  if (const cudaError_t error = m.fault("event"); error != cudaSuccess) return noted(error);
  if (flags > (cudaEventBlockingSync | cudaEventDisableTiming)) return noted(cudaErrorInvalidValue);
  *event = new CUevent_st{current_device(), (flags & cudaEventDisableTiming) == 0, nullptr, nullptr};
  m.events.insert(*event);
  return cudaSuccess;
}

}  // namespace

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return create_stream(stream, cudaStreamDefault, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) { return create_stream(stream, flags, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return create_stream(stream, flags, priority);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (!m.streams.contains(stream)) return noted(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = m.may_wait(stream); error != cudaSuccess) return noted(error);
  m.drain(stream);
  m.streams.erase(stream);
  const cudaError_t error = m.unusable(stream->device);
  delete stream;
  return noted(error);
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  CUstream_st* stream = m.stream(handle);
  if (stream == nullptr) return noted(m.devices.empty() ? cudaErrorNoDevice : cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = m.fault("synchronize"); error != cudaSuccess) return noted(error);
  if (const cudaError_t error = m.may_wait(stream); error != cudaSuccess) return noted(error);
  m.keep_in_step(stream);
  m.drain(stream);
  return noted(m.unusable(stream->device));
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  CUstream_st* stream = m.stream(handle);
  if (stream == nullptr) return noted(m.devices.empty() ? cudaErrorNoDevice : cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = m.may_wait(stream); error != cudaSuccess) return noted(error);
  for (int i = 0; i < kStepsOfQuery && !stream->queue.empty(); ++i) m.step(stream);
  if (const cudaError_t error = m.unusable(stream->device); error != cudaSuccess) return noted(error);
  return noted(stream->queue.empty() ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  CUstream_st* stream = m.stream(handle);
  if (stream == nullptr || !m.events.contains(event)) return noted(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = m.unusable(stream->device); error != cudaSuccess) return noted(error);
  if (const cudaError_t error = m.fault("wait"); error != cudaSuccess) return noted(error);
  if (flags != 0) return noted(cudaErrorInvalidValue);
  if (const cudaError_t error = m.may_enqueue(stream); error != cudaSuccess) return noted(error);
  if (stream->capture || event->capture) {
    if (stream->capture == event->capture || (event->record == nullptr && event->capture == nullptr)) {
      return cudaSuccess;  // it comes after that anyhow
    }
    // Into the capture from outside. CUDA lets a capture go on in a stream that waits for it; this stand-in doesn't.
    if (stream->capture) stream->capture->broken = true;
    if (event->capture) event->capture->broken = true;
    return noted(cudaErrorStreamCaptureIsolation);
  }
  if (event->record != nullptr && !event->record->done) m.enqueue(stream, {nullptr, event->record, nullptr});
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, void (*function)(void*), void* data) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  CUstream_st* stream = m.stream(handle);
  if (stream == nullptr) return noted(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = m.unusable(stream->device); error != cudaSuccess) return noted(error);
  if (const cudaError_t error = m.may_enqueue(stream); error != cudaSuccess) return noted(error);
  m.enqueue(stream, {[=] { function(data); }, nullptr, nullptr});
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return create_event(event, cudaEventDefault); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) { return create_event(event, flags); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (m.events.erase(event) == 0) return noted(cudaErrorInvalidResourceHandle);
  const cudaError_t error = m.unusable(event->device);
  delete event;  // waits for it keep the place that it stood for
  return noted(error);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  CUstream_st* stream = m.stream(handle);
  if (stream == nullptr || !m.events.contains(event) || event->device != stream->device) {
    return noted(cudaErrorInvalidResourceHandle);
  }
  if (const cudaError_t error = m.unusable(stream->device); error != cudaSuccess) return noted(error);
  if (const cudaError_t error = m.fault("record"); error != cudaSuccess) return noted(error);
  if (const cudaError_t error = m.may_enqueue(stream); error != cudaSuccess) return noted(error);
  event->capture = stream->capture;
  if (stream->capture) {
    event->record = nullptr;
    return cudaSuccess;
  }
  event->record = std::make_shared<Record>(Record{stream, false, {}});
  m.enqueue(stream, {nullptr, nullptr, event->record});
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (!m.events.contains(event)) return noted(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = m.may_wait(event); error != cudaSuccess) return noted(error);
  if (event->record == nullptr) return cudaSuccess;
  for (int i = 0; i < kStepsOfQuery && !event->record->done; ++i) m.step(event->record->stream);
  if (const cudaError_t error = m.unusable(event->device); error != cudaSuccess) return noted(error);
  return noted(event->record->done ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (!m.events.contains(event)) return noted(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = m.fault("synchronize"); error != cudaSuccess) return noted(error);
  if (const cudaError_t error = m.may_wait(event); error != cudaSuccess) return noted(error);
  if (event->record != nullptr) m.reach(*event->record);
  return noted(m.unusable(event->device));
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (!m.events.contains(start) || !m.events.contains(end) || !start->timing || !end->timing ||
      start->record == nullptr || end->record == nullptr) {
    return noted(cudaErrorInvalidResourceHandle);
  }
  if (!start->record->done || !end->record->done) return noted(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(end->record->time - start->record->time).count();
  return cudaSuccess;
}
