// SPDX-License-Identifier: Apache-2.0
// A device, and what all devices share.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "faults.h"
#include "halfstep/runtime/plugin_helpers.h"
#include "memory.h"

namespace sim {

using namespace halfstep_plugin_helpers;

class Queue;

constexpr int32_t kPriorities = 3;

/// One device: memory, queues, and the first failure of queued work since a call that waits told of one.
class Device {
 public:
  Device(int32_t index, uint64_t bytes) : index(index), memory(bytes) {}

  const int32_t index;
  DeviceMemory memory;

  bool lost() const { return lost_.load(std::memory_order_acquire); }
  /// The device is gone: queues drop their work, calls are refused.
  void lose() { lost_.store(true, std::memory_order_release); }
  void restore();
  /// HALFSTEP_LOST where the device is gone, else HALFSTEP_OK.
  halfstep_status present() const;

  /// Of queued work. Later failures than the first are often its consequences: they are only counted.
  void note_failure(uint64_t call, const std::string& text);
  /// For calls that have waited: whether the device is gone, or the failure since the last such call.
  halfstep_status outcome();

  Queue* create_queue(int32_t priority);
  /// Waits for what is in the queue; false when it is none of this device's.
  bool destroy_queue(Queue* queue);
  std::vector<std::shared_ptr<Queue>> queues() const;

  void profile(bool on) { profiling_.store(on, std::memory_order_relaxed); }
  bool profiling() const { return profiling_.load(std::memory_order_relaxed); }
  void add_record(const halfstep_record& record);
  uint64_t take_records(halfstep_record* records, uint64_t capacity);

  /// How long queues have worked, in nanoseconds.
  std::atomic<uint64_t> busy_ns{0};

 private:
  std::atomic<bool> lost_{false};
  std::atomic<bool> profiling_{false};
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Queue>> queues_;
  std::vector<halfstep_record> records_;
  uint64_t failures_ = 0;
  uint64_t failed_call_ = 0;
  std::string failure_;
};

/// What exists once.
struct Machine {
  const halfstep_host* host = nullptr;
  std::vector<std::unique_ptr<Device>> devices;
  PinnedMemory pinned;
  Faults faults;
  std::atomic<bool> ending{false};  ///< nothing waits for other processes any more
  std::atomic<uint32_t> queues_made{0};
  std::atomic<uint64_t> kernels{0}, failed_kernels{0}, copies{0}, copied_bytes{0}, waiting_copies{0}, allocations{0},
      host_reads{0}, graph_launches{0};

  /// The device of that index, or null (and a failure is noted).
  Device* device(int32_t index) const;
};

/// Set by halfstep_plugin(). Never destroyed when the program just ends: queues' threads may still be at work then.
Machine& machine();
bool is_running();
void set_machine(std::unique_ptr<Machine> made);
/// Ends all threads and gives everything back.
void end_machine();

/// Nanoseconds of CLOCK_MONOTONIC, which is the devices' clock too.
uint64_t now_ns();

}  // namespace sim
