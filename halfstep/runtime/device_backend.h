// SPDX-License-Identifier: Apache-2.0
// The runtime's representation of a kind of device provided by a plug-in. For the library; programs use
// runtime/devices.h.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "halfstep/core/device.h"
#include "halfstep/core/dtype.h"
#include "halfstep/core/export.h"
#include "halfstep/runtime/kernel.h"
#include "halfstep/runtime/plugin.h"

namespace halfstep {

class DeviceAllocator;

/// The entries of one plug-in and the state of its devices. Lives until the program ends.
class HS_API DeviceBackend {
 public:
  /// `table` has been checked; entries that the plug-in lacks are null. Throws DeviceError when a device can't be
  /// asked.
  DeviceBackend(const halfstep_plugin_table& table, std::string path);
  ~DeviceBackend();
  DeviceBackend(const DeviceBackend&) = delete;
  DeviceBackend& operator=(const DeviceBackend&) = delete;

  /// The plug-in's full table: entries that it was compiled without are null.
  const halfstep_plugin_table table;
  const std::string path;   ///< of the library
  const std::string kind;   ///< `cuda`
  const std::uint8_t type;  ///< the number of the kind
  const int count;          ///< devices

  /// Whether the plug-in has all of an optional group of entries.
  bool has_pinned() const { return table.host_allocate && table.host_deallocate; }
  bool has_profile() const { return table.profile_start && table.profile_stop && table.profile_read; }
  bool has_graphs() const { return table.graph_begin && table.graph_end && table.graph_launch && table.graph_destroy; }
  bool has_collectives() const;

  /// One of the devices, its description by the plug-in, and its allocator.
  Device device(int index) const { return Device(type, static_cast<std::uint8_t>(index)); }
  const halfstep_device_info& info(int index) const { return infos_[static_cast<std::size_t>(index)]; }
  DeviceAllocator& allocator(int index) const { return *allocators_[static_cast<std::size_t>(index)]; }
  /// The default queue, created at its first use.
  halfstep_queue* default_queue(int index);
  /// The same for cleanup code: doesn't throw an error stored by defer(), which would be lost there.
  halfstep_queue* default_queue_unchecked(int index);
  /// Null before its first use.
  halfstep_queue* known_default_queue(int index) const {
    return default_queues_[static_cast<std::size_t>(index)].load(std::memory_order_acquire);
  }

  /// Throws the error for a failed plug-in call: OutOfMemoryError, DeviceLostError or DeviceError with the plug-in's
  /// reason and, for asynchronous work, the op that it failed in. `what`: the current call or op.
  void check(halfstep_status status, const char* what, int index) {
    if (status != HALFSTEP_OK) [[unlikely]]
      raise(status, what, index);
  }
  [[noreturn]] void raise(halfstep_status status, const char* what, int index);
  /// Throws DeviceLostError if the device has been lost, and any error stored by defer().
  void check_alive(const char* what, int index) {
    if (faults_[static_cast<std::size_t>(index)].load(std::memory_order_relaxed) != 0) [[unlikely]]
      raise_fault(what, index);
  }
  /// Stores the failure of a call that can't throw, for the next call that can: the plug-in reports a failure of
  /// asynchronous work only once, so it must not be lost.
  void defer(halfstep_status status, int index) noexcept;

  /// A number that identifies a call of `name` (which must live as long as the program).
  std::uint64_t begin_call(const char* name, int index);
  /// A number for calls of `name` that a graph repeats: it stays known for as long as the program runs.
  std::uint64_t graph_call(const char* name);
  /// The name of call `number`; null if it is too old.
  const char* call_name(std::uint64_t number, int index) const;
  /// The calls enqueued since the device was last waited for, oldest first, for errors without a number.
  std::string recent_calls(int index) const;
  /// The device has been waited for: earlier calls are done.
  void passed(int index);

  /// The kernel of an op, or null if the plug-in has none; looked up once, then cached in the table.
  KernelFn kernel(const KernelTable& op, DType dtype);
  /// Queries the plug-in again, for lists and warnings: whether there is a kernel, and if not, why.
  struct Answer {
    bool native = false;
    bool strided = false;
    std::string reason;
  };
  Answer ask(const std::string& op, int version, DType dtype) const;

  /// Shuts the plug-in down at the end of the program. Later calls throw, and objects destroyed later no longer call
  /// the plug-in.
  void shutdown();
  bool ended() const { return ended_.load(std::memory_order_acquire); }

 private:
  [[noreturn]] void raise_error(const halfstep_error& error, halfstep_status status, const char* what, int index);
  void raise_fault(const char* what, int index);
  [[noreturn]] void raise_lost(const char* what, int index, const std::string& why) const;

  static constexpr std::size_t kRemembered = 4096;
  static constexpr std::uint64_t kGraphCall = std::uint64_t{1} << 63;  // in the numbers of calls of graphs
  struct Calls {
    std::atomic<std::uint64_t> next{1};
    std::atomic<std::uint64_t> passed{0};
    std::array<std::atomic<const char*>, kRemembered> names{};
  };

  std::vector<halfstep_device_info> infos_;
  std::vector<std::unique_ptr<DeviceAllocator>> allocators_;
  std::vector<std::unique_ptr<Calls>> calls_;
  static constexpr std::uint8_t kLost = 1, kDeferred = 2, kEnded = 4;
  std::array<std::atomic<std::uint8_t>, kMaxDevices> faults_{};
  std::vector<halfstep_error> deferred_;  // one a device, under the mutex
  std::mutex lost_mutex_;                 // taken last
  std::vector<std::string> lost_;         // why, one a device, under lost_mutex_
  std::array<std::atomic<halfstep_queue*>, kMaxDevices> default_queues_{};
  std::atomic<bool> ended_{false};
  std::mutex mutex_;
  mutable std::mutex graph_mutex_;        // taken last
  std::vector<const char*> graph_names_;  // of graph_call(), under graph_mutex_
};

/// The plug-in of a kind of device; null for the CPU and for kinds that no plug-in has.
HS_API DeviceBackend* backend_of(std::uint8_t device_type);
/// The same for a device that must have one; throws DeviceError, naming the attempted operation `what`.
HS_API DeviceBackend& backend_for(Device device, const char* what);
/// All of them, in the order in which they were loaded.
HS_API std::vector<DeviceBackend*> backends();

}  // namespace halfstep
