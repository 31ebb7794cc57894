// SPDX-License-Identifier: Apache-2.0
// Any bytes are either read as an IDX array of the size that its shape says, or refused with an IoError.
#include "halfstep/data/idx.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "halfstep/core/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // A low limit keeps each run short; it is checked before memory is taken, so a higher one finds nothing more.
  constexpr std::uint64_t kLimit = 1 << 20;
  try {
    const halfstep::data::IdxArray array =
        halfstep::data::parse_idx(std::span(data, size), "input", {.max_bytes = kLimit});
    std::uint64_t expected = static_cast<std::uint64_t>(halfstep::data::idx_item_size(array.type));
    bool empty = false;
    for (const std::int64_t n : array.shape) empty = empty || n == 0;
    for (const std::int64_t n : array.shape) expected = empty ? 0 : expected * static_cast<std::uint64_t>(n);
    if (array.data.size() != expected || expected > kLimit) std::abort();
  } catch (const halfstep::IoError&) {
  }
  return 0;
}
