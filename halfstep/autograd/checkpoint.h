// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <type_traits>
#include <utility>
#include <vector>

#include "halfstep/autograd/engine.h"
#include "halfstep/core/tensor.h"

namespace halfstep {

/// Options of checkpoint().
struct CheckpointOptions {
  bool preserve_random_state = true;  ///< recompute with the same random numbers (of default_generator())
};

/// Activation checkpointing: runs `function` without keeping the tensors that its operations would save for the
/// backward pass, and runs it again when the backward pass needs the first of them. This trades time for memory: the
/// peak memory of the forward pass is that between two checkpoints.
///
/// The second run sees the autocast state and the random numbers of the first one. Gradients reach the inputs and
/// everything else that `function` uses. Checkpoints nest, and second derivatives work. `function` must do the same
/// each time. Running statistics, counters and observers of the library's modules are updated by the first run only;
/// other side effects of `function` happen twice (is_recomputing() tells the runs apart). Threads that draw from
/// default_generator() during a backward pass disturb it; turn preserve_random_state off there.
///
/// Throws AutogradError, in the backward pass, if an input or a parameter was changed in place since, or the second run
/// did not repeat the first. PyTorch's torch.utils.checkpoint with use_reentrant=False.
HS_API std::vector<Tensor> checkpoint(const TensorFunction& function, const std::vector<Tensor>& inputs,
                                      const CheckpointOptions& options = {});

/// The same for functions of single tensors that return one:
/// `checkpoint([&](const Tensor& x) { return block(x); }, x)`.
template <class F, std::derived_from<Tensor>... Inputs>
requires std::same_as<std::remove_cvref_t<std::invoke_result_t<F&, const Inputs&...>>, Tensor> Tensor
checkpoint(F function, const Inputs&... inputs) {
  const TensorFunction run = [f = std::move(function)](const std::vector<Tensor>& in) mutable {
    return [&]<std::size_t... I>(std::index_sequence<I...>) { return std::vector<Tensor>{f(in[I]...)}; }
    (std::index_sequence_for<Inputs...>{});
  };
  return checkpoint(run, std::vector<Tensor>{inputs...})[0];
}

/// Whether this thread runs a checkpointed function again.
HS_API bool is_recomputing();

}  // namespace halfstep
