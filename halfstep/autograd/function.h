// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <any>
#include <concepts>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/tensor.h"

namespace halfstep {

/// State passed from a custom function's forward() to its backward().
class HS_API FunctionContext {
 public:
  FunctionContext();
  ~FunctionContext();
  FunctionContext(const FunctionContext&) = delete;
  FunctionContext& operator=(const FunctionContext&) = delete;

  /// In forward: keeps tensors for backward (undefined ones too). Inputs and outputs keep their history, so that second
  /// derivatives go through them; others count as constants there. Called again, it replaces the list.
  void save_for_backward(std::vector<Tensor> tensors);
  /// In backward: those tensors. Throws AutogradError when one was changed in place since, or was freed by an earlier
  /// backward pass.
  const std::vector<Tensor>& saved() const { return saved_; }
  const Tensor& saved(std::size_t i) const { return saved_.at(i); }
  /// Plain values, by name: `c.saved_data["k"] = k` and `std::any_cast<double>(c.saved_data["k"])`.
  std::map<std::string, std::any> saved_data;

  /// In forward: these outputs have no gradient. (Outputs that aren't floating never have.)
  void mark_non_differentiable(std::vector<Tensor> outputs) { non_differentiable_ = std::move(outputs); }
  /// Whether the gradient of the i-th tensor argument is requested.
  bool needs_input_grad(std::size_t i) const { return i < needs_.size() && needs_[i]; }
  /// In forward: whether backward gets zeros for outputs that received no gradient (the default), or undefined tensors.
  void set_materialize_grads(bool on) { materialize_ = on; }

 private:
  friend class FunctionCall;
  friend class FunctionNode;
  std::vector<Tensor> saved_;
  std::vector<Tensor> non_differentiable_;
  std::vector<bool> needs_;
  bool materialize_ = true;
};

/// One call of a custom function; Function::apply drives it.
class HS_API FunctionCall {
 public:
  using Backward = std::vector<Tensor> (*)(FunctionContext&, const std::vector<Tensor>&);

  FunctionCall(const std::type_info& type, Backward backward, std::optional<DType> cast_inputs);
  ~FunctionCall();
  FunctionCall(const FunctionCall&) = delete;
  FunctionCall& operator=(const FunctionCall&) = delete;

  /// Takes the next argument of forward(), in order, and returns what to pass to forward(): tensors, optional tensors
  /// and lists of them cast to `cast_inputs` inside an enabled autocast region, anything else unchanged.
  template <class A>
  decltype(auto) argument(A&& a) {
    using T = std::remove_cvref_t<A>;
    if constexpr (std::derived_from<T, Tensor>) {
      ++arguments_;
      return add(a);
    } else if constexpr (std::same_as<T, std::optional<Tensor>>) {
      ++arguments_;
      Tensor t = add(a ? *a : Tensor());
      return a ? std::optional<Tensor>(std::move(t)) : std::optional<Tensor>();
    } else if constexpr (std::same_as<T, std::nullopt_t>) {
      ++arguments_;
      add({});
      return std::optional<Tensor>();
    } else if constexpr (std::same_as<T, std::vector<Tensor>>) {
      std::vector<Tensor> list;
      for (const Tensor& t : a) list.push_back(add(t));
      arguments_ += list.size();
      return list;
    } else {
      add_plain();
      ++arguments_;
      return std::forward<A>(a);
    }
  }
  /// Passed to forward() and, for a recorded call, kept for backward(). Lives as long as this call.
  FunctionContext& context();
  /// Attaches the history to the outputs.
  void finish(const std::vector<Tensor*>& outputs);
  /// Runs forward() unrecorded, with autocast off if inputs were cast.
  template <class F>
  auto run(F&& forward) {
    prepare();
    const NoGrad no_grad;
    if (!cast_) return forward();
    const AutocastOff off;
    return forward();
  }

 private:
  Tensor add(const Tensor& tensor);
  void add_plain();
  void prepare();

  struct Impl;
  std::unique_ptr<Impl> impl_;
  std::size_t arguments_ = 0;
  bool cast_ = false;
};

namespace detail {
inline void collect_outputs(Tensor& t, std::vector<Tensor*>& into) { into.push_back(&t); }
inline void collect_outputs(std::vector<Tensor>& list, std::vector<Tensor*>& into) {
  for (Tensor& t : list) into.push_back(&t);
}
template <class Tuple>
void collect_outputs(Tuple& tuple, std::vector<Tensor*>& into) {
  std::apply([&](auto&... t) { (into.push_back(&t), ...); }, tuple);
}
}  // namespace detail

/// Base of custom functions with their own gradient.
///
///     struct Scale : Function<Scale> {
///       static Tensor forward(FunctionContext& c, const Tensor& x, double k) {
///         c.saved_data["k"] = k;
///         return x * k;
///       }
///       static std::vector<Tensor> backward(FunctionContext& c, const std::vector<Tensor>& grads) {
///         return {grads[0] * std::any_cast<double>(c.saved_data["k"])};
///       }
///     };
///     Tensor y = Scale::apply(x, 2.0);
///
/// forward() takes tensors, optional tensors, lists of tensors and plain values, and returns a tensor, a vector, array,
/// pair or tuple of them. It isn't recorded. An output that shares memory with an input is copied; an input that
/// requires grad must not be changed in place.
///
/// backward() gets one gradient for each output and returns one for each tensor argument (one for each argument is
/// accepted too, undefined for those that aren't tensors); undefined means none. It runs in the autocast state of the
/// forward call. Written with recorded operations it can be differentiated again.
///
/// `static constexpr DType cast_inputs = f32;` in the function: in an enabled autocast region f32, f16 and bf16 inputs
/// are cast to that dtype and forward() runs with autocast off; outside it has no effect. PyTorch's custom_fwd and
/// custom_bwd.
template <class T>
struct Function {
  template <class... Args>
  static auto apply(Args&&... args) {
    std::optional<DType> cast;
    if constexpr (requires { T::cast_inputs; }) cast = T::cast_inputs;
    FunctionCall call(typeid(T), &T::backward, cast);
    // Braces: from left to right.
    std::tuple<decltype(call.argument(std::forward<Args>(args)))...> given{call.argument(std::forward<Args>(args))...};
    auto result = call.run([&] {
      return std::apply([&](auto&&... a) { return T::forward(call.context(), std::forward<decltype(a)>(a)...); },
                        std::move(given));
    });
    std::vector<Tensor*> outputs;
    detail::collect_outputs(result, outputs);
    call.finish(outputs);
    return result;
  }
};

}  // namespace halfstep
