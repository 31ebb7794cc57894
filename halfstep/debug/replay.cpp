// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string_view>

#include "halfstep/debug/attributes_internal.h"
#include "halfstep/debug/replay_internal.h"

namespace halfstep::debug::detail {
namespace {

// Their numbers come from a state that is an input, but another dtype takes other bits of it.
bool is_random(std::string_view op) {
  constexpr std::string_view kRandom[] = {"uniform", "normal", "randint", "randperm", "bernoulli", "bernoulli_p"};
  return std::find(std::begin(kRandom), std::end(kRandom), op) != std::end(kRandom);
}

}  // namespace

Tensor on_host(const Tensor& tensor) {
  const Unrecorded unrecorded;
  return tensor.to(Device{}).contiguous();
}

bool has_nonfinite(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_floating() || tensor.numel() == 0) return false;
  const Tensor host = on_host(tensor);
  return visit_all(host.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* values = static_cast<const T*>(host.impl()->data());
    if constexpr (is_floating(dtype_of<T>)) {
      using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
      return std::any_of(values, values + host.numel(), [](T v) { return !std::isfinite(static_cast<Wide>(v)); });
    } else {
      return false;
    }
  });
}

bool written_over(const ObservedCall& call, std::size_t i) {
  const Tensor& input = *call.inputs[i];
  if (!input.defined()) return false;
  return std::any_of(call.outputs.begin(), call.outputs.end(),
                     [&](const Tensor* out) { return out->defined() && out->storage() == input.storage(); });
}

std::vector<Tensor> keep_inputs(const ObservedCall& call) {
  const Unrecorded unrecorded;
  std::vector<Tensor> inputs;
  inputs.reserve(call.inputs.size());
  for (std::size_t i = 0; i < call.inputs.size(); ++i) {
    inputs.push_back(written_over(call, i) ? call.inputs[i]->clone() : *call.inputs[i]);
  }
  return inputs;
}

bool is_conversion(const ObservedCall& call) {
  const std::string_view name = call.name;
  return name == "to" || name == "to_device" || (name == "copy" && !call.op);
}

Replay replay(const ObservedCall& call, std::span<const Tensor> inputs, DType dtype) {
  const Unrecorded unrecorded;
  Replay result;
  if (is_conversion(call) && inputs.size() == 1 && call.outputs.size() == 1) {
    result.outputs.push_back(is_floating(inputs[0].dtype()) ? on_host(inputs[0]).to(dtype) : on_host(inputs[0]));
    return result;
  }
  if (!call.op || !call.op->infer) {
    result.skipped = "a kernel that runs by itself";
    return result;
  }
  if (call.op->view) {
    result.skipped = "a view";
    return result;
  }
  const bool same = is_random(call.name);
  std::vector<Tensor> converted;
  std::vector<const Tensor*> pointers;
  bool floating = false;
  for (const Tensor& t : inputs) {
    Tensor host = t.defined() ? on_host(t) : t;
    if (host.defined() && host.is_floating()) {
      floating = true;
      if (!same) host = host.to(dtype);
    }
    converted.push_back(std::move(host));
  }
  for (const Tensor& t : converted) pointers.push_back(&t);
  alignas(16) std::array<unsigned char, 512> attributes;
  if (call.attributes) {
    std::memcpy(attributes.data(), call.attributes, call.op->attributes_size);
    if (floating && !same) widen_results(*call.op, attributes.data(), dtype);
  }
  result.outputs.resize(call.outputs.size());
  try {
    call_op(*call.op, pointers, call.attributes ? attributes.data() : nullptr, result.outputs);
  } catch (const Error& e) {
    result.outputs.clear();
    result.skipped = e.what();
  }
  for (const Tensor& t : result.outputs) {
    if (floating && !same && t.is_floating() && t.dtype() != dtype) {
      result.skipped = fmt::format("its result is {} whatever its inputs are", name(t.dtype()));
    }
  }
  if (!result.skipped.empty()) result.outputs.clear();
  return result;
}

double ulp(double value, DType dtype) {
  const FloatInfo& info = finfo(dtype);
  const double magnitude = std::min(std::fabs(value), info.max);
  if (magnitude < info.smallest_normal) return info.smallest_subnormal;
  return std::ldexp(info.eps, std::ilogb(magnitude));
}

void CallObserver::before_call(const ObservedCall& call) {
  if (!keep_ || !mine()) return;
  bool any = false;
  for (std::size_t i = 0; i < call.inputs.size(); ++i) any |= written_over(call, i);
  if (!any) return;
  std::vector<Tensor> inputs = keep_inputs(call);
  const std::lock_guard lock(mutex_);
  kept_[&call] = std::move(inputs);
}

void CallObserver::after_call(const ObservedCall& call) {
  if (!mine()) return;
  const std::lock_guard lock(mutex_);
  std::vector<Tensor> inputs;
  if (const auto it = kept_.find(&call); it != kept_.end()) {
    inputs = std::move(it->second);
    kept_.erase(it);
  } else {
    for (const Tensor* t : call.inputs) inputs.push_back(*t);
  }
  seen(call, ++calls_, inputs);
}

void CallObserver::failed_call(const ObservedCall& call) {
  const std::lock_guard lock(mutex_);
  kept_.erase(&call);
}

}  // namespace halfstep::debug::detail
