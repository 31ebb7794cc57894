// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <type_traits>
#include <utility>
#include <vector>

#include "halfstep/autograd/engine.h"

namespace halfstep {

/// Options of gradcheck and gradgradcheck; the defaults are PyTorch's.
struct GradcheckOptions {
  double eps = 1e-6;   ///< step by which each element is moved up and down
  double atol = 1e-5;  ///< |analytical - numerical| <= atol + rtol * |numerical|
  double rtol = 1e-3;
  bool check_determinism = true;  ///< the function and its backward pass must give the same bits when run again
  std::uint64_t seed = 0;         ///< of the random gradients
};

/// Compares the gradients of `function` at `inputs` with central differences: each element of each output against each
/// element of each input that requires grad. Inputs that require grad must be f64 and without overlapping elements;
/// others may be of any dtype. The function is called on copies of the inputs that have their strides, so strided and
/// transposed inputs are checked as such. Also checked: that a backward pass with a random, strided gradient is the
/// weighted sum of those with single elements, and leaves its gradient unchanged. An undefined gradient counts as zero.
///
/// Throws AutogradError, naming output, input, elements and both values, when they differ or when two runs do; Error
/// for inputs that can't be checked. Source: the checks of PyTorch's torch.autograd.gradcheck, in its slow mode.
HS_API void gradcheck(const TensorFunction& function, const std::vector<Tensor>& inputs,
                      const GradcheckOptions& options = {});
/// Checks the second derivatives: gradcheck of the gradients of `function` (weighted by random numbers) with respect to
/// the inputs and the weights.
HS_API void gradgradcheck(const TensorFunction& function, const std::vector<Tensor>& inputs,
                          const GradcheckOptions& options = {});

/// The same for functions that return one tensor.
template <class F>
requires std::same_as < std::remove_cvref_t < std::invoke_result_t < F&, const std::vector<Tensor>
& >>, Tensor > void gradcheck(F function, const std::vector<Tensor>& inputs, const GradcheckOptions& options = {}) {
  gradcheck(TensorFunction([f = std::move(function)](const std::vector<Tensor>& in) mutable {
              return std::vector<Tensor>{f(in)};
            }),
            inputs, options);
}
template <class F>
requires std::same_as < std::remove_cvref_t < std::invoke_result_t < F&, const std::vector<Tensor>
& >>, Tensor > void gradgradcheck(F function, const std::vector<Tensor>& inputs, const GradcheckOptions& options = {}) {
  gradgradcheck(TensorFunction([f = std::move(function)](const std::vector<Tensor>& in) mutable {
                  return std::vector<Tensor>{f(in)};
                }),
                inputs, options);
}

}  // namespace halfstep
