// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/communication_hook.h"

#include "halfstep/core/fail.h"
#include "halfstep/ops/copy.h"

namespace halfstep::dist {

CommunicationHook compress_hook(DType dtype) {
  if (!is_low_precision(dtype)) fail<DTypeError>("compress_hook: expected f16 or bf16, got {}", name(dtype));
  return [dtype](const GradBucket& bucket, const ProcessGroup& group) -> std::function<void()> {
    ProcessGroup g = group;
    const std::string label = fmt::format("{} gradients of bucket {}: {}", name(dtype), bucket.index, bucket.names[0]);
    if (bucket.buffer.dtype() == dtype) {
      return [work = g.all_reduce(bucket.buffer, ReduceOp::mean, label)] { work.wait(); };
    }
    const Tensor narrow = bucket.buffer.to(dtype);
    return [work = g.all_reduce(narrow, ReduceOp::mean, label), narrow, wide = bucket.buffer]() mutable {
      work.wait();
      wide.copy_(narrow);
    };
  };
}

}  // namespace halfstep::dist
