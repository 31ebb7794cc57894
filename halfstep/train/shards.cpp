// SPDX-License-Identifier: Apache-2.0
#include <bit>

#include "halfstep/core/fail.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/view.h"
#include "halfstep/train/shards_internal.h"
#include "halfstep/train/train_step.h"

namespace halfstep::training {

dist::CommunicationHook shard_hook() {
  return [](const dist::GradBucket& bucket, const dist::ProcessGroup& of) -> std::function<void()> {
    if (!std::has_single_bit(static_cast<unsigned>(of.size()))) {
      fail<Error>("train_step: shards that are added up as a tree need a power of 2 of ranks, got {}", of.size());
    }
    dist::ProcessGroup group = of;
    const Tensor all =
        empty({of.size() * bucket.buffer.numel()}, {.dtype = bucket.buffer.dtype(), .device = bucket.buffer.device()});
    const dist::Work work = group.all_gather(all, bucket.buffer, fmt::format("gradients of bucket {}", bucket.index));
    return [work, all, into = bucket.buffer, ranks = of.size()]() mutable {
      work.wait();
      Tree tree;
      for (int r = 0; r < ranks; ++r) tree.add({all.narrow(0, r * into.numel(), into.numel())});
      into.copy_(tree.sum()[0]);
    };
  };
}

}  // namespace halfstep::training
