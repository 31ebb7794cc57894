// SPDX-License-Identifier: Apache-2.0
#include "halfstep/debug/call_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <tuple>

#include "halfstep/core/error.h"
#include "halfstep/debug/replay_internal.h"
#include "halfstep/ops/op.h"
#include "halfstep/runtime/devices.h"

namespace halfstep::debug {
namespace {

const Tensor* tensor_at(std::span<const Tensor* const> list, std::size_t i) {
  return i < list.size() && list[i]->defined() ? list[i] : nullptr;
}

TracedTensor traced(const Tensor& t, ExecutionPath path) {
  if (!t.defined()) return {};
  // Asking for the address brings what the CPU has computed in the device's place.
  const bool here = path == ExecutionPath::native || path == ExecutionPath::contiguous || path == ExecutionPath::view;
  return {.defined = true,
          .dtype = t.dtype(),
          .sizes = t.sizes(),
          .strides = t.strides(),
          .address = here ? reinterpret_cast<std::uint64_t>(t.impl()->data()) : 0};
}

std::string reason(const TracedCall& call) {
  if (call.site.path != ExecutionPath::fallback) return {};
  try {
    const OpSupport support = op_support(call.site.device, call.kernel, call.dtype);
    if (support.native) return "its kernel refuses these tensors";
    return support.reason.empty() ? fmt::format("no kernel for {}", name(call.dtype)) : support.reason;
  } catch (const Error&) {
    return fmt::format("no kernel for {}", name(call.dtype));
  }
}

}  // namespace

std::uint64_t TracedTensor::bytes() const {
  if (!defined) return 0;
  std::uint64_t last = 0;
  for (int d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return 0;
    last += static_cast<std::uint64_t>(sizes[d] - 1) * static_cast<std::uint64_t>(strides[d]);
  }
  return (last + 1) * item_size(dtype);
}

std::int64_t multiply_adds(const ObservedCall& call) {
  const std::string_view op = call.name;
  const Tensor* a = tensor_at(call.inputs, 0);
  const Tensor* b = tensor_at(call.inputs, 1);
  const Tensor* out = tensor_at(call.outputs, 0);
  if (!a || !b || !out) return 0;
  // Of a weight [out, in, ...]: what one element of the output takes.
  const auto per_row = [](const Tensor& weight) { return weight.numel() / std::max<std::int64_t>(weight.size(0), 1); };
  if (op == "linear" && b->dim() == 2) return out->numel() * b->size(1);
  if ((op == "mm" || op == "bmm") && a->dim() >= 2) return out->numel() * a->size(-1);
  if (op == "conv2d" && b->dim() == 4) return out->numel() * per_row(*b);
  if (op == "conv_transpose2d" && b->dim() == 4) return a->numel() * per_row(*b);
  // Each product of the forward pass once, from the gradient of its output.
  if (op == "conv2d_backward_input" && b->dim() == 4) return a->numel() * per_row(*b);
  if (op == "conv2d_backward_weight" && out->dim() == 4) return a->numel() * per_row(*out);
  if (op.starts_with("scaled_dot_product_attention") && a->dim() >= 2) {
    // Queries [..., L, E], keys [..., S, E], values [..., S, V]; the backward pass has five products for two.
    const bool backward = op.ends_with("_backward");
    const std::size_t first = backward ? 1 : 0;
    const Tensor *q = tensor_at(call.inputs, first), *k = tensor_at(call.inputs, first + 1),
                 *v = tensor_at(call.inputs, first + 2);
    if (!q || !k || !v || q->dim() < 2 || k->dim() < 2 || v->dim() < 2) return 0;
    const std::int64_t pairs = q->numel() / std::max<std::int64_t>(q->size(-1), 1) * k->size(-2);
    return backward ? pairs * (3 * q->size(-1) + 2 * v->size(-1)) : pairs * (q->size(-1) + v->size(-1));
  }
  return 0;
}

struct CallTrace::Impl final : detail::CallObserver {
  Impl() : CallObserver(false, false) {}

  bool takes_fused() const override { return true; }

  void seen(const ObservedCall& call, std::uint64_t number, std::span<const Tensor> /*inputs*/) override {
    TracedCall made{.site = call_site(call, number),
                    .kernel = call.kernel ? call.kernel : "",
                    .dtype = call.dtype,
                    .outputs = {},
                    .output_dtypes = {},
                    .multiply_adds = debug::multiply_adds(call),
                    .inputs = {},
                    .results = {},
                    .attributes = {},
                    .repeatable = false};
    for (const Tensor* t : call.outputs) {
      if (!t->defined()) continue;
      made.outputs.push_back(t->sizes());
      made.output_dtypes.push_back(t->dtype());
    }
    for (const Tensor* t : call.inputs) made.inputs.push_back(traced(*t, call.path));
    for (const Tensor* t : call.outputs) made.results.push_back(traced(*t, call.path));
    made.repeatable = call.kernel != nullptr;
    if (call.attributes) {
      const auto* bytes = static_cast<const std::byte*>(call.attributes);
      made.attributes.assign(bytes, bytes + call.attributes_bytes);
    }
    calls.push_back(std::move(made));
  }

  std::vector<TracedCall> calls;
  bool recording = true;
};

CallTrace::CallTrace() : impl_(std::make_unique<Impl>()) { add_observer(impl_.get()); }
CallTrace::~CallTrace() { stop(); }

void CallTrace::stop() {
  if (std::exchange(impl_->recording, false)) remove_observer(impl_.get());
}

const std::vector<TracedCall>& CallTrace::calls() {
  stop();
  return impl_->calls;
}

std::string Placement::str() const {
  switch (path) {
    case ExecutionPath::native:
      return "native";
    case ExecutionPath::contiguous:
      return "native, after copies to row-major";
    case ExecutionPath::fallback:
      return "CPU: " + why;
    case ExecutionPath::view:
      return "a view";
    case ExecutionPath::transfer:
      return "a copy";
  }
  return "unknown";
}

std::vector<Placement> placements(std::span<const TracedCall> calls) {
  std::map<std::tuple<bool, std::string, DType, ExecutionPath, std::string>, Placement> found;
  for (const TracedCall& c : calls) {
    if (c.site.path == ExecutionPath::view) continue;
    const bool moved = c.site.path == ExecutionPath::fallback;
    // A kernel of its own is not the op that it is a part of: the running statistics of batch_norm.
    const std::string& op = c.site.standalone ? c.kernel : c.site.op;
    Placement& p = found[{!moved, op, c.dtype, c.site.path, c.site.device.str()}];
    if (p.calls() == 0) {
      p.op = op;
      p.dtype = c.dtype;
      p.device = c.site.device;
      p.path = c.site.path;
      p.why = reason(c);
    }
    const std::string_view pass = c.site.pass();
    ++(pass == "forward" ? p.forward : pass == "backward" ? p.backward : p.other);
  }
  std::vector<Placement> result;
  for (auto& [key, p] : found) result.push_back(std::move(p));
  return result;
}

}  // namespace halfstep::debug
