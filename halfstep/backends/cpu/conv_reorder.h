// SPDX-License-Identifier: Apache-2.0
// Convolutions of images that don't lie channels-last.
#pragma once

#include "halfstep/backends/cpu/conv.h"

namespace halfstep::cpu {

/// Whether the call is to go by convolve_reordered(): images of floats of at most 32 bits, of which some don't lie
/// channels-last, and a path for those that do. Not where that is ConvPath::blocks, which brings a few images at a time
/// to that layout while they are in the cache.
HS_API bool needs_reorder(const ConvCall& call) noexcept;

/// The call on images that lie channels-last: those of `call` that do, and dense ones at `input` and `output` instead
/// of the others. Of calls that needs_reorder().
class ReorderedCall {
 public:
  ReorderedCall(const ConvCall& call, void* input, void* output);
  ReorderedCall(const ReorderedCall&) = delete;
  ReorderedCall& operator=(const ReorderedCall&) = delete;
  ConvCall call;

 private:
  std::int64_t strides_[2][4];
};

/// Brings images to channels-last, in the workspace, so that the call may go by any path, 16-bit units among them; and
/// the result back to where it belongs.
HS_API Status convolve_reordered(KernelContext* context, ConvCall& call);

}  // namespace halfstep::cpu
