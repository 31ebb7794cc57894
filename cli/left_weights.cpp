// SPDX-License-Identifier: Apache-2.0
#include "cli/left_weights.h"

#include <algorithm>
#include <string_view>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/reduce.h"

namespace halfstep::cli {

void LeftWeights::round(std::span<const std::string> modules) {
  if (dtype_ == f32) return;
  const NoGrad no_grad;
  const NamedTensors parameters = network_.parameters();
  for (const NamedTensor& t : parameters) {
    if (const auto before = before_.find(t.name); before != before_.end()) Tensor(t.tensor).copy_(before->second);
  }
  before_.clear();
  for (const NamedTensor& t : parameters) {
    const std::size_t dot = t.name.rfind('.');
    const std::string_view module = dot == std::string::npos ? "" : std::string_view(t.name).substr(0, dot);
    if (t.tensor.dtype() != f32 || std::ranges::find(modules, module) == modules.end()) continue;
    const Tensor rounded = t.tensor.to(dtype_);
    if (!all(isfinite(rounded)).item<bool>()) continue;
    before_.emplace(t.name, t.tensor.clone());
    Tensor(t.tensor).copy_(rounded);
  }
}

void LeftWeights::lower(NamedTensors& state) const {
  for (NamedTensor& t : state) {
    if (before_.contains(t.name)) t.tensor = t.tensor.detach().to(dtype_);
  }
}

NamedTensors in_16_bits(NamedTensors tensors, DType dtype) {
  for (NamedTensor& t : tensors) {
    const bool statistic = t.name.ends_with("running_mean") || t.name.ends_with("running_var");
    if (t.tensor.dtype() == f32 && !statistic) t.tensor = t.tensor.to(dtype);
  }
  return tensors;
}

}  // namespace halfstep::cli
