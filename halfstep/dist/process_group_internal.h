// SPDX-License-Identifier: Apache-2.0
// Internal: a collective on its way from the caller to the communication thread, and what others may ask of that
// thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "halfstep/core/export.h"
#include "halfstep/core/tensor.h"
#include "halfstep/dist/mpi_table_internal.h"
#include "halfstep/dist/process_group.h"
#include "halfstep/dist/retired_groups_internal.h"

namespace halfstep::dist::detail {

/// While a collective waits for other ranks `check` is called every few milliseconds, on the communication thread; if
/// it returns a text, that collective and all later ones throw DistError with it. Empty function: no check.
HS_API void set_abort_check(std::function<std::string()> check);

/// The collective that the communication thread runs now.
struct CurrentCollective {
  std::string text;  ///< `all_reduce #41 (bucket 3): f32 [4096] sum`
  std::uint64_t sequence = 0;
  double seconds = 0;  ///< since it began
};
HS_API std::optional<CurrentCollective> current_collective();

enum class CallKind : std::uint8_t {
  all_reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  gather,
  scatter,
  all_to_all,
  all_gather_parts,
  reduce_scatter_parts,
  barrier,
  all_gather_text,
  broadcast_text,
  split,
  free,
  exit,  ///< the process ends
  send,
  receive,
};
const char* name(CallKind kind);

class DeviceGroup;
struct DeviceOperands;

/// What all handles of a group share.
struct GroupState {
  GroupState() = default;
  GroupState(const GroupState&) = delete;
  GroupState& operator=(const GroupState&) = delete;
  /// What split() has made for the group is retired.
  ~GroupState();

  int rank = 0, size = 1, local_rank = 0, local_size = 1;
  std::vector<std::string> hosts;
  std::string library = "one process";
  Reduction reduction = Reduction::rank_order;
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  halfstep_mpi_comm* comm = nullptr;  ///< null: a group of one, or one that was freed
  std::vector<int> members;           ///< ranks of the job, in the order of the group's
  GroupIdentity identity;             ///< of a group of split()
  std::atomic<bool> freed{false};
  std::uint64_t next_sequence = 0;  ///< under the communication thread's mutex
  // Of the communication thread alone (device_group_internal.h).
  std::shared_ptr<DeviceGroup> device_group;  ///< null until a collective wants it
  bool no_device_group = false;               ///< it can't be made
  std::uint64_t device_collectives = 0;       ///< that the devices have begun
};

/// What the process has done so far, in all groups.
class StatsCounter {
 public:
  static StatsCounter& get();
  /// Adds each of the numbers.
  void add(const CommunicationStats& more);
  CommunicationStats read() const;

 private:
  mutable std::mutex mutex_;
  CommunicationStats total_;
};

/// Memory of the host, aligned as tensors are.
class HostBuffer {
 public:
  HostBuffer() = default;
  explicit HostBuffer(std::size_t bytes) : data_(::operator new (bytes, std::align_val_t{64})) {}
  HostBuffer(HostBuffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  HostBuffer& operator=(HostBuffer other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~HostBuffer() {
    if (data_) ::operator delete (data_, std::align_val_t{64});
  }
  char* data() const { return static_cast<char*>(data_); }

 private:
  void* data_ = nullptr;
};

/// How a call ended, for those who wait for it.
struct WorkState {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::exception_ptr error;
  std::function<void()> copy_back;  ///< to a device, by the first who waits
};

/// A call: what it does, and the memory that it uses until it is done.
struct Call {
  CallKind kind = CallKind::barrier;
  ReduceOp op = ReduceOp::sum;
  DType dtype = DType::u8;
  int root = -1;                     ///< -1: it has none
  std::int64_t count = 0;            ///< elements of the part that each rank gives or gets
  std::uint32_t layout = 0;          ///< of a tensor that isn't row-major
  std::vector<std::int64_t> counts;  ///< elements of the ranks' parts, where they differ
  std::string label;
  std::string operand;  ///< `f32 [64, 64]`
  std::uint64_t sequence = 0;

  const void* input = nullptr;  ///< in the host's memory, as is output
  void* output = nullptr;
  int peer = -1, tag = 0;          // send, receive
  int color = 0, key = 0;          // split
  std::string text;                // what a rank gives
  std::vector<std::string> texts;  // what it gets
  std::shared_ptr<GroupState> made;
  std::shared_ptr<DeviceOperands> on_device;  ///< null: on the host
  std::uint32_t offer = 0;                    ///< device_offer()

  std::shared_ptr<GroupState> group;
  std::shared_ptr<WorkState> state = std::make_shared<WorkState>();
  std::vector<Tensor> tensors;  ///< kept until the call is done
  std::vector<Tensor> written;  ///< those of the host that it writes
  std::vector<HostBuffer> buffers;

  std::int64_t bytes() const { return count * static_cast<std::int64_t>(item_size(dtype)); }
  /// `all_reduce #41 (bucket 3)`.
  std::string title() const;
  /// `all_reduce f32 [4096] sum (bucket 3)`, what ranks compare.
  std::string action() const;
};

}  // namespace halfstep::dist::detail
