// SPDX-License-Identifier: Apache-2.0
// The table that Halfstep finds the GPUs by.
#include "halfstep/runtime/plugin.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "host/device.h"
#include "host/errors.h"
#include "host/graph.h"
#include "host/kernel.h"
#include "libraries/collectives.h"

namespace hscuda {
namespace {

using graphs::Unrecorded;
using halfstep_plugin_helpers::answer;
using halfstep_plugin_helpers::guarded;
using halfstep_plugin_helpers::take_error;

#if defined(HALFSTEP_CUDA_QUICK)
constexpr bool kQuick = true;  // to see whether the kernels compile; they are slow
#else
constexpr bool kQuick = false;
#endif

struct Event {
  Device* device;
  cudaEvent_t event;
  bool timing;
};

Queue& queue_of(halfstep_queue* queue) { return *reinterpret_cast<Queue*>(queue); }
Event& event_of(halfstep_event* event) { return *reinterpret_cast<Event*>(event); }

/// The GPU, ready and current; f(device) when it is.
template <class F>
halfstep_status with_device(int32_t index, F&& f) {
  return guarded([&]() -> halfstep_status {
    Device* device = device_at(index);
    if (device == nullptr) return HALFSTEP_FAILED;
    if (const auto status = device->use()) return status;
    const Unrecorded unrecorded;
    return f(*device);
  });
}

/// After a wait: CUDA's word, then what kernels reported.
halfstep_status waited(Device& device, cudaError_t error, const char* what) {
  if (const auto status = device.check(error, what)) return status;
  return device.outcome();
}

// --- identity

halfstep_status device_info(int32_t index, halfstep_device_info* info) {
  return guarded([&]() -> halfstep_status {
    const Device* device = device_at(index);
    if (device == nullptr) return HALFSTEP_FAILED;
    halfstep_device_info all = {};
    all.dtypes = kAll;
    all.memory = device->properties.totalGlobalMem;
    std::snprintf(all.name, sizeof all.name, "%.127s", device->properties.name);
    all.low_dtypes = dtypes({HALFSTEP_F16, HALFSTEP_BF16});
    // Which priorities a device has is asked of the current one, and that would start CUDA on it: every GPU that this
    // plug-in serves has at least these.
    all.priorities = 3;
    answer(info, all);
    return HALFSTEP_OK;
  });
}

halfstep_status synchronize(int32_t index) {
  return with_device(index, [](Device& d) { return waited(d, d.wait(), "waiting for all queues"); });
}

// --- memory

halfstep_status allocate(int32_t index, uint64_t bytes, void** data) {
  *data = nullptr;
  return with_device(index, [&](Device& device) -> halfstep_status {
    if (device.memory_stream == nullptr) return device.check(cudaMalloc(data, bytes), "cudaMalloc");
    cudaError_t error = cudaMallocAsync(data, bytes, device.memory_stream);
    if (error == cudaErrorMemoryAllocation) {
      // What the pool keeps may be in the wrong pieces.
      cudaGetLastError();
      cudaMemPool_t pool;
      if (const auto status = device.check(cudaStreamSynchronize(device.memory_stream), "cudaStreamSynchronize"))
        return status;
      if (const auto status =
              device.check(cudaDeviceGetDefaultMemPool(&pool, device.ordinal), "cudaDeviceGetDefaultMemPool"))
        return status;
      if (const auto status = device.check(cudaMemPoolTrimTo(pool, 0), "cudaMemPoolTrimTo")) return status;
      error = cudaMallocAsync(data, bytes, device.memory_stream);
    }
    if (const auto status = device.check(error, "cudaMallocAsync")) {
      *data = nullptr;
      return status;
    }
    // From here on it is memory for any stream.
    return device.check(cudaStreamSynchronize(device.memory_stream), "cudaStreamSynchronize");
  });
}

halfstep_status deallocate(int32_t index, void* data, uint64_t) {
  return with_device(index, [&](Device& device) -> halfstep_status {
    if (device.memory_stream == nullptr) return device.check(cudaFree(data), "cudaFree");
    return device.check(cudaFreeAsync(data, device.memory_stream), "cudaFreeAsync");
  });
}

halfstep_status memory_info(int32_t index, uint64_t* free_bytes, uint64_t* total_bytes) {
  return with_device(index, [&](Device& device) -> halfstep_status {
    std::size_t available = 0, total = 0;
    // What has been given back is free once the pool's stream has passed it.
    if (device.memory_stream != nullptr) {
      if (const auto status = device.check(cudaStreamSynchronize(device.memory_stream), "cudaStreamSynchronize"))
        return status;
    }
    if (const auto status = device.check(cudaMemGetInfo(&available, &total), "cudaMemGetInfo")) return status;
    *free_bytes = available;
    *total_bytes = total;
    return HALFSTEP_OK;
  });
}

halfstep_status host_allocate(uint64_t bytes, void** data) {
  *data = nullptr;
  return guarded([&] {
    use_any();
    const Unrecorded unrecorded;
    return check(cudaHostAlloc(data, bytes, cudaHostAllocPortable), "cudaHostAlloc");
  });
}

halfstep_status host_deallocate(void* data, uint64_t) {
  return guarded([&] {
    use_any();
    const Unrecorded unrecorded;
    return check(cudaFreeHost(data), "cudaFreeHost");
  });
}

// --- copies

halfstep_status copy(halfstep_queue* handle, void* destination, const void* source, uint64_t bytes, int32_t kind) {
  return guarded([&]() -> halfstep_status {
    const Queue& queue = queue_of(handle);
    Device& device = *queue.device;
    if (const auto status = device.use()) return status;
    if (const auto status = queue.refuse_while_recording("copy")) return status;
    if (bytes == 0) return HALFSTEP_OK;
    constexpr cudaMemcpyKind kKinds[] = {cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice};
    if (kind < HALFSTEP_COPY_TO_DEVICE || kind > HALFSTEP_COPY_ON_DEVICE) {
      return fail(HALFSTEP_FAILED, 0, "unknown kind %d of a copy", kind);
    }
    const cudaError_t error = cudaMemcpyAsync(destination, source, bytes, kKinds[kind], queue.stream);
    if (const auto status = device.check(error, "cudaMemcpyAsync")) return status;
    // To memory that isn't pinned CUDA has waited: what came before is known to have gone well, or not.
    return kind == HALFSTEP_COPY_TO_HOST ? device.outcome() : HALFSTEP_OK;
  });
}

halfstep_status copy_peer(halfstep_queue* handle, int32_t to_index, void* destination, const void* source,
                          uint64_t bytes) {
  return guarded([&]() -> halfstep_status {
    const Queue& queue = queue_of(handle);
    Device* to = device_at(to_index);
    if (to == nullptr) return HALFSTEP_FAILED;
    if (const auto status = to->use()) return status;
    if (const auto status = queue.device->use()) return status;
    if (const auto status = queue.refuse_while_recording("copy_peer")) return status;
    if (bytes == 0) return HALFSTEP_OK;
    to->show_memory_to(*queue.device);
    queue.device->show_memory_to(*to);
    return queue.device->check(
        cudaMemcpyPeerAsync(destination, to->ordinal, source, queue.device->ordinal, bytes, queue.stream),
        "cudaMemcpyPeerAsync");
  });
}

// --- queues

halfstep_status queue_create(int32_t index, int32_t priority, halfstep_queue** queue) {
  *queue = nullptr;
  return with_device(index, [&](Device& device) -> halfstep_status {
    int lowest = 0, highest = 0;  // CUDA's numbers grow as the priority falls
    if (const auto status =
            device.check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange"))
      return status;
    auto made = std::make_shared<Queue>(&device);
    const int wanted = std::max(lowest - priority, highest);
    if (const auto status = device.check(cudaStreamCreateWithPriority(&made->stream, cudaStreamNonBlocking, wanted),
                                         "cudaStreamCreateWithPriority"))
      return status;
    if (const auto status =
            device.check(cudaEventCreateWithFlags(&made->place, cudaEventDisableTiming), "cudaEventCreateWithFlags"))
      return status;
    *queue = reinterpret_cast<halfstep_queue*>(made.get());
    device.add(std::move(made));
    return HALFSTEP_OK;
  });
}

halfstep_status queue_destroy(halfstep_queue* handle) {
  return guarded([&]() -> halfstep_status {
    Device& device = *queue_of(handle).device;
    // Another thread that waits for the GPU may hold it a little longer.
    const std::shared_ptr<Queue> queue = device.remove(&queue_of(handle));
    if (queue->recording) {
      halfstep_graph* graph = nullptr;
      if (graphs::end(handle, &graph) == HALFSTEP_OK) graphs::destroy(graph);
    }
    if (const auto status = device.use()) return status;
    const Unrecorded unrecorded;
    const halfstep_status status = waited(device, cudaStreamSynchronize(queue->stream), "cudaStreamSynchronize");
    const std::lock_guard lock(queue->mutex);
    const halfstep_status destroyed =
        device.check(cudaStreamDestroy(std::exchange(queue->stream, nullptr)), "cudaStreamDestroy");
    return status != HALFSTEP_OK ? status : destroyed;
  });
}

halfstep_status queue_synchronize(halfstep_queue* handle) {
  return guarded([&]() -> halfstep_status {
    const Queue& queue = queue_of(handle);
    if (const auto status = queue.device->use()) return status;
    if (const auto status = queue.refuse_while_recording("queue_synchronize")) return status;
    const Unrecorded unrecorded;
    return waited(*queue.device, cudaStreamSynchronize(queue.stream), "cudaStreamSynchronize");
  });
}

/// Of a query: what isn't ready is no error.
halfstep_status answered(Device& device, cudaError_t error, const char* what) {
  if (error != cudaErrorNotReady) return device.check(error, what);
  cudaGetLastError();
  return HALFSTEP_NOT_READY;
}

halfstep_status queue_query(halfstep_queue* handle) {
  return guarded([&]() -> halfstep_status {
    const Queue& queue = queue_of(handle);
    if (const auto status = queue.device->use()) return status;
    if (const auto status = queue.refuse_while_recording("queue_query")) return status;
    const Unrecorded unrecorded;
    return answered(*queue.device, cudaStreamQuery(queue.stream), "cudaStreamQuery");
  });
}

halfstep_status queue_wait(halfstep_queue* handle, halfstep_event* event) {
  return guarded([&]() -> halfstep_status {
    const Queue& queue = queue_of(handle);
    if (const auto status = queue.device->use()) return status;
    if (const auto status = queue.refuse_while_recording("queue_wait")) return status;
    return queue.device->check(cudaStreamWaitEvent(queue.stream, event_of(event).event, 0), "cudaStreamWaitEvent");
  });
}

// --- events

halfstep_status event_create(int32_t index, uint32_t flags, halfstep_event** event) {
  *event = nullptr;
  return with_device(index, [&](Device& device) -> halfstep_status {
    auto made = std::make_unique<Event>(Event{&device, nullptr, (flags & HALFSTEP_EVENT_TIMING) != 0});
    const unsigned kind = made->timing ? cudaEventDefault : cudaEventDisableTiming;
    if (const auto status = device.check(cudaEventCreateWithFlags(&made->event, kind), "cudaEventCreateWithFlags"))
      return status;
    *event = reinterpret_cast<halfstep_event*>(made.release());
    return HALFSTEP_OK;
  });
}

halfstep_status event_destroy(halfstep_event* handle) {
  return guarded([&]() -> halfstep_status {
    const std::unique_ptr<Event> event(&event_of(handle));
    if (const auto status = event->device->use()) return status;
    const Unrecorded unrecorded;
    return event->device->check(cudaEventDestroy(event->event), "cudaEventDestroy");
  });
}

halfstep_status event_record(halfstep_event* handle, halfstep_queue* queue) {
  return guarded([&]() -> halfstep_status {
    Device& device = *queue_of(queue).device;
    if (const auto status = device.use()) return status;
    if (const auto status = queue_of(queue).refuse_while_recording("event_record")) return status;
    return device.check(cudaEventRecord(event_of(handle).event, queue_of(queue).stream), "cudaEventRecord");
  });
}

halfstep_status event_query(halfstep_event* handle) {
  return guarded([&]() -> halfstep_status {
    const Event& event = event_of(handle);
    if (const auto status = event.device->use()) return status;
    const Unrecorded unrecorded;
    return answered(*event.device, cudaEventQuery(event.event), "cudaEventQuery");
  });
}

halfstep_status event_synchronize(halfstep_event* handle) {
  return guarded([&]() -> halfstep_status {
    const Event& event = event_of(handle);
    if (const auto status = event.device->use()) return status;
    const Unrecorded unrecorded;
    return waited(*event.device, cudaEventSynchronize(event.event), "cudaEventSynchronize");
  });
}

halfstep_status event_elapsed(halfstep_event* start, halfstep_event* end, double* milliseconds) {
  return guarded([&]() -> halfstep_status {
    const Event& event = event_of(start);
    if (const auto status = event.device->use()) return status;
    if (!event.timing || !event_of(end).timing) return fail(HALFSTEP_FAILED, 0, "an event was made without timing");
    float elapsed = 0;
    const cudaError_t error = cudaEventElapsedTime(&elapsed, event.event, event_of(end).event);
    if (error == cudaErrorInvalidResourceHandle) {
      cudaGetLastError();
      return fail(HALFSTEP_FAILED, 0, "an event was never recorded");
    }
    if (const auto status = answered(*event.device, error, "cudaEventElapsedTime")) return status;
    *milliseconds = static_cast<double>(elapsed);
    return HALFSTEP_OK;
  });
}

// --- what has no entry

/// 0 highest: float32 as IEEE has it; 1 high: products may be computed in TF32.
void set_float32_precision(int32_t precision) { allow_tf32(precision != 0); }

void* extension(const char* name) {
  const std::string_view which = name;
  if (which == "set_float32_precision") return reinterpret_cast<void*>(set_float32_precision);
  if (which == "graph_launches" && graphs::wanted()) return reinterpret_cast<void*>(graphs::launches);
  // `halfstep devices` says of a GPU that its self-check never passed that it is untested.
  static char yes[] = "yes";
  if (which == "needs_check") return yes;
  return nullptr;
}

const char* version() {
  static const std::string text = [] {
    int runtime = 0, driver = 0;
    if (cudaRuntimeGetVersion(&runtime) != cudaSuccess) cudaGetLastError();
    if (cudaDriverGetVersion(&driver) != cudaSuccess) cudaGetLastError();
    const auto said = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
    return "CUDA " + said(runtime) + (driver > 0 ? ", driver for " + said(driver) : ", no driver") +
           (kQuick ? ", compiled quickly" : "");
  }();
  return text.c_str();
}

halfstep_plugin_table filled(halfstep_plugin_table table) {
  collectives::fill(table);
  return table;
}

// Each plug-in writes down its own table, entry by entry, so that one that is missing is seen here.
const halfstep_plugin_table& table() {
  static const halfstep_plugin_table all = filled({
      .size = sizeof(halfstep_plugin_table),
      .major = HALFSTEP_PLUGIN_MAJOR,
      .minor = HALFSTEP_PLUGIN_MINOR,
      .name = "cuda",
      .vendor = "NVIDIA",
      .version = version(),
      .device_count = device_count,
      .device_info = device_info,
      .error = take_error,
      .synchronize = synchronize,
      .allocate = allocate,
      .deallocate = deallocate,
      .memory_info = memory_info,
      .host_allocate = host_allocate,
      .host_deallocate = host_deallocate,
      .copy = copy,
      .copy_peer = copy_peer,
      .queue_create = queue_create,
      .queue_destroy = queue_destroy,
      .queue_synchronize = queue_synchronize,
      .queue_query = queue_query,
      .queue_wait = queue_wait,
      .event_create = event_create,
      .event_destroy = event_destroy,
      .event_record = event_record,
      .event_query = event_query,
      .event_synchronize = event_synchronize,
      .event_elapsed = event_elapsed,
      .kernel = find_kernel,
      .extension = extension,
      // The driver cleans up after the process; calls at its end may come after CUDA has gone.
      .shutdown = nullptr,
      // Profiles come when they can be tried on a GPU.
      .profile_start = nullptr,
      .profile_stop = nullptr,
      .profile_read = nullptr,
      .graph_begin = graphs::wanted() ? graphs::begin : nullptr,
      .graph_end = graphs::wanted() ? graphs::end : nullptr,
      .graph_launch = graphs::wanted() ? graphs::launch : nullptr,
      .graph_destroy = graphs::wanted() ? graphs::destroy : nullptr,
      // By collectives::fill().
      .group_id = nullptr,
      .group_create = nullptr,
      .group_destroy = nullptr,
      .group_abort = nullptr,
      .all_reduce = nullptr,
      .broadcast = nullptr,
      .all_gather = nullptr,
      .reduce_scatter = nullptr,
      .all_to_all = nullptr,
      .send_receive = nullptr,
      .group_error = nullptr,
  });
  return all;
}

}  // namespace
}  // namespace hscuda

extern "C" [[gnu::visibility("default")]] const halfstep_plugin_table* halfstep_plugin(const halfstep_host* host) {
  try {
    hscuda::find_devices(host);
    return &hscuda::table();
  } catch (const std::exception& e) {
    if (host != nullptr && host->log != nullptr) host->log(HALFSTEP_LOG_ERROR, e.what());
    return nullptr;
  }
}
