// SPDX-License-Identifier: Apache-2.0
// The runtime's functions for memory and copies.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "machine.h"

namespace hscuda::emulator {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(PKEY_DISABLE_ACCESS)
// The sanitizers watch what malloc() gives, and read around it themselves.
void* map_memory(std::size_t size) { return std::aligned_alloc(512, (size + 511) / 512 * 512); }
void unmap_memory(void* pointer, std::size_t) { std::free(pointer); }
int rights() { return 0; }
void set_rights(int) {}
bool is_protected() { return false; }
#else
int protection_key() {
  static const int key = [] {
    const char* text = std::getenv("HALFSTEP_CUDA_EMULATED_PROTECT");
    return text != nullptr && std::strcmp(text, "0") == 0 ? -1 : pkey_alloc(0, PKEY_DISABLE_ACCESS);
  }();
  return key;
}
std::size_t pages(std::size_t size) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return (size + page - 1) / page * page;
}
// Up to the end of its last page, behind which is one that can't be touched.
void* map_memory(std::size_t size) {
  const std::size_t bytes = pages(size), page = pages(1);
  void* memory =
      mmap(nullptr, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  mprotect(static_cast<char*>(memory) + bytes, page, PROT_NONE);
  if (protection_key() >= 0) pkey_mprotect(memory, bytes, PROT_READ | PROT_WRITE, protection_key());
  return static_cast<char*>(memory) + (bytes - (size + 511) / 512 * 512);
}
void unmap_memory(void* pointer, std::size_t size) {
  const std::size_t bytes = pages(size), page = pages(1);
  munmap(static_cast<char*>(pointer) - (bytes - (size + 511) / 512 * 512), bytes + page);
}
int rights() { return protection_key() < 0 ? 0 : pkey_get(protection_key()); }
void set_rights(int value) {
  if (protection_key() >= 0) pkey_set(protection_key(), static_cast<unsigned>(value));
}
bool is_protected() { return protection_key() >= 0; }
#endif

}  // namespace

bool device_memory_is_protected() { return is_protected(); }

DeviceAccess::DeviceAccess() : before_(rights()) {
  if (before_ != 0) set_rights(0);
}
DeviceAccess::~DeviceAccess() {
  if (before_ != 0) set_rights(before_);
}

void* device_allocate(std::size_t size) {
  void* memory = map_memory(size);
  if (memory == nullptr) return nullptr;
  // NaN, and -1: what is read before it was written shows.
  const DeviceAccess access;
  std::memset(memory, 0xff, size);
  return memory;
}
void device_free(void* pointer, std::size_t size) { unmap_memory(pointer, size); }

}  // namespace hscuda::emulator

using namespace hscuda::emulator;

namespace {

cudaError_t allocate(void** pointer, std::size_t size, int device, bool pooled) {
  Machine& m = machine();
  if (const cudaError_t error = m.fault("malloc"); error != cudaSuccess) return error;
  *pointer = nullptr;
  if (size == 0) return cudaSuccess;
  DeviceState& state = m.devices[static_cast<std::size_t>(device)];
  // What the queues are about to free counts as free, as it does to CUDA's pools.
  if (state.used + size > m.memory) m.drain_device(device);
  if (size > m.memory || state.used + size > m.memory) return cudaErrorMemoryAllocation;
  void* memory = device_allocate(size);
  if (memory == nullptr) return cudaErrorMemoryAllocation;
  m.allocations[reinterpret_cast<uintptr_t>(memory)] = {size, device, pooled};
  state.used += size;
  state.high = std::max(state.high, state.used);
  *pointer = memory;
  return cudaSuccess;
}

void release(void* pointer) {
  Machine& m = machine();
  const auto found = m.allocations.find(reinterpret_cast<uintptr_t>(pointer));
  const Allocation allocation = found->second;
  m.allocations.erase(found);
  if (allocation.device < 0) {
    std::free(pointer);
    return;
  }
  m.devices[static_cast<std::size_t>(allocation.device)].used -= allocation.size;
  device_free(pointer, allocation.size);
}

/// The device whose memory begins at `pointer`, -1 for pinned memory, -2 for none.
int owner(const void* pointer) {
  uintptr_t begin = 0;
  const Allocation* allocation = machine().find(pointer, &begin);
  return allocation == nullptr || begin != reinterpret_cast<uintptr_t>(pointer) ? -2 : allocation->device;
}

/// What lies at an address: the device's number, -1 pinned, -2 pageable.
int home(const void* pointer) {
  uintptr_t begin = 0;
  const Allocation* allocation = machine().find(pointer, &begin);
  if (allocation == nullptr || reinterpret_cast<uintptr_t>(pointer) == begin + allocation->size) return -2;
  return allocation->device;
}

/// Whether `count` bytes from here on don't reach over an allocation's end.
bool whole(const void* pointer, std::size_t count) {
  uintptr_t begin = 0;
  const Allocation* allocation = machine().find(pointer, &begin);
  if (allocation == nullptr) return true;
  // What begins where an allocation ends is something else.
  const uintptr_t offset = reinterpret_cast<uintptr_t>(pointer) - begin;
  return offset == allocation->size || offset + count <= allocation->size;
}

cudaError_t copy(void* to, const void* from, std::size_t count, cudaMemcpyKind kind, cudaStream_t handle, bool wait) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (const cudaError_t error = m.unusable(current_device()); error != cudaSuccess) return noted(error);
  if (const cudaError_t error = m.fault("memcpy"); error != cudaSuccess) return noted(error);
  CUstream_st* stream = m.stream(handle);
  if (stream == nullptr) return noted(cudaErrorInvalidResourceHandle);
  if (count == 0) return cudaSuccess;
  const int to_home = home(to), from_home = home(from);
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return noted(cudaErrorInvalidMemcpyDirection);
  // Pinned memory is the device's and the host's.
  if (kind != cudaMemcpyDefault && ((to_device && to_home == -2) || (!to_device && to_home >= 0) ||
                                    (from_device && from_home == -2) || (!from_device && from_home >= 0))) {
    return noted(cudaErrorInvalidValue);
  }
  if (!whole(to, count) || !whole(from, count)) return noted(cudaErrorInvalidValue);
  if (wait) {
    if (const cudaError_t error = m.may_call(); error != cudaSuccess) return noted(error);
  }
  if (const cudaError_t error = m.may_enqueue(stream); error != cudaSuccess) return noted(error);
  if (stream->capture && (to_home == -2 || from_home == -2)) {
    // CUDA may take it, and read at every launch what is there by then, or nothing any more: nobody can mean that.
    stream->capture->broken = true;
    return noted(cudaErrorStreamCaptureUnsupported);
  }
  m.enqueue(stream, {[=] { std::memmove(to, from, count); }, nullptr, nullptr});
  if (wait || to_home == -2 || from_home == -2) {
    m.drain(stream);
    return noted(m.unusable(stream->device));
  }
  return cudaSuccess;
}

/// Before memory is taken or given back in the order of a stream. Graphs that do so by themselves are CUDA's, not this
/// stand-in's.
cudaError_t ordered(CUstream_st* stream) {
  if (const cudaError_t error = machine().may_call(); error != cudaSuccess) return error;
  if (const cudaError_t error = machine().may_enqueue(stream); error != cudaSuccess) return error;
  if (!stream->capture) return cudaSuccess;
  stream->capture->broken = true;
  return cudaErrorStreamCaptureUnsupported;
}

}  // namespace

cudaError_t cudaMalloc(void** pointer, size_t size) {
  const std::lock_guard lock(machine().mutex);
  if (const cudaError_t error = machine().unusable(current_device()); error != cudaSuccess) return noted(error);
  if (const cudaError_t error = machine().may_call(); error != cudaSuccess) return noted(error);
  return noted(allocate(pointer, size, current_device(), false));
}
cudaError_t cudaFree(void* pointer) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (m.devices.empty()) return noted(cudaErrorNoDevice);
  if (pointer == nullptr) return noted(m.unusable(current_device()));
  const int device = owner(pointer);
  if (device < 0) return noted(cudaErrorInvalidValue);
  if (const cudaError_t error = m.may_call(); error != cudaSuccess) return noted(error);
  m.drain_device(device);
  release(pointer);
  return noted(m.unusable(device));
}
cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t handle) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  CUstream_st* stream = m.stream(handle);
  if (stream == nullptr) return noted(m.devices.empty() ? cudaErrorNoDevice : cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = m.unusable(stream->device); error != cudaSuccess) return noted(error);
  if (const cudaError_t error = ordered(stream); error != cudaSuccess) return noted(error);
  return noted(allocate(pointer, size, stream->device, true));
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t handle) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  CUstream_st* stream = m.stream(handle);
  if (stream == nullptr) return noted(m.devices.empty() ? cudaErrorNoDevice : cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = m.unusable(stream->device); error != cudaSuccess) return noted(error);
  if (pointer == nullptr) return cudaSuccess;
  if (owner(pointer) < 0) return noted(cudaErrorInvalidValue);
  if (const cudaError_t error = ordered(stream); error != cudaSuccess) return noted(error);
  m.enqueue(stream, {[pointer] { release(pointer); }, nullptr, nullptr});
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (const cudaError_t error = m.unusable(current_device()); error != cudaSuccess) return noted(error);
  *total = m.memory;
  *free = m.memory - std::min(m.memory, m.devices[static_cast<std::size_t>(current_device())].used);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  if (machine().unusable(device) != cudaSuccess) return noted(machine().unusable(device));
  *pool = machine().pools[static_cast<std::size_t>(device)].get();
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  const std::lock_guard lock(machine().mutex);
  if (attribute == cudaMemPoolAttrReleaseThreshold) pool->threshold = *static_cast<uint64_t*>(value);
  return noted(attribute <= cudaMemPoolAttrReleaseThreshold ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  const std::lock_guard lock(machine().mutex);
  const DeviceState& state = machine().devices[static_cast<std::size_t>(pool->device)];
  switch (attribute) {
    case cudaMemPoolAttrReleaseThreshold:
      *static_cast<uint64_t*>(value) = pool->threshold;
      break;
    case cudaMemPoolAttrReservedMemCurrent:
    case cudaMemPoolAttrUsedMemCurrent:
      *static_cast<uint64_t*>(value) = state.used;
      break;
    case cudaMemPoolAttrReservedMemHigh:
    case cudaMemPoolAttrUsedMemHigh:
      *static_cast<uint64_t*>(value) = state.high;
      break;
    default:
      *static_cast<int*>(value) = 1;
  }
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc* list, size_t count) {
  const std::lock_guard lock(machine().mutex);
  for (size_t i = 0; i < count; ++i) {
    const cudaMemLocation& user = list[i].location;
    if (user.type != cudaMemLocationTypeDevice) return noted(cudaErrorInvalidValue);
    if (machine().unusable(user.id) == cudaErrorInvalidDevice) return noted(cudaErrorInvalidDevice);
    if (list[i].flags == cudaMemAccessFlagsProtNone) {
      if (user.id == pool->device) return noted(cudaErrorInvalidValue);
      pool->users.erase(user.id);
    } else {
      pool->users.insert(user.id);
    }
  }
  return cudaSuccess;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (const cudaError_t error = m.unusable(current_device()); error != cudaSuccess) return noted(error);
  if (const cudaError_t error = m.fault("host"); error != cudaSuccess) return noted(error);
  if (const cudaError_t error = m.may_call(); error != cudaSuccess) return noted(error);
  *pointer = nullptr;
  if (size == 0) return cudaSuccess;
  void* memory = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  if (memory == nullptr) return noted(cudaErrorMemoryAllocation);
  std::memset(memory, 0xff, size);
  m.allocations[reinterpret_cast<uintptr_t>(memory)] = {size, -1, false};
  *pointer = memory;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (pointer == nullptr) return cudaSuccess;
  if (owner(pointer) != -1) return noted(cudaErrorInvalidValue);
  if (const cudaError_t error = m.may_call(); error != cudaSuccess) return noted(error);
  for (int i = 0; i < static_cast<int>(m.devices.size()); ++i) m.drain_device(i);
  release(pointer);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags) {
  const std::lock_guard lock(machine().mutex);
  if (flags != 0 || home(host) != -1) return noted(cudaErrorInvalidValue);
  *device = host;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (m.devices.empty()) return noted(cudaErrorNoDevice);
  const int where = home(pointer);
  void* address = const_cast<void*>(pointer);
  if (where == -2) {
    *attributes = {cudaMemoryTypeUnregistered, -2, nullptr, address};
  } else if (where == -1) {
    *attributes = {cudaMemoryTypeHost, current_device(), address, address};
  } else {
    *attributes = {cudaMemoryTypeDevice, where, address, nullptr};
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t count, cudaMemcpyKind kind) {
  return copy(to, from, count, kind, nullptr, true);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t count, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(to, from, count, kind, stream, false);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t count,
                                cudaStream_t stream) {
  {
    const std::lock_guard lock(machine().mutex);
    if (count != 0 && (home(to) != to_device || home(from) != from_device)) return noted(cudaErrorInvalidValue);
    if (const cudaError_t error = machine().unusable(from_device); error != cudaSuccess) return noted(error);
    // A pool's memory is its own GPU's, until others are let at it; whichever of the two copies, it needs both.
    const auto hidden = [](const void* pointer, int device) {
      const Allocation* allocation = machine().find(pointer);
      return allocation->pooled && !machine().usable(pointer, 0, device);
    };
    if (count != 0 && (hidden(to, from_device) || hidden(from, to_device))) return noted(cudaErrorInvalidValue);
  }
  return copy(to, from, count, cudaMemcpyDeviceToDevice, stream, false);
}
cudaError_t cudaMemset(void* to, int value, size_t count) {
  {
    const std::lock_guard lock(machine().mutex);
    if (const cudaError_t error = machine().may_call(); error != cudaSuccess) return noted(error);
  }
  return cudaMemsetAsync(to, value, count, nullptr);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t count, cudaStream_t handle) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (const cudaError_t error = m.unusable(current_device()); error != cudaSuccess) return noted(error);
  if (const cudaError_t error = m.fault("memset"); error != cudaSuccess) return noted(error);
  CUstream_st* stream = m.stream(handle);
  if (stream == nullptr) return noted(cudaErrorInvalidResourceHandle);
  if (count == 0) return cudaSuccess;
  if (home(to) == -2 || !whole(to, count)) return noted(cudaErrorInvalidValue);
  if (const cudaError_t error = m.may_enqueue(stream); error != cudaSuccess) return noted(error);
  m.enqueue(stream, {[=] { std::memset(to, value, count); }, nullptr, nullptr});
  return cudaSuccess;
}
