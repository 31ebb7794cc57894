// SPDX-License-Identifier: Apache-2.0
// The memory of a device, and pinned memory of the host.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>

#include "halfstep/runtime/plugin.h"

namespace sim {

/// One memfd, mapped twice. The host is given addresses in the first mapping, which nobody may read or write: a host
/// that does so faults, as it would on hardware. Queues work through the second mapping.
class DeviceMemory {
 public:
  explicit DeviceMemory(uint64_t bytes);  ///< throws std::runtime_error where the system refuses
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  /// The first hole that is large enough; false where there is none. Fresh memory holds 0xff, NaN in every floating
  /// type, so that reading what was never written is seen.
  bool allocate(uint64_t bytes, void** data);
  /// The bytes of the live allocation that starts at `data`, 0 where there is none.
  uint64_t size_of(const void* data) const;
  /// False unless a live allocation starts at `data`.
  bool deallocate(void* data);
  uint64_t free_bytes() const;
  uint64_t total_bytes() const { return bytes_; }

  /// Whether an address belongs to the mapping that the host must not touch.
  bool contains(const void* address) const {
    return address >= handles_ && address < static_cast<const void*>(handles_ + bytes_);
  }
  /// Where queues find `bytes` bytes at a host's address; null unless they lie within one live allocation.
  char* translate(const void* address, uint64_t bytes) const;

 private:
  uint64_t bytes_;
  int file_ = -1;
  char* handles_ = nullptr;
  char* work_ = nullptr;
  mutable std::mutex mutex_;
  std::map<uint64_t, uint64_t> holes_;  ///< offset to size; holes never touch each other
  std::map<uint64_t, uint64_t> used_;
  uint64_t used_bytes_ = 0;
};

/// Host memory from host_allocate, which copies reach without the call waiting for them.
class PinnedMemory {
 public:
  ~PinnedMemory();
  void* allocate(uint64_t bytes);  ///< null: none left
  bool deallocate(void* data);
  /// Whether all of the bytes lie in one allocation.
  bool contains(const void* address, uint64_t bytes) const;

 private:
  mutable std::mutex mutex_;
  std::map<const char*, uint64_t> blocks_;
};

}  // namespace sim
