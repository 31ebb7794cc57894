// SPDX-License-Identifier: Apache-2.0
// When results are written with non-temporal stores.
#pragma once

#include <cstdint>

#include "halfstep/runtime/kernel.h"

namespace halfstep::cpu {

/// Whether a result of so many bytes is written past the caches. A normal store reads the line that it overwrites
/// first, which costs more than the cache gives once a result fills much of it: from an eighth of the last cache or 4
/// MB on, by measurement.
bool written_past_caches(std::int64_t bytes);
inline bool written_past_caches(const TensorView& result) {
  return written_past_caches(result.numel * static_cast<std::int64_t>(item_size(result.dtype)));
}

}  // namespace halfstep::cpu
