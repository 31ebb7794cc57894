// SPDX-License-Identifier: Apache-2.0
// Internal: what guards of autocast change about their thread, and how it is undone: in the order that the changes were
// made in, whatever the order in which the guards go, and on the thread they were made on.
#pragma once

#include <memory>

#include "halfstep/ops/op.h"

namespace halfstep::amp::detail {

struct Region;

/// Makes `inner` this thread's state. `cached`: a region of the cast cache, too.
std::shared_ptr<Region> open_region(AutocastState inner, bool cached);
/// Undoes that. A region that isn't this thread's innermost one is undone when those inside it are, one of another
/// thread with that thread's next op; the log says so. Does nothing for null.
void close_region(const std::shared_ptr<Region>& region) noexcept;
/// Undoes what other threads closed of this thread's.
void undo_closed() noexcept;

}  // namespace halfstep::amp::detail
