// SPDX-License-Identifier: Apache-2.0
#include "host/graph.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "host/device.h"
#include "host/errors.h"
#include "host/settings.h"

namespace hscuda::graphs {
namespace {

using halfstep_plugin_helpers::guarded;

std::atomic<uint64_t> g_launches{0};

/// What is behind halfstep_graph.
struct Graph {
  const Queue* queue = nullptr;
  Device* device = nullptr;
  cudaGraphExec_t executable = nullptr;
  bool tf32 = false;                              ///< what its products were chosen by
  std::vector<std::shared_ptr<const void>> kept;  ///< plans that its kernels belong to

  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    if (executable != nullptr && cudaGraphExecDestroy(executable) != cudaSuccess) cudaGetLastError();
  }
};

Queue& queue_of(halfstep_queue* queue) { return *reinterpret_cast<Queue*>(queue); }

/// There is no graph to be had, for CUDA's reason: the kernels are called one by one. A GPU that is lost is lost.
halfstep_status none(Device& device, cudaError_t error, const char* what) {
  const halfstep_status status = device.check(error, what);
  if (status != HALFSTEP_FAILED) return status;
  return fail(HALFSTEP_UNSUPPORTED, 0, "no graph: %s: %s (%s)", what, cudaGetErrorString(error),
              cudaGetErrorName(error));
}

}  // namespace

bool wanted() { return switch_setting("HALFSTEP_CUDA_GRAPHS", true); }

uint64_t launches() { return g_launches.load(std::memory_order_relaxed); }

halfstep_status begin(halfstep_queue* handle) {
  return guarded([&]() -> halfstep_status {
    Queue& queue = queue_of(handle);
    Device& device = *queue.device;
    if (const auto status = device.use()) return status;
    if (const auto status = queue.refuse_while_recording("graph_begin")) return status;
    const std::lock_guard lock(queue.mutex);
    if (const auto status = device.check(cudaEventRecord(queue.place, queue.stream), "cudaEventRecord")) return status;
    // Other threads work on: only this one is kept from calls that a graph couldn't repeat.
    if (const auto status = device.check(cudaStreamBeginCapture(queue.stream, cudaStreamCaptureModeThreadLocal),
                                         "cudaStreamBeginCapture"))
      return status;
    queue.recording = true;
    return HALFSTEP_OK;
  });
}

halfstep_status end(halfstep_queue* handle, halfstep_graph** graph) {
  *graph = nullptr;
  return guarded([&]() -> halfstep_status {
    Queue& queue = queue_of(handle);
    Device& device = *queue.device;
    if (!queue.recording) return fail(HALFSTEP_FAILED, 0, "no graph was begun on the queue");
    const halfstep_status present = device.use();
    cudaGraph_t captured = nullptr;
    const cudaError_t error = cudaStreamEndCapture(queue.stream, &captured);
    if (error == cudaErrorStreamCaptureWrongThread)
      return device.check(error, "cudaStreamEndCapture");  // it records on
    auto made = std::make_unique<Graph>();
    made->queue = &queue;
    made->device = &device;
    made->tf32 = tf32_allowed();
    made->kept = std::exchange(queue.kept, {});
    queue.recording = false;
    if (error != cudaSuccess) return none(device, error, "cudaStreamEndCapture");
    const cudaError_t instantiated = cudaGraphInstantiate(&made->executable, captured, 0);
    if (cudaGraphDestroy(captured) != cudaSuccess) cudaGetLastError();
    if (present != HALFSTEP_OK) return present;
    if (instantiated != cudaSuccess) return none(device, instantiated, "cudaGraphInstantiate");
    *graph = reinterpret_cast<halfstep_graph*>(made.release());
    return HALFSTEP_OK;
  });
}

halfstep_status launch(halfstep_graph* handle, halfstep_queue* queue_handle) {
  return guarded([&]() -> halfstep_status {
    const Graph& graph = *reinterpret_cast<const Graph*>(handle);
    Queue& queue = queue_of(queue_handle);
    Device& device = *queue.device;
    if (const auto status = device.use()) return status;
    if (graph.queue != &queue) return fail(HALFSTEP_FAILED, 0, "a graph of another queue");
    if (const auto status = queue.refuse_while_recording("graph_launch")) return status;
    if (graph.tf32 != tf32_allowed()) {
      return fail(HALFSTEP_UNSUPPORTED, 0, "the precision of float32 products has been changed since");
    }
    const cudaError_t error = cudaGraphLaunch(graph.executable, queue.stream);
    // It needs memory of its own; kernels by themselves do without.
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return fail(HALFSTEP_UNSUPPORTED, 0, "cudaGraphLaunch: %s", cudaGetErrorString(error));
    }
    if (const auto status = device.check(error, "cudaGraphLaunch")) return status;
    g_launches.fetch_add(1, std::memory_order_relaxed);
    return HALFSTEP_OK;
  });
}

halfstep_status destroy(halfstep_graph* handle) {
  return guarded([&]() -> halfstep_status {
    const std::unique_ptr<Graph> graph(reinterpret_cast<Graph*>(handle));
    return graph->device->use();
  });
}

}  // namespace hscuda::graphs
