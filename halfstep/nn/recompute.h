// SPDX-License-Identifier: Apache-2.0
// The call of a module that recomputes its results (ModuleBase::recompute), as one that can be made a second time.
#pragma once

#include <array>
#include <concepts>
#include <functional>
#include <optional>
#include <ranges>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "halfstep/core/tensor.h"

namespace halfstep::nn::detail {

/// Whether arguments of this type can be kept for a second call: they can be copied, and are no views of memory that
/// the caller may have taken back by then.
template <class A>
inline constexpr bool kKeepable = std::is_copy_constructible_v<A> && !std::is_pointer_v<A> && !std::ranges::view<A>;

/// Finds the tensors of a call's arguments: tensors themselves, and those in a vector, array, optional, pair or tuple.
/// Custom types are left as they are.
struct TensorsOf {
  std::vector<Tensor*> found = {};

  template <class... T>
  void add(std::tuple<T...>& values) {
    std::apply([this](auto&... v) { (add(v), ...); }, values);
  }
  template <class T>
  void add(std::vector<T>& values) {
    if constexpr (!std::is_arithmetic_v<T>) {
      for (T& v : values) add(v);
    }
  }
  template <class T, std::size_t N>
  void add(std::array<T, N>& values) {
    for (T& v : values) add(v);
  }
  template <class T>
  void add(std::optional<T>& value) {
    if (value) add(*value);
  }
  template <class A, class B>
  void add(std::pair<A, B>& values) {
    add(values.first);
    add(values.second);
  }
  template <class T>
  void add(T& value) {
    if constexpr (std::derived_from<T, Tensor>) found.push_back(&value);
  }
};

/// Runs `first` under checkpoint(), and `again` with the inputs when the backward pass needs what `first` would have
/// saved.
HS_API void run_recomputed(const std::vector<Tensor>& inputs, const std::function<void()>& first,
                           std::function<void(const std::vector<Tensor>& inputs)> again);
/// Throws Error for a module that is called with what can't be kept.
[[noreturn]] HS_API void refuse_to_recompute(const std::string& kind);

/// The result of `call(module, args...)`, which is made again in the backward pass: with copies of the module's handle
/// and of all arguments, in which tensors are those of the checkpoint.
template <class M, class Call, class... Args>
auto recomputed(const M& module, const Call& call, Args&&... args) {
  std::optional<decltype(call(module, std::forward<Args>(args)...))> result;
  if constexpr ((kKeepable<std::decay_t<Args>> && ...)) {
    std::tuple<std::decay_t<Args>...> kept(args...);
    TensorsOf tensors;
    tensors.add(kept);
    std::vector<Tensor> inputs;
    for (Tensor* t : tensors.found) inputs.push_back(std::exchange(*t, Tensor()));
    run_recomputed(
        inputs, [&] { result.emplace(call(module, std::forward<Args>(args)...)); },
        [call, handle = M(module), kept = std::move(kept)](const std::vector<Tensor>& given) {
          auto values = kept;
          TensorsOf places;
          places.add(values);
          for (std::size_t i = 0; i < given.size(); ++i) *places.found[i] = given[i];
          std::apply([&](auto&... value) { (void)call(handle, static_cast<Args&&>(value)...); }, values);
        });
  } else {
    refuse_to_recompute(module.kind());
  }
  return std::move(*result);
}

}  // namespace halfstep::nn::detail
