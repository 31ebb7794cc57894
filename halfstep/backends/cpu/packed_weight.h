// SPDX-License-Identifier: Apache-2.0
// Weights in the order of a kernel, made for a call or kept with the memory of the weight.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "halfstep/core/storage.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep::cpu {

/// A packed weight, and what owns it if it is kept.
struct PackedWeight {
  void* data = nullptr;  ///< null: there is none
  Ref<Storage> kept;
};

/// `weight` [., ., ., .] as it was kept with `storage` (null: never), or else packed by `pack`(memory of `bytes`), and
/// kept if it was requested before with the same contents, as in evaluation. `order` and `variant` distinguish what is
/// made of one weight; orders from 0 on are oneDNN's. Null when there is no memory or `pack` returns false. In a dry
/// run `pack` is called too, to request its workspace, and must not write.
PackedWeight packed_weight(KernelContext* context, Storage* storage, const TensorView& weight, std::int64_t order,
                           std::int64_t variant, std::size_t bytes, const std::function<bool(void*)>& pack);

}  // namespace halfstep::cpu
