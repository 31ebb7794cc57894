// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "halfstep/core/storage.h"

namespace halfstep {

/// What a caching allocator holds, in bytes, since the start of the program or reset_peak_memory().
struct MemoryStats {
  std::uint64_t allocated = 0;       ///< handed out now
  std::uint64_t allocated_peak = 0;  ///< the most that was handed out at a time
  std::uint64_t reserved = 0;        ///< taken from the system or device now: handed out or cached
  std::uint64_t reserved_peak = 0;
  std::uint64_t allocations = 0;  ///< calls
  std::uint64_t cache_hits = 0;   ///< calls served from a cached block
  // Of devices only:
  std::uint64_t blocks = 0;         ///< handed out now
  std::uint64_t segments = 0;       ///< taken from the device now
  std::uint64_t split = 0;          ///< free bytes of partly used segments: cached, but can't be released
  std::uint64_t held_back = 0;      ///< bytes that are free once another queue's work is done
  std::uint64_t retries = 0;        ///< how often the device ran out of memory until cached blocks were released
  std::uint64_t out_of_memory = 0;  ///< calls that failed
  // Of every device:
  std::uint64_t limit = 0;  ///< set_memory_limit(), or the CPU's set_memory_cache_limit(); 0: none
};

/// A block of a device's memory.
struct MemoryBlock {
  std::uint64_t segment = 0;  ///< number of its segment
  std::uint64_t offset = 0;   ///< in bytes, in the segment
  std::uint64_t bytes = 0;
  std::uint64_t requested = 0;  ///< requested size; 0 for a free one
  bool in_use = false;          ///< handed out
  bool held_back = false;       ///< free once another queue's work is done
  std::string made_by;          ///< the op that it was allocated for; empty if unknown
};

/// Statistics of a device's allocator. Here and below: the CPU's unless a device is named; meta's are what the CPU's
/// would be. Throws DeviceError.
HS_API MemoryStats memory_stats(Device device = {});
/// Resets the peaks to what is held now.
HS_API void reset_peak_memory(Device device = {});
/// Returns cached memory to the system. On the CPU the free parts of huge pages that are in use stay; on a device it
/// waits until its work is done.
HS_API void empty_memory_cache(Device device = {});
/// Turns caching of blocks on or off (default on; HALFSTEP_NO_CACHE=1 turns it off, which is useful with memory
/// checkers).
HS_API void set_memory_caching(bool on, Device device = {});
/// The most bytes that the allocator of a device takes from it; 0: no limit of ours. Allocations beyond it fail as if
/// the device had no more. Throws DeviceError for the CPU and meta.
HS_API void set_memory_limit(std::uint64_t bytes, Device device);
/// Where the CPU's allocator has to take more memory from the system and would then hold more than `bytes`, in use and
/// cached, cached blocks go back first, small ones where they are more than a 64th of the limit; 0: no limit (the
/// default). What is in use may exceed it: no allocation fails for it. Without a limit the holes between large blocks
/// stay cached, some percent more than what is in use. A hole that was given back costs time when it is next used,
/// since the system clears its pages: for the first steps of a run that is then captured, not for each step.
HS_API void set_memory_cache_limit(std::uint64_t bytes);
/// Sets that limit for the guard's lifetime, then the one before. Guards nest; one thread has them at a time.
class HS_API MemoryCacheLimitGuard {
 public:
  explicit MemoryCacheLimitGuard(std::uint64_t bytes);
  ~MemoryCacheLimitGuard();
  MemoryCacheLimitGuard(const MemoryCacheLimitGuard&) = delete;
  MemoryCacheLimitGuard& operator=(const MemoryCacheLimitGuard&) = delete;

 private:
  std::uint64_t before_;
};
/// Whether `bytes` more bytes can be allocated on the CPU, in blocks of any size: from cached memory, and for the rest
/// within the process's resource limits and the system's overcommit rules. Doesn't tell how much memory other programs
/// leave. Allocates nothing.
HS_API bool can_allocate(std::uint64_t bytes);
/// All blocks of a device's memory, for debugging; empty for the CPU and meta.
HS_API std::vector<MemoryBlock> memory_snapshot(Device device);

/// The op for which this thread allocates, reported in out-of-memory errors and snapshots; for the op layer. The text
/// must live as long as the program; null: unknown.
HS_API const char*& allocation_label();

}  // namespace halfstep
