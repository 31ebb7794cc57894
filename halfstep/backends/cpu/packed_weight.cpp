// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/packed_weight.h"

#include <algorithm>
#include <exception>

#include "halfstep/backends/cpu/row_block.h"

namespace halfstep::cpu {

PackedWeight packed_weight(KernelContext* context, Storage* storage, const TensorView& weight, std::int64_t order,
                           std::int64_t variant, std::size_t bytes, const std::function<bool(void*)>& pack) {
  Storage::DerivedKey key = {};
  PackedWeight result;
  if (storage != nullptr) {
    key = {order, variant, static_cast<const char*>(weight.data) - static_cast<const char*>(storage->data())};
    std::copy_n(weight.sizes, 4, key.begin() + 3);
    std::copy_n(weight.strides, 4, key.begin() + 7);
    result.kept = storage->derived(key);
    if (result.kept) {
      result.data = result.kept->data();
      return result;
    }
    if (storage->keeps_derived(key)) {
      try {
        result.kept = Storage::allocate(bytes, storage->device());
      } catch (const std::exception&) {
        // For this call then, if there is memory for that.
      }
    }
  }
  if (result.kept) result.data = result.kept->data();
  if (result.data == nullptr) result.data = context->workspace(context, bytes);
  if (result.data == nullptr || !pack(result.data)) return {};
  if (result.kept) storage->keep_derived(key, result.kept);
  return result;
}

}  // namespace halfstep::cpu
