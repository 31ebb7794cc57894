// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "halfstep/core/storage.h"

namespace halfstep {

/// What the caching allocator of the CPU holds, in bytes, since the start of the program or reset_peak_memory().
struct MemoryStats {
  std::uint64_t allocated = 0;       ///< handed out now
  std::uint64_t allocated_peak = 0;  ///< the most that was handed out at a time
  std::uint64_t reserved = 0;        ///< taken from the system now: handed out or kept for later
  std::uint64_t reserved_peak = 0;
  std::uint64_t allocations = 0;  ///< calls
  std::uint64_t cache_hits = 0;   ///< calls served from a kept block
};

/// Statistics of the CPU's allocator.
HS_API MemoryStats memory_stats();
/// Starts the peaks anew from what is held now.
HS_API void reset_peak_memory();
/// Gives all kept blocks back to the system.
HS_API void empty_memory_cache();
/// Turns keeping of blocks on or off (default on; HALFSTEP_NO_CACHE=1 turns it off, which memory checkers want).
HS_API void set_memory_caching(bool on);

}  // namespace halfstep
