// SPDX-License-Identifier: Apache-2.0
// A GPU as the plug-in holds it, and its queues.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "halfstep/runtime/plugin.h"

namespace hscuda {

class Blas;
class Dnn;
struct Queue;

/// What a kernel found wrong with values, which the host can't see: the first of them since it was last asked for. Lies
/// in host memory that the GPU writes to.
struct Fault {
  unsigned* claim;          ///< in the GPU's memory: the first kernel to raise it to 1 writes the rest
  unsigned long long call;  ///< halfstep_context.call
  long long value;          ///< for kIndex: the index; for kTarget: the class; else of no meaning
  long long low, high;      ///< for these: the first and the last that is right
  long long place, places;  ///< for kTarget: the number of the sample, and how many there are
  int code;                 ///< one of FaultCode
  int ready;                ///< 1 when the rest has been written
};
enum FaultCode : int {
  kIndex = 1,           ///< an index lies outside of its dimension
  kTarget = 2,          ///< a class lies outside of the classes
  kDivisionByZero = 3,  ///< an integer divided by 0
  kProbability = 4      ///< a probability lies outside of [0, 1]
};

/// A GPU. What it needs is made when it is first used.
class Device {
 public:
  Device(int index, int ordinal) : index(index), ordinal(ordinal) {}
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const int index;    ///< among the GPUs that can be used
  const int ordinal;  ///< CUDA's number
  cudaDeviceProp properties = {};
  Fault* fault = nullptr;         ///< as the host sees it
  Fault* device_fault = nullptr;  ///< as kernels see it
  std::atomic<bool> lost{false};
  /// For what belongs to no queue.
  cudaStream_t own_stream = nullptr;
  /// Allocations are ordered here, so that giving memory back doesn't wait for the whole GPU. Null: there are no pools.
  cudaStream_t memory_stream = nullptr;

  /// Compute capability, as 10 * major + minor.
  int capability() const { return 10 * properties.major + properties.minor; }
  int processors() const { return properties.multiProcessorCount; }

  /// Makes it the thread's current GPU, and ready if it isn't yet.
  halfstep_status use();
  /// Lets another GPU read and write what this one's pool hands out, as copies between them need, where it can.
  void show_memory_to(const Device& other);
  /// check(), and notes that the GPU is lost if it is.
  halfstep_status check(cudaError_t error, const char* what);
  /// HALFSTEP_LOST, noted, once the GPU is lost.
  halfstep_status present() const;
  /// What kernels found wrong since the last call: notes it and returns HALFSTEP_FAILED, else HALFSTEP_OK. After a
  /// wait.
  halfstep_status outcome();

  /// Waits for the work of all queues, one by one: what waits for the GPU as a whole breaks off what any thread records
  /// into a graph. Of a queue that records, for the work from before.
  cudaError_t wait();
  /// A queue that wait() waits for, and one that it doesn't any more.
  void add(std::shared_ptr<Queue> queue);
  std::shared_ptr<Queue> remove(const Queue* queue);

  /// The matrix library on this device, opened at its first use; null when it can't be (the failure is noted). In
  /// blas.cpp.
  Blas* blas();
  /// The convolution library, likewise; without it convolutions have slow kernels of our own. In dnn.cpp.
  Dnn* dnn();

 private:
  halfstep_status prepare();

  std::mutex mutex_;
  std::atomic<bool> ready_{false};
  std::shared_ptr<Blas> blas_;
  std::atomic<Blas*> opened_blas_{nullptr};  // asked for by every product
  std::shared_ptr<Dnn> dnn_;
  bool dnn_tried_ = false;
  std::set<int> shown_to_;  // ordinals
  std::mutex queues_mutex_;
  std::vector<std::shared_ptr<Queue>> queues_;
};

/// A stream, behind halfstep_queue.
struct Queue {
  explicit Queue(Device* device) : device(device) {}
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  Device* const device;
  cudaStream_t stream = nullptr;  ///< null once the queue is destroyed
  cudaEvent_t place = nullptr;    ///< up to where Device::wait() waits
  std::mutex mutex;               ///< of the two above and of what begins to record, for Device::wait()
  /// Between graph_begin and graph_end: what is enqueued becomes part of a graph.
  std::atomic<bool> recording{false};
  std::vector<std::shared_ptr<const void>> kept;  ///< what that graph needs for as long as it may be launched

  void keep(std::shared_ptr<const void> part) {
    if (recording.load(std::memory_order_relaxed)) kept.push_back(std::move(part));
  }
  /// HALFSTEP_FAILED, noted, while it records, which `what` can't be part of.
  halfstep_status refuse_while_recording(const char* what) const;
};

/// Finds the GPUs; none without a driver. Called once, before everything else. The host, which log() speaks through,
/// may be null.
void find_devices(const halfstep_host* host);
/// Says something to the user; `level` is HALFSTEP_LOG_...
void log(int32_t level, const std::string& text);
/// Makes a GPU that is in use the thread's current one, for calls that belong to none: CUDA would start its first GPU
/// for them, whether the program uses it or not.
void use_any();
/// How many there are.
int device_count();
/// One of them; null, and noted, when there is no such one.
Device* device_at(int32_t index);

/// Whether float32 products may be computed in TF32 (19 bits, of which 10 of mantissa). Off at first, as in PyTorch;
/// HALFSTEP_TF32=1 or allow_tf32() turn it on.
bool tf32_allowed();
void allow_tf32(bool allowed);

}  // namespace hscuda
