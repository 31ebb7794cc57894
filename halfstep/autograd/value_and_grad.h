// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <initializer_list>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/autograd/parameter.h"
#include "halfstep/core/tensor.h"

namespace halfstep {

/// What a function made by value_and_grad() returns; taken apart by `auto [value, gradients] = ...`.
template <class Value, class Gradients>
struct ValueAndGrad {
  Value value;          ///< what the function returned, detached
  Gradients gradients;  ///< of its first result
};

namespace detail {

/// The gradients of `loss` with respect to `inputs`; undefined for those that it does not depend on and those that
/// don't require grad. Throws when `loss` is not one floating element with a history.
HS_API std::vector<Tensor> gradients_of_loss(const Tensor& loss, const std::vector<Tensor>& inputs);
/// Throws Error unless all positions are below `arguments`, and each is there once.
HS_API void check_positions(const std::vector<int>& positions, std::size_t arguments);
/// A leaf with the argument's values. Throws DTypeError for an argument that can't have a gradient.
HS_API Tensor argument_leaf(const Tensor& argument, int position);
[[noreturn]] HS_API void fail_argument_is_no_tensor(int position);
HS_API std::vector<Tensor> tensors_of(const NamedTensors& parameters);

template <class T>
inline constexpr bool kIsTensor = std::is_same_v<std::remove_cvref_t<T>, Tensor>;
template <class T, class = void>
inline constexpr bool kIsTuple = false;
template <class T>
inline constexpr bool kIsTuple<T, std::void_t<decltype(std::tuple_size<T>::value)>> = true;

template <class Value>
const Tensor& loss_of(const Value& value) {
  if constexpr (kIsTensor<Value>) {
    return value;
  } else {
    static_assert(kIsTuple<Value>,
                  "value_and_grad: the function has to return a loss, or a pair or tuple of a loss and "
                  "anything else");
    static_assert(kIsTensor<std::tuple_element_t<0, Value>>, "value_and_grad: the first result has to be a Tensor");
    return std::get<0>(value);
  }
}

template <class T>
void detach_in_place(T& value) {
  if constexpr (kIsTensor<T>) {
    if (value.defined()) value = value.detach();
  } else if constexpr (std::is_same_v<T, std::vector<Tensor>>) {
    for (Tensor& t : value) detach_in_place(t);
  } else if constexpr (kIsTuple<T>) {
    std::apply([](auto&... parts) { (detach_in_place(parts), ...); }, value);
  }
}

/// An argument as passed to the function: a tensor whose gradient is requested becomes a new leaf, stored in `leaves`.
template <class Arg>
decltype(auto) prepared(Arg&& argument, int index, const std::vector<int>& positions, std::vector<Tensor>& leaves) {
  for (std::size_t k = 0; k < positions.size(); ++k) {
    if (positions[k] != index) continue;
    if constexpr (kIsTensor<Arg>) {
      leaves[k] = argument_leaf(argument, index);
    } else {
      fail_argument_is_no_tensor(index);
    }
  }
  if constexpr (kIsTensor<Arg>) {
    for (std::size_t k = 0; k < positions.size(); ++k) {
      if (positions[k] == index) return Tensor(leaves[k]);
    }
    return Tensor(argument);
  } else {
    return std::forward<Arg>(argument);
  }
}

// Runs `fn` and differentiates with respect to the arguments at `positions` and to `parameters`, in this order.
template <class Fn, class... Args>
auto run_value_and_grad(Fn& fn, const std::vector<int>& positions, const std::vector<Tensor>& parameters,
                        Args&&... args) {
  check_positions(positions, sizeof...(Args));
  const EnableGrad on;
  std::vector<Tensor> inputs(positions.size());
  auto value = [&]<std::size_t... I>(std::index_sequence<I...>) {
    return fn(prepared(std::forward<Args>(args), static_cast<int>(I), positions, inputs)...);
  }
  (std::index_sequence_for<Args...>{});
  inputs.insert(inputs.end(), parameters.begin(), parameters.end());
  ValueAndGrad<decltype(value), std::vector<Tensor>> result{std::move(value), {}};
  result.gradients = gradients_of_loss(loss_of(result.value), inputs);
  detach_in_place(result.value);
  return result;
}

}  // namespace detail

/// Turns `fn` into a function that also differentiates: called with the same arguments, it returns the results of `fn`
/// and the gradients of its first result with respect to `parameters` (NamedTensors or vector of Tensor), in their
/// order.
///
///     const auto step = value_and_grad(forward, net.parameters());
///     auto [value, gradients] = step(images, labels);
///
/// `fn` returns a loss (a floating tensor of one element), or a pair or tuple of a loss and anything else, such as the
/// network's output: only the first is differentiated. (MindSpore's value_and_grad differentiates the sum of all
/// outputs unless has_aux is set.) The returned values are detached. No grad() is modified; gradients are computed even
/// if recording is off. Parameters that the loss does not depend on, or that don't require grad, get an undefined
/// gradient, which optimizers and amp::all_finite() skip.
///
/// Called, it throws AutogradError or ShapeError if the first result is not a loss.
template <class Fn>
auto value_and_grad(Fn fn, const std::vector<Tensor>& parameters) {
  return [fn = std::move(fn), parameters](auto&&... args) {
    return detail::run_value_and_grad(fn, {}, parameters, std::forward<decltype(args)>(args)...);
  };
}
/// The same for a module's parameters.
template <class Fn>
auto value_and_grad(Fn fn, const NamedTensors& parameters) {
  return value_and_grad(std::move(fn), detail::tensors_of(parameters));
}

/// The same with respect to the argument at `position`, from 0: `gradients` is one tensor. Calls throw Error when there
/// is no such argument or it is no tensor, DTypeError when it is not floating.
template <class Fn>
auto value_and_grad(Fn fn, int position = 0) {
  return [fn = std::move(fn), positions = std::vector<int>{position}](auto&&... args) {
    auto all = detail::run_value_and_grad(fn, positions, {}, std::forward<decltype(args)>(args)...);
    return ValueAndGrad<decltype(all.value), Tensor>{std::move(all.value), std::move(all.gradients[0])};
  };
}
/// The same with respect to the arguments at several positions: one tensor for each, in the order of the positions.
template <class Fn>
auto value_and_grad(Fn fn, const std::vector<int>& positions) {
  return [fn = std::move(fn), positions](auto&&... args) {
    return detail::run_value_and_grad(fn, positions, {}, std::forward<decltype(args)>(args)...);
  };
}
/// The same, for positions written as `{0, 1}`.
template <class Fn>
auto value_and_grad(Fn fn, std::initializer_list<int> positions) {
  return value_and_grad(std::move(fn), std::vector<int>(positions));
}

/// The same with respect to arguments and parameters: `gradients` is a pair: the result of the arguments' form and that
/// of the parameters' form.
template <class Fn, class Parameters>
auto value_and_grad(Fn fn, int position, const Parameters& parameters) {
  return [fn = value_and_grad(std::move(fn), std::vector<int>{position}, parameters)](auto&&... args) {
    auto all = fn(std::forward<decltype(args)>(args)...);
    return ValueAndGrad<decltype(all.value), std::pair<Tensor, std::vector<Tensor>>>{
        std::move(all.value), {std::move(all.gradients.first[0]), std::move(all.gradients.second)}};
  };
}
/// The same with several positions.
template <class Fn>
auto value_and_grad(Fn fn, const std::vector<int>& positions, const std::vector<Tensor>& parameters) {
  return [fn = std::move(fn), positions, parameters](auto&&... args) {
    auto all = detail::run_value_and_grad(fn, positions, parameters, std::forward<decltype(args)>(args)...);
    const auto middle = all.gradients.begin() + static_cast<std::ptrdiff_t>(positions.size());
    return ValueAndGrad<decltype(all.value), std::pair<std::vector<Tensor>, std::vector<Tensor>>>{
        std::move(all.value), {{all.gradients.begin(), middle}, {middle, all.gradients.end()}}};
  };
}
/// The same with several positions and a module's parameters.
template <class Fn>
auto value_and_grad(Fn fn, const std::vector<int>& positions, const NamedTensors& parameters) {
  return value_and_grad(std::move(fn), positions, detail::tensors_of(parameters));
}
/// The same, for positions written as `{0, 1}`.
template <class Fn, class Parameters>
auto value_and_grad(Fn fn, std::initializer_list<int> positions, const Parameters& parameters) {
  return value_and_grad(std::move(fn), std::vector<int>(positions), parameters);
}

}  // namespace halfstep
