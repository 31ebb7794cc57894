// SPDX-License-Identifier: Apache-2.0
#include "halfstep/autograd/value_and_grad.h"

#include "halfstep/autograd/engine.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"

namespace halfstep::detail {

std::vector<Tensor> gradients_of_loss(const Tensor& loss, const std::vector<Tensor>& inputs) {
  if (!loss.defined()) fail<Error>("value_and_grad: expected a loss from the function, got an undefined tensor");
  if (loss.numel() != 1 || !is_floating(loss.dtype())) {
    fail<ShapeError>(
        "value_and_grad: expected a loss of one floating element as the function's first result, got {} {}; is the "
        "order of its results (loss, anything else)?",
        name(loss.dtype()), loss.sizes().str());
  }
  if (!loss.requires_grad()) {
    fail<AutogradError>(
        "value_and_grad: the loss depends on nothing that requires grad, or was detached; expected it to depend on one "
        "of the {} parameters and arguments to differentiate by",
        inputs.size());
  }
  // A frozen parameter may well be among them.
  std::vector<Tensor> asked;
  for (const Tensor& t : inputs) {
    if (t.requires_grad()) asked.push_back(t);
  }
  const std::vector<Tensor> found = grad({loss}, asked, {.allow_unused = true});
  std::vector<Tensor> result;
  result.reserve(inputs.size());
  std::size_t next = 0;
  for (const Tensor& t : inputs) result.push_back(t.requires_grad() ? found[next++] : Tensor());
  return result;
}

void check_positions(const std::vector<int>& positions, std::size_t arguments) {
  for (std::size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] < 0 || static_cast<std::size_t>(positions[i]) >= arguments) {
      fail<Error>("value_and_grad: expected positions of the {} arguments, from 0, got {}", arguments, positions[i]);
    }
    for (std::size_t k = 0; k < i; ++k) {
      if (positions[k] == positions[i]) fail<Error>("value_and_grad: position {} is there twice", positions[i]);
    }
  }
}

Tensor argument_leaf(const Tensor& argument, int position) {
  if (!argument.defined()) {
    fail<Error>("value_and_grad: expected argument {} to be a tensor, got an undefined one", position);
  }
  if (!is_floating(argument.dtype())) {
    fail<DTypeError>("value_and_grad: expected argument {} to be floating, got {}", position, name(argument.dtype()));
  }
  return argument.detach().requires_grad_();
}

void fail_argument_is_no_tensor(int position) {
  fail<Error>("value_and_grad: argument {} is no tensor; expected the position of one", position);
}

std::vector<Tensor> tensors_of(const NamedTensors& parameters) {
  std::vector<Tensor> result;
  result.reserve(parameters.size());
  for (const NamedTensor& p : parameters) result.push_back(p.tensor);
  return result;
}

}  // namespace halfstep::detail
