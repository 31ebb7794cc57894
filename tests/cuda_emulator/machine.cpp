// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "block.h"
#include "launch.h"

namespace hscuda::emulator {
namespace {

// Pieces of work that wait in a stream before the oldest runs unasked.
constexpr std::size_t kWaiting = 64;

thread_local cudaError_t last_error = cudaSuccess;

uint64_t parse_size(const char* text) {
  char* end = nullptr;
  const uint64_t number = std::strtoull(text, &end, 10);
  switch (*end) {
    case 'k':
      return number << 10;
    case 'M':
      return number << 20;
    case 'G':
      return number << 30;
    default:
      return number;
  }
}

}  // namespace

Machine& machine() {
  // Never destroyed: streams may still be used while the program ends.
  static Machine* const only = new Machine;
  return *only;
}

void Machine::reset() {
  const std::lock_guard lock(mutex);
  const char* text = std::getenv("HALFSTEP_CUDA_EMULATED_DEVICES");
  const auto count = static_cast<std::size_t>(text == nullptr ? 1 : std::clamp(std::atoi(text), 0, 16));
  devices.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    devices[i].lost = cudaSuccess;
    devices[i].peers.clear();
    if (pools.size() == i) {
      pools.push_back(std::make_unique<CUmemPoolHandle_st>(CUmemPoolHandle_st{static_cast<int>(i), 0, {}}));
      legacies_.push_back(std::make_unique<CUstream_st>(CUstream_st{static_cast<int>(i), true, 0, {}}));
    }
    devices[i].legacy = legacies_[i].get();
  }
  text = std::getenv("HALFSTEP_CUDA_EMULATED_MEMORY");
  memory = text == nullptr ? uint64_t{2} << 30 : parse_size(text);
  faults_.clear();
  calls_.clear();
  text = std::getenv("HALFSTEP_CUDA_EMULATED_FAULTS");
  std::istringstream list(text == nullptr ? "" : text);
  for (std::string item; std::getline(list, item, ',');) {
    const auto colon = item.find(':'), equals = item.find('=');
    if (colon == std::string::npos || equals == std::string::npos) {
      std::fprintf(stderr, "CUDA emulator: HALFSTEP_CUDA_EMULATED_FAULTS: CALL:NUMBER=ERROR is wanted, not %s\n",
                   item.c_str());
      std::abort();
    }
    faults_.push_back({item.substr(0, colon), std::strtoull(item.c_str() + colon + 1, nullptr, 10),
                       static_cast<cudaError_t>(std::atoi(item.c_str() + equals + 1))});
  }
}

cudaError_t Machine::fault(const std::string& call) {
  if (faults_.empty()) return cudaSuccess;
  const uint64_t number = ++calls_[call];
  for (const Fault& f : faults_) {
    if (f.call == call && f.number == number) return f.error;
  }
  return cudaSuccess;
}

cudaError_t Machine::unusable(int device) {
  if (devices.empty()) return cudaErrorNoDevice;
  if (device < 0 || device >= static_cast<int>(devices.size())) return cudaErrorInvalidDevice;
  return devices[static_cast<std::size_t>(device)].lost;
}

CUstream_st* Machine::stream(cudaStream_t handle) {
  if (handle == nullptr) {
    if (unusable(current_device()) == cudaErrorNoDevice) return nullptr;
    return devices[static_cast<std::size_t>(current_device())].legacy;
  }
  return streams.contains(handle) ? handle : nullptr;
}

void Machine::keep_in_step(CUstream_st* stream) {
  if (!stream->blocking) return;
  CUstream_st* legacy = devices[static_cast<std::size_t>(stream->device)].legacy;
  if (stream != legacy) return drain(legacy);
  for (CUstream_st* other : streams) {
    if (other->blocking && other->device == stream->device) drain(other);
  }
}

void Machine::enqueue(CUstream_st* stream, Work work) {
  if (stream->capture) return stream->capture->nodes.push_back(std::move(work.run));
  keep_in_step(stream);
  stream->queue.push_back(std::move(work));
  while (stream->queue.size() > kWaiting) step(stream);
}

void Machine::step(CUstream_st* stream) {
  Work work = std::move(stream->queue.front());
  stream->queue.pop_front();
  if (work.wait) reach(*work.wait);
  const auto lost = [&] { return devices[static_cast<std::size_t>(stream->device)].lost != cudaSuccess; };
  if (work.run && !lost()) {
    const DeviceAccess access;
    work.run();
  }
  if (work.reached) {
    work.reached->done = true;
    work.reached->time = std::chrono::steady_clock::now();
  }
}

void Machine::reach(const Record& record) {
  while (!record.done) step(record.stream);
}

void Machine::drain(CUstream_st* stream) {
  while (!stream->queue.empty()) step(stream);
}

void Machine::drain_device(int device) {
  drain(devices[static_cast<std::size_t>(device)].legacy);
  for (CUstream_st* stream : streams) {
    if (stream->device == device) drain(stream);
  }
}

const Allocation* Machine::find(const void* pointer, uintptr_t* begin) const {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = allocations.upper_bound(address);
  if (next == allocations.begin()) return nullptr;
  --next;
  // One past the end is a place that an empty tensor may have.
  if (address > next->first + next->second.size) return nullptr;
  if (begin != nullptr) *begin = next->first;
  return &next->second;
}

bool Machine::usable(const void* pointer, std::size_t size, int device) const {
  uintptr_t begin = 0;
  const Allocation* allocation = find(pointer, &begin);
  if (allocation == nullptr || reinterpret_cast<uintptr_t>(pointer) - begin + size > allocation->size) return false;
  if (allocation->device < 0 || allocation->device == device) return true;
  return allocation->pooled ? pools[static_cast<std::size_t>(allocation->device)]->users.contains(device)
                            : devices[static_cast<std::size_t>(device)].peers.contains(allocation->device);
}

bool loses_context(cudaError_t error) {
  switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
      return true;
    default:
      return false;
  }
}

cudaError_t noted(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

int& current_device() {
  static thread_local int device = 0;
  return device;
}

void enqueue(cudaStream_t handle, dim3 grid, dim3 block, std::size_t shared, bool alone, std::function<void()> body,
             std::vector<const void*> pointers) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  const int device = current_device();
  if (const cudaError_t error = m.unusable(device); error != cudaSuccess) return static_cast<void>(noted(error));
  CUstream_st* stream = m.stream(handle);
  // A stream of another device than the current one: CUDA's launch refuses it.
  if (stream == nullptr || stream->device != device) return static_cast<void>(noted(cudaErrorInvalidResourceHandle));
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024 || block.z > 64 || grid.x == 0 || grid.y == 0 || grid.z == 0 ||
      grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    return static_cast<void>(noted(cudaErrorInvalidConfiguration));
  }
  if (shared > 48 * 1024) return static_cast<void>(noted(cudaErrorInvalidValue));
  if (const cudaError_t error = m.may_enqueue(stream); error != cudaSuccess) return static_cast<void>(noted(error));
  const cudaError_t fault = m.fault("launch");
  if (fault != cudaSuccess && !loses_context(fault)) return static_cast<void>(noted(fault));
  m.enqueue(stream, {[=, body = std::move(body), pointers = std::move(pointers)] {
                       cudaError_t& lost = machine().devices[static_cast<std::size_t>(device)].lost;
                       lost = fault;
                       for (std::size_t i = 0; i < pointers.size(); ++i) {
                         if (pointers[i] == nullptr || machine().usable(pointers[i], 0, device)) continue;
                         std::fprintf(
                             stderr,
                             "CUDA emulator: pointer %zu of a kernel's arguments, %p, is no memory of device %d\n", i,
                             pointers[i], device);
                         lost = cudaErrorIllegalAddress;
                       }
                       if (lost == cudaSuccess) run_grid(grid, block, shared, alone, body);
                     },
                     nullptr, nullptr});
}

}  // namespace hscuda::emulator

using hscuda::emulator::last_error;

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
