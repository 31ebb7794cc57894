// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "halfstep/dist/process_group.h"

namespace halfstep::dist {

/// Gradients that are reduced together: what a communication hook is given.
struct GradBucket {
  int index = 0;                   ///< buckets are reduced in this order, from 0
  bool is_last = false;            ///< no more of them in this backward pass
  Tensor buffer;                   ///< all of the bucket's gradients, flat; the mean over the ranks goes here
  std::vector<Tensor> gradients;   ///< the parts of it, in the shapes of the parameters
  std::vector<std::string> names;  ///< of the parameters
};
/// Starts the reduction of a bucket and returns what finishes it: afterwards the buffer holds the mean over the ranks.
/// Called on the thread of the backward pass; no autograd records it.
using CommunicationHook = std::function<std::function<void()>(const GradBucket& bucket, const ProcessGroup& group)>;

/// A hook that sends gradients in 16 bits, f16 or bf16, and makes them float32 again: half of the bytes. They are
/// summed in float32 and rounded once more (ProcessGroup). In f16 a gradient that overflows becomes infinite on all
/// ranks, so that a gradient scaler skips the step on all of them. PyTorch's fp16_compress_hook, which sums in 16 bits.
/// Throws DTypeError for other dtypes.
HS_API CommunicationHook compress_hook(DType dtype);

}  // namespace halfstep::dist
