// SPDX-License-Identifier: Apache-2.0
// Matrix products for kernels that are made of them.
#pragma once

#include <memory>

#include "host/kernel.h"
#include "libraries/product.h"

namespace hscuda {

class BlasPlan;

/// What the products of one call work in, one after the other. Taken from the call before anything is enqueued, so that
/// running out of memory leaves nothing behind.
class ProductSpace {
 public:
  explicit ProductSpace(const Call& call) : call_(call) {}
  /// Makes sure that there is room for a product of this kind (or for any of them); false: no memory.
  bool reserve(const Product& product);
  bool reserve_any();

 private:
  friend halfstep_status multiply(const Call& call, const Product& product, ProductSpace& space);
  bool grow(std::size_t bytes);

  const Call& call_;
  const Product* reserved_ = nullptr;  // the plan is for this one
  std::shared_ptr<BlasPlan> plan_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Enqueues a product: by cuBLASLt if it can, else by a kernel of our own, which takes any strides, dtypes of one kind
/// and sizes. c must not overlap a or b. Nothing is done for empty results.
halfstep_status multiply(const Call& call, const Product& product, ProductSpace& space);

/// A tensor of the last two dimensions of `x`, and the one before them as a batch if there is one.
inline Matrices matrices_of(const Tensor& x) {
  const int d = x.ndim - 2;
  return {x.data, x.strides[d], x.strides[d + 1], d > 0 ? x.strides[d - 1] : 0};
}

}  // namespace hscuda
