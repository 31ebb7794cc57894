// SPDX-License-Identifier: Apache-2.0
// Input gradients of 1x1 convolutions with strides.
#pragma once

#include "halfstep/backends/cpu/conv.h"

namespace halfstep::cpu {

/// Whether convolve_spread() serves the call: an input gradient of one place's window that doesn't see every place,
/// without padding before it and without bias, of floats of at most 32 bits that lie channels-last.
HS_API bool is_spread(const ConvCall& call) noexcept;

/// The call without strides: `call.input` is then as large as the output, with `data` in it. Of calls that is_spread().
class SpreadCall {
 public:
  SpreadCall(const ConvCall& call, void* data);
  SpreadCall(const SpreadCall&) = delete;
  SpreadCall& operator=(const SpreadCall&) = delete;
  ConvCall call;

 private:
  std::int64_t sizes_[4], strides_[4];
};

/// A product without strides, whose places are then spread among the zeros of those that no window sees. oneDNN's
/// kernels for strides take about twice as long by AMX, 1.1 to 1.3 times in float32 (ResNet-50's, on an Emerald
/// Rapids).
HS_API Status convolve_spread(KernelContext* context, ConvCall& call);

}  // namespace halfstep::cpu
