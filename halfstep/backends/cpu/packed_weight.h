// SPDX-License-Identifier: Apache-2.0
// Weights in the order of a kernel, made for a call or kept with the memory of the weight.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "halfstep/core/storage.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep::cpu {

/// Memory that a weight was packed into, which it may be kept with.
struct PackedWeight {
  void* data = nullptr;  ///< null: there is none
  Ref<Storage> kept;
};

/// `weight` [., ., ., .], packed by `pack`(memory of `bytes`), or as it was kept with `storage` (null: never), which it
/// is when it is asked for again and again without being changed, as evaluation does. `order` and `variant` tell apart
/// what is made of one weight; orders from 0 on are oneDNN's. A dry run packs nothing.
PackedWeight packed_weight(KernelContext* context, Storage* storage, const TensorView& weight, std::int64_t order,
                           std::int64_t variant, std::size_t bytes, const std::function<void(void*)>& pack);

}  // namespace halfstep::cpu
