// SPDX-License-Identifier: Apache-2.0
#include "host/device.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "host/errors.h"
#include "host/probe.h"

namespace hscuda {
namespace {

constexpr int kOldestCapability = 80;

// Not destroyed: the program may end in the middle of a call, and CUDA may have gone before.
std::vector<std::unique_ptr<Device>>& devices() {
  static auto& all = *new std::vector<std::unique_ptr<Device>>;
  return all;
}

// Only 1 is on, as in the library (runtime/float32_precision.h), which warns of anything else.
std::atomic<bool> g_tf32{[] {
  const char* text = std::getenv("HALFSTEP_TF32");
  return text != nullptr && std::strcmp(text, "1") == 0;
}()};

const halfstep_host* g_host = nullptr;  // set before there is a device

std::atomic<const Device*>& last_ready() {
  static std::atomic<const Device*> device{nullptr};
  return device;
}

}  // namespace

halfstep_status Device::check(cudaError_t error, const char* what) {
  const halfstep_status status = hscuda::check(error, what);
  if (status == HALFSTEP_LOST) lost.store(true, std::memory_order_relaxed);
  return status;
}

halfstep_status Device::present() const {
  if (!lost.load(std::memory_order_relaxed)) return HALFSTEP_OK;
  return fail(HALFSTEP_LOST, 0, "the GPU failed earlier; CUDA refuses it until the program is started again");
}

halfstep_status Device::use() {
  if (const auto status = present()) return status;
  if (const auto status = check(cudaSetDevice(ordinal), "cudaSetDevice")) return status;
  return ready_.load(std::memory_order_acquire) ? HALFSTEP_OK : prepare();
}

halfstep_status Device::prepare() {
  std::lock_guard lock(mutex_);
  if (ready_.load(std::memory_order_relaxed)) return HALFSTEP_OK;
  if (const cudaError_t error = probe(); error != cudaSuccess) {
    cudaGetLastError();
    return fail(HALFSTEP_FAILED, 0, "this build of the plug-in has no code for a GPU of compute capability %d.%d (%s)",
                properties.major, properties.minor, cudaGetErrorString(error));
  }
  void* seen = nullptr;
  if (fault == nullptr) {
    void* memory = nullptr;
    if (const auto status =
            check(cudaHostAlloc(&memory, sizeof(Fault), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc"))
      return status;
    void* claim = nullptr;
    halfstep_status status = check(cudaMalloc(&claim, sizeof(unsigned)), "cudaMalloc");
    if (status == HALFSTEP_OK) status = check(cudaMemset(claim, 0, sizeof(unsigned)), "cudaMemset");
    // A fill of the GPU's memory may still be under way when its call returns.
    if (status == HALFSTEP_OK) status = check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    if (status != HALFSTEP_OK) {
      cudaFree(claim);
      cudaFreeHost(memory);
      return status;
    }
    fault = static_cast<Fault*>(memory);
    *fault = {};
    fault->claim = static_cast<unsigned*>(claim);
  }
  if (const auto status = check(cudaHostGetDevicePointer(&seen, fault, 0), "cudaHostGetDevicePointer")) return status;
  device_fault = static_cast<Fault*>(seen);
  int pools = 0;
  if (const auto status =
          check(cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, ordinal), "cudaDeviceGetAttribute"))
    return status;
  if (own_stream == nullptr) {
    if (const auto status =
            check(cudaStreamCreateWithFlags(&own_stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"))
      return status;
  }
  if (pools != 0) memory_stream = own_stream;
  ready_.store(true, std::memory_order_release);
  last_ready().store(this, std::memory_order_release);
  return HALFSTEP_OK;
}

void Device::show_memory_to(const Device& other) {
  if (memory_stream == nullptr || &other == this) return;
  const std::lock_guard lock(mutex_);
  if (!shown_to_.insert(other.ordinal).second) return;
  cudaMemPool_t pool;
  int reaches = 0;
  cudaMemAccessDesc access = {};
  access.location.type = cudaMemLocationTypeDevice;
  access.location.id = other.ordinal;
  access.flags = cudaMemAccessFlagsProtReadWrite;
  cudaError_t error = cudaDeviceCanAccessPeer(&reaches, other.ordinal, ordinal);
  if (error == cudaSuccess && reaches == 0) return;
  if (error == cudaSuccess) error = cudaDeviceGetDefaultMemPool(&pool, ordinal);
  if (error == cudaSuccess) error = cudaMemPoolSetAccess(pool, &access, 1);
  if (error == cudaSuccess) return;
  cudaGetLastError();
  log(HALFSTEP_LOG_WARNING, "cuda: GPU " + std::to_string(other.ordinal) + " can't reach the memory of GPU " +
                                std::to_string(ordinal) + ": " + cudaGetErrorString(error));
}

void use_any() {
  const Device* const device = last_ready().load(std::memory_order_acquire);
  if (device != nullptr && cudaSetDevice(device->ordinal) != cudaSuccess) cudaGetLastError();
}

halfstep_status Device::outcome() {
  if (fault == nullptr) return HALFSTEP_OK;
  std::lock_guard lock(mutex_);
  std::atomic_ref ready(fault->ready);
  if (ready.load(std::memory_order_acquire) == 0) return HALFSTEP_OK;
  const Fault found = *fault;
  ready.store(0, std::memory_order_release);
  // From here on kernels may report again: not before the fill is done, which its call's return doesn't mean.
  if (const auto status = check(cudaMemsetAsync(fault->claim, 0, sizeof(unsigned), own_stream), "cudaMemsetAsync"))
    return status;
  if (const auto status = check(cudaStreamSynchronize(own_stream), "cudaStreamSynchronize")) return status;
  switch (found.code) {
    case kIndex:
      if (found.high < found.low) {
        return fail(HALFSTEP_FAILED, found.call, "index %lld lies outside of a dimension that has no elements",
                    found.value);
      }
      return fail(HALFSTEP_FAILED, found.call, "index %lld lies outside of its dimension (%lld to %lld)", found.value,
                  found.low, found.high);
    case kTarget:
      return fail(HALFSTEP_FAILED, found.call,
                  "expected class indices from %lld to %lld (or the ignore_index), got %lld for sample %lld of %lld",
                  found.low, found.high, found.value, found.place, found.places);
    case kDivisionByZero:
      return fail(HALFSTEP_FAILED, found.call, "an integer was divided by 0");
    case kProbability:
      return fail(HALFSTEP_FAILED, found.call, "expected probabilities from 0 to 1");
    default:
      return fail(HALFSTEP_FAILED, found.call, "a kernel reported fault %d", found.code);
  }
}

cudaError_t Device::wait() {
  std::vector<std::shared_ptr<Queue>> all;
  {
    const std::lock_guard lock(queues_mutex_);
    all = queues_;
  }
  for (const auto& queue : all) {
    {
      const std::lock_guard lock(queue->mutex);
      if (queue->stream == nullptr) continue;
      // Where it records, its place is where it began to: behind that nothing is done before the graph is launched.
      if (!queue->recording) {
        if (const cudaError_t error = cudaEventRecord(queue->place, queue->stream); error != cudaSuccess) return error;
      }
    }
    if (const cudaError_t error = cudaEventSynchronize(queue->place); error != cudaSuccess) return error;
  }
  return cudaStreamSynchronize(own_stream);
}

void Device::add(std::shared_ptr<Queue> queue) {
  const std::lock_guard lock(queues_mutex_);
  queues_.push_back(std::move(queue));
}

std::shared_ptr<Queue> Device::remove(const Queue* queue) {
  const std::lock_guard lock(queues_mutex_);
  const auto found = std::find_if(queues_.begin(), queues_.end(), [&](const auto& q) { return q.get() == queue; });
  std::shared_ptr<Queue> removed = std::move(*found);
  queues_.erase(found);
  return removed;
}

Queue::~Queue() {
  if (place != nullptr && cudaEventDestroy(place) != cudaSuccess) cudaGetLastError();
  if (stream != nullptr && cudaStreamDestroy(stream) != cudaSuccess) cudaGetLastError();
}

halfstep_status Queue::refuse_while_recording(const char* what) const {
  if (!recording.load(std::memory_order_relaxed)) return HALFSTEP_OK;
  return fail(HALFSTEP_FAILED, 0, "%s: the queue's work is being recorded into a graph, which can't hold this", what);
}

void log(int32_t level, const std::string& text) {
  if (g_host != nullptr && g_host->log != nullptr) g_host->log(level, text.c_str());
}

void find_devices(const halfstep_host* host) {
  g_host = host;
  if (!devices().empty()) return;
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    // Without a driver CUDA says that the driver is too old, of version 0. That is no trouble, only no GPU.
    int driver = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess) cudaGetLastError();
    log(driver > 0 && error != cudaErrorNoDevice ? HALFSTEP_LOG_WARNING : HALFSTEP_LOG_DEBUG,
        std::string("cuda: no GPU can be used: ") + cudaGetErrorString(error));
    return;
  }
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    auto device = std::make_unique<Device>(static_cast<int>(devices().size()), ordinal);
    if (cudaGetDeviceProperties(&device->properties, ordinal) != cudaSuccess) {
      log(HALFSTEP_LOG_WARNING, "cuda: GPU " + std::to_string(ordinal) + " doesn't answer");
      cudaGetLastError();
      continue;
    }
    if (device->capability() < kOldestCapability) {
      const cudaDeviceProp& p = device->properties;
      log(HALFSTEP_LOG_WARNING, "cuda: " + std::string(p.name) + " is left out: compute capability " +
                                    std::to_string(p.major) + "." + std::to_string(p.minor) +
                                    ", and 8.0 is the oldest that this plug-in is made for");
      continue;
    }
    devices().push_back(std::move(device));
  }
}

int device_count() { return static_cast<int>(devices().size()); }

Device* device_at(int32_t index) {
  if (index >= 0 && index < device_count()) return devices()[static_cast<std::size_t>(index)].get();
  fail(HALFSTEP_FAILED, 0, "there is no GPU %d; there are %d", index, device_count());
  return nullptr;
}

bool tf32_allowed() { return g_tf32.load(std::memory_order_relaxed); }
void allow_tf32(bool allowed) { g_tf32.store(allowed, std::memory_order_relaxed); }

}  // namespace hscuda
