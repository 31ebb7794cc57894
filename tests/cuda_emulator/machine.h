// SPDX-License-Identifier: Apache-2.0
// The emulated devices, for the runtime's functions. Work of a stream is kept and runs when somebody waits for it or
// asks about it, or when more than a few pieces wait, so that what was lent for the time of a call only is found gone.
// One lock holds for everything; work runs under it, on the thread that waits. Environment:
//   HALFSTEP_CUDA_EMULATED_DEVICES  how many devices there are, 1 if not set, 0 for none
//   HALFSTEP_CUDA_EMULATED_MEMORY   bytes of each, with k, M or G after the number; 2G if not set
//   HALFSTEP_CUDA_EMULATED_PROTECT  0: the host may touch the devices' memory, as a debugger likes it
//   HALFSTEP_CUDA_EMULATED_WITHOUT_CUBLASLT  any value: cuBLASLt takes no product (cublas_lt.cpp)
//   HALFSTEP_CUDA_EMULATED_FAULTS   failures, CALL:NUMBER=ERROR,...: the NUMBERth call of CALL (launch, malloc, host,
//                                   memcpy, memset, stream, event, record, wait, synchronize, and of graphs capture,
//                                   instantiate, graph) fails with cudaError ERROR. Errors that lose the context come
//                                   when the work runs, and stay. A capture that fails was broken off before its end.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace hscuda::emulator {

/// A place in a stream, which an event stands for.
struct Record {
  CUstream_st* stream;  ///< not there any more once done
  bool done = false;
  std::chrono::steady_clock::time_point time;
};

/// A piece of work. It may begin with waiting for a place in another stream and end with reaching one.
struct Work {
  std::function<void()> run;
  std::shared_ptr<Record> wait, reached;
};

/// Work of a stream that is recorded, not run. It becomes a graph unless something breaks it off.
struct Capture {
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  bool broken = false;
  std::vector<std::function<void()>> nodes;
};

struct Allocation {
  std::size_t size;
  int device;           ///< -1: pinned memory of the host
  bool pooled = false;  ///< from the default pool, which says itself who may use it
};

struct DeviceState {
  cudaError_t lost = cudaSuccess;
  std::size_t used = 0, high = 0;
  std::set<int> peers;  ///< whose memory it may use, but for pools
  CUstream_st* legacy = nullptr;
};

}  // namespace hscuda::emulator

struct CUstream_st {
  int device;
  bool blocking;  ///< runs in step with the legacy default stream
  int priority;
  std::deque<hscuda::emulator::Work> queue;
  std::shared_ptr<hscuda::emulator::Capture> capture = nullptr;
};
struct CUevent_st {
  int device;
  bool timing;
  std::shared_ptr<hscuda::emulator::Record> record;
  std::shared_ptr<hscuda::emulator::Capture> capture = nullptr;  ///< where it was recorded last, if in one
};
struct CUgraph_st {
  int device;
  std::vector<std::function<void()>> nodes;
};
struct CUgraphExec_st : CUgraph_st {};
struct CUmemPoolHandle_st {
  int device;
  uint64_t threshold = 0;
  std::set<int> users;  ///< other devices that may use what comes from it
};

namespace hscuda::emulator {

class Machine {
 public:
  std::recursive_mutex mutex;
  std::vector<DeviceState> devices;
  std::size_t memory = 0;  ///< bytes of a device
  std::set<CUstream_st*> streams;
  std::set<CUevent_st*> events;
  std::set<CUgraph_st*> graphs;
  std::set<CUgraphExec_st*> executables;
  std::vector<std::unique_ptr<CUmemPoolHandle_st>> pools;
  std::map<uintptr_t, Allocation> allocations;

  /// What the environment orders for this call; each call counts.
  cudaError_t fault(const std::string& call);
  /// Counts a call and is true where the calling thread's device, or the one given, can't be used.
  cudaError_t unusable(int device);

  /// The stream that a handle stands for; null if there is none such.
  CUstream_st* stream(cudaStream_t handle);
  void enqueue(CUstream_st* stream, Work work);
  /// Runs the oldest piece of work.
  void step(CUstream_st* stream);
  /// Runs work up to a place.
  void reach(const Record& record);
  void drain(CUstream_st* stream);
  void drain_device(int device);
  /// What a stream of the legacy kind must see done before it gets more work.
  void keep_in_step(CUstream_st* stream);

  // Captures (api_graph.cpp). What CUDA forbids breaks off those that it concerns, and returns the error of the call.
  /// Before work is put into a stream.
  cudaError_t may_enqueue(CUstream_st* stream);
  /// Before a call that a graph couldn't repeat, such as cudaMalloc: by the mode of the thread and those of captures.
  cudaError_t may_call();
  /// Before the host waits for a stream, asks about it, or destroys it; and for all of a device.
  cudaError_t may_wait(CUstream_st* stream);
  cudaError_t may_wait(int device);
  /// The same for an event.
  cudaError_t may_wait(CUevent_st* event);

  /// The allocation that an address lies in, or ends at; null if it's none of ours.
  const Allocation* find(const void* pointer, uintptr_t* begin = nullptr) const;
  /// Whether `size` bytes from `pointer` on are memory that kernels of a device may use.
  bool usable(const void* pointer, std::size_t size, int device) const;

  /// Reads the environment again and forgets losses, for tests.
  void reset();

 private:
  friend Machine& machine();
  Machine() { reset(); }
  struct Fault {
    std::string call;
    uint64_t number;
    cudaError_t error;
  };
  std::vector<std::unique_ptr<CUstream_st>> legacies_;
  std::vector<Fault> faults_;
  std::map<std::string, uint64_t> calls_;
};

/// The only one.
Machine& machine();

/// Errors after which a device answers nothing else.
bool loses_context(cudaError_t error);
/// Notes a failure for cudaGetLastError() and hands it on.
cudaError_t noted(cudaError_t error);
/// The thread's current device.
int& current_device();

/// Device memory: of the kernels, not of the host, which gets a segmentation fault from it where the processor has
/// memory protection keys. Null when the system has no more.
void* device_allocate(std::size_t size);
void device_free(void* pointer, std::size_t size);
bool device_memory_is_protected();
/// Lets this thread use device memory while it lives.
class DeviceAccess {
 public:
  DeviceAccess();
  ~DeviceAccess();
  DeviceAccess(const DeviceAccess&) = delete;
  DeviceAccess& operator=(const DeviceAccess&) = delete;

 private:
  int before_;
};

}  // namespace hscuda::emulator
