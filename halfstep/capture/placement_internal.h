// SPDX-License-Identifier: Apache-2.0
// Internal: places in memory for what a step needs at different times.
#pragma once

#include <cstddef>
#include <span>

#include "halfstep/core/export.h"

namespace halfstep::detail {

/// Bytes that are in use from the call `first` to the call `last`, included.
struct Placement {
  std::size_t bytes = 0;
  std::size_t first = 0, last = 0;
  std::size_t offset = 0;
  bool fixed = false;  ///< its offset is given
};

/// Gives each a place, so that what is in use at the same time has no byte in common, and returns the end of the
/// highest place. None lies across `border`, where another block of memory begins; those that are fixed end there or
/// before it. The same list always gives the same places. Tries several orders, largest first among them, each with the
/// tightest gap and with the lowest, and keeps the one with the lowest end: finding the least possible is as hard as
/// packing bins, but the result is rarely more than some percent above the most that is in use at a time.
HS_API std::size_t find_places(std::span<Placement> all, std::size_t border = 0);

/// The most bytes that are in use at a time: no places can end lower.
HS_API std::size_t most_in_use(std::span<const Placement> all);

}  // namespace halfstep::detail
