// SPDX-License-Identifier: Apache-2.0
// The 16-bit copies of parameters. Inside a region, all uses of a parameter share one cast: one copy, one node in the
// graph, whose gradients are summed in float32. A copy is valid for one storage and its contents, so an in-place change
// creates a new one. If the parameter's address has been handed out (Storage::address_held()), writes through it go
// unnoticed, so each use makes its own copy. When the outermost region ends the copies are dropped, except those that
// an optimizer maintains: it rewrites them in the pass that updates the parameter, and the next forward pass finds them
// ready.
#pragma once

#include "halfstep/core/tensor.h"

namespace halfstep::amp {

/// `source` in `dtype`: through the cache for a float32 leaf that requires grad and whose address has not been handed
/// out, else an uncached cast. Recorded according to the thread's mode.
HS_API Tensor cached_cast(const Tensor& source, DType dtype);
/// Called as regions open and close on this thread.
void enter_region();
void leave_region();
/// Whether this thread is inside one, on or off.
HS_API bool in_region();

/// From now on the 16-bit copy of this parameter outlives regions; the optimizer rewrites it at each step.
HS_API void keep_copy(const Tensor& parameter, bool keep);
/// The cached copy of a parameter, for its optimizer to write: separate memory with the parameter's layout, or
/// undefined if there is none (it was never cast), it is or may become stale, or a graph still holds it. Call
/// copy_written() afterwards, even if the step leaves both unchanged.
HS_API Tensor kept_copy(const Tensor& parameter);
/// The copy now holds the parameter's current contents.
HS_API void copy_written(const Tensor& parameter);

/// How many casts this thread's cached_cast made, and how many uses found one ready; for tests and statistics.
struct CastStats {
  std::uint64_t casts = 0;
  std::uint64_t reused = 0;
};
HS_API CastStats& cast_stats();

}  // namespace halfstep::amp
