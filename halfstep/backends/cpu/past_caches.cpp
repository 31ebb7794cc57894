// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/past_caches.h"

#include <algorithm>

#include "halfstep/runtime/machine_limits.h"

namespace halfstep::cpu {

bool written_past_caches(std::int64_t bytes) {
  // Measured with last caches of 32 MB, and of 300 and 480 MB that other machines share.
  constexpr std::int64_t kMostKept = 4 << 20;
  static const std::int64_t least = std::min(last_cache_bytes() / 8, kMostKept);
  return bytes >= least;
}

}  // namespace halfstep::cpu
