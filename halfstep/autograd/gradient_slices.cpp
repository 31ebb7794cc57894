// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "halfstep/autograd/gradient_slices_internal.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/view.h"

namespace halfstep {

void GradientSlices::add(Tensor gradient, const GradSlice& place, Ref<Node> source) {
  numel_ += gradient.numel();
  slices_.push_back({std::move(gradient), place, std::move(source)});
}

std::vector<Tensor> GradientSlices::tiles(const Shape& sizes) const {
  const int dim = slices_[0].place.dim;
  const DType dtype = slices_[0].gradient.dtype();
  std::vector<const Slice*> order;
  for (const Slice& s : slices_) {
    if (s.place.dim != dim || s.place.step != 1 || s.gradient.dtype() != dtype) return {};
    if (s.place.start != s.place.end) order.push_back(&s);
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const Slice* a, const Slice* b) { return a->place.start < b->place.start; });
  std::vector<Tensor> result;
  std::int64_t at = 0;
  for (const Slice* s : order) {
    if (s->place.start != at) return {};
    at = s->place.end;
    result.push_back(s->place.selected ? s->gradient.unsqueeze(dim) : s->gradient);
  }
  if (at != sizes[dim]) return {};
  return result;
}

Tensor GradientSlices::add_to(const Tensor& sum, bool own, const OutputMeta& meta, DType dtype) {
  Tensor result;
  if (sum.defined()) {
    result = own ? sum : sum.clone();
  } else if (const std::vector<Tensor> parts = tiles(meta.sizes); !parts.empty()) {
    result = cat(parts, slices_[0].place.dim);
    slices_.clear();
  } else {
    const Slice first = std::move(slices_.front());
    slices_.erase(slices_.begin());
    const GradSlice& at = first.place;
    const Tensor part = slices_.empty() ? first.gradient : first.gradient.to(dtype);
    result = slice_backward(at.selected ? part.unsqueeze(at.dim) : part, meta.sizes, at.dim, at.start, at.end, at.step);
  }
  for (Slice& s : slices_) {
    const GradSlice& at = s.place;
    Tensor part = at.selected ? result.select(at.dim, at.start) : result.slice(at.dim, at.start, at.end, at.step);
    part.add_(s.gradient);
    s.gradient = Tensor();  // freed as it is used up
  }
  slices_.clear();
  numel_ = 0;
  return result;
}

}  // namespace halfstep
