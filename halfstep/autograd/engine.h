// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <vector>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// A function of any number of tensors, to be checked or recomputed.
using TensorFunction = std::function<std::vector<Tensor>(const std::vector<Tensor>&)>;

/// Runs the backward pass from several tensors together. `gradients` has one for each (undefined for tensors of one
/// element: 1). Gradients accumulate in the leaves' grad(). Throws AutogradError when a tensor has no history, a saved
/// tensor was changed, or the graph was freed.
HS_API void backward(const std::vector<Tensor>& outputs, const std::vector<Tensor>& gradients = {},
                     const BackwardOptions& options = {});

/// Options of grad().
struct GradOptions {
  std::vector<Tensor> grad_outputs = {};  ///< one for each output; empty: ones of one-element outputs
  bool create_graph = false;              ///< record the backward pass, for second derivatives
  bool retain_graph = false;              ///< keep the graph for another run (create_graph implies it)
  bool allow_unused =
      false;  ///< an undefined gradient for an input that the outputs don't depend on, instead of an error
};

/// The gradients of the sum of `outputs` (weighted by grad_outputs) with respect to `inputs`, without modifying any
/// grad(). PyTorch's torch.autograd.grad. Throws AutogradError for an input that doesn't require grad or is unused.
HS_API std::vector<Tensor> grad(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                                const GradOptions& options = {});

namespace detail {

/// Has `work` done when the outermost backward pass that runs on this thread has added up all gradients: for what
/// gradient hooks have begun. If the pass throws, it is destroyed without having been done.
HS_API void at_end_of_backward(std::function<void()> work);

}  // namespace detail
}  // namespace halfstep
