// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>

#include "halfstep/core/tensor.h"  // IWYU pragma: keep

namespace halfstep {

/// What a Tensor points to. For the library and for extensions; programs use Tensor.
class HS_API TensorImpl {
 public:
  static Ref<TensorImpl> make(Ref<Storage> storage, std::int64_t offset, const Shape& sizes, const Shape& strides,
                              DType dtype);

  /// The memory, the part of it that this tensor is, and what lies there.
  Ref<Storage> storage;
  std::int64_t offset;  ///< in elements
  Shape sizes;
  Shape strides;
  std::int64_t numel;
  DType dtype;
  bool contiguous;             ///< row-major without gaps
  bool requires_grad = false;  ///< kept by autograd: recorded, as a leaf or as a result
  /// For a view: the tensor whose storage it is a part of (never itself a view).
  Ref<TensorImpl> base;
  std::unique_ptr<GradSlot> grad_slot;

  void* data() const {
    return static_cast<char*>(storage->data()) + offset * static_cast<std::int64_t>(item_size(dtype));
  }

  void retain() { refs_.fetch_add(1, std::memory_order_relaxed); }
  void release() {
    if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) destroy();
  }
  /// A count more, unless the last one is gone already.
  bool try_retain() {
    std::uint32_t n = refs_.load(std::memory_order_relaxed);
    while (n != 0 && !refs_.compare_exchange_weak(n, n + 1, std::memory_order_acquire)) {
    }
    return n != 0;
  }
  std::uint32_t use_count() const { return refs_.load(std::memory_order_relaxed); }

 private:
  TensorImpl(Ref<Storage> storage, std::int64_t offset, const Shape& sizes, const Shape& strides, DType dtype);
  void destroy();

  std::atomic<std::uint32_t> refs_{1};
};

}  // namespace halfstep
