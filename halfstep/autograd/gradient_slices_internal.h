// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "halfstep/autograd/node.h"

namespace halfstep {

/// Gradients of slices of one tensor that have come in during a backward pass; elsewhere they are zero. Slices that
/// tile the tensor (split, chunk, unbind) are joined in one pass over it; others are added to one tensor of zeros.
/// Either way n slices cost no n tensors of full size.
class GradientSlices {
 public:
  bool empty() const { return slices_.empty(); }
  /// Elements that are held.
  std::int64_t numel() const { return numel_; }
  /// The last node that sent one; not to be called when empty.
  const Node& source() const { return *slices_.back().source; }

  void add(Tensor gradient, const GradSlice& place, Ref<Node> source);
  /// The sum of all and of `sum` (undefined: none), in `sum` itself where `own` says that it may be written to, else in
  /// a new tensor. Slices that don't tile the tensor add up in `dtype`, which is the sum's. Nothing is held afterwards.
  Tensor add_to(const Tensor& sum, bool own, const OutputMeta& meta, DType dtype);

 private:
  struct Slice {
    Tensor gradient;
    GradSlice place;
    Ref<Node> source;
  };

  // The gradients in the order of their places, if together they are the whole tensor, each place once.
  std::vector<Tensor> tiles(const Shape& sizes) const;

  std::vector<Slice> slices_;
  std::int64_t numel_ = 0;
};

}  // namespace halfstep
