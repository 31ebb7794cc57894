// SPDX-License-Identifier: Apache-2.0
// A graph's calls, one after the other, on tensors that go as soon as nobody reads them any more.
#include <algorithm>
#include <array>
#include <cstring>

#include "halfstep/amp/policy.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/infer/graph_internal.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/norm_internal.h"
#include "halfstep/ops/view.h"

namespace halfstep::infer::detail {
namespace {

using Attributes = std::array<unsigned char, 512>;

const void* patched(const Node& node, std::int64_t samples, Attributes& copy) {
  if (node.attributes.empty() || node.patches.empty())
    return node.attributes.empty() ? nullptr : node.attributes.data();
  std::memcpy(copy.data(), node.attributes.data(), node.attributes.size());
  for (const Patch& p : node.patches) {
    const double number = p.times * static_cast<double>(samples);
    const auto integer = static_cast<std::int64_t>(number);
    std::memcpy(copy.data() + p.offset, p.floating ? static_cast<const void*>(&number) : &integer, sizeof(number));
  }
  return copy.data();
}

// Strides and offsets are those of the tensor at hand; where they don't allow a view, it is a copy.
Tensor view_again(const Node& node, const Tensor& x, const void* attributes) {
  const std::string_view name = node.name;
  if (name == "diagonal") {
    const Tensor* input = &x;
    Tensor result;
    call_op(*node.op, {&input, 1}, attributes, {&result, 1});
    return result;
  }
  const auto& a = *static_cast<const ViewAttributes*>(attributes);
  if (name == "view" || name == "squeeze" || name == "unsqueeze") return x.reshape(shape_of(a.sizes));
  if (name == "expand") return x.expand(shape_of(a.sizes));
  if (name == "select") return x.select(a.dim, a.start);
  if (name == "slice") return x.slice(a.dim, a.start, a.end, a.step);
  if (name == "permute") {
    // Four bits a dimension.
    Shape order;
    for (int i = 0; i < x.dim(); ++i)
      order.push_back(static_cast<std::int64_t>(static_cast<std::uint64_t>(a.start) >> (4 * i) & 15));
    return x.permute(order);
  }
  fail<InternalError>("session: {}: a view that is not known here", node.place());
}

// Ops whose functions bring their inputs into this form before they call them.
enum class Wanted : std::uint8_t { any, dense, row_major, group_norm };
Wanted wanted_by(std::string_view op) {
  if (op == "conv2d" || op == "conv_transpose2d") return Wanted::dense;
  if (op == "group_norm") return Wanted::group_norm;
  constexpr std::string_view kRows[] = {"layer_norm", "rms_norm", "scaled_dot_product_attention", "roi_align"};
  return std::find(std::begin(kRows), std::end(kRows), op) != std::end(kRows) ? Wanted::row_major : Wanted::any;
}

Tensor in_form(const Tensor& t, Wanted wanted) {
  if (!t.defined() || wanted == Wanted::any || t.is_contiguous()) return t;
  if (wanted == Wanted::row_major) return t.contiguous();
  if (wanted == Wanted::group_norm) return halfstep::detail::group_norm_input(t);
  if (t.dim() != 4 || t.is_contiguous(MemoryFormat::channels_last)) return t.dim() == 4 ? t : t.contiguous();
  return t.contiguous(MemoryFormat::channels_last);
}

// Whether the result may be written over the first of the inputs, which nobody else reads.
bool fits_in_place(const Node& node, std::span<const Tensor> inputs) {
  const Tensor& x = inputs[0];
  if (!x.defined() || !x.is_floating() || x.impl()->use_count() > 1 || x.storage()->use_count() > 1) return false;
  if (!x.is_contiguous() && !x.is_contiguous(MemoryFormat::channels_last)) return false;
  for (std::size_t i = 1; i < inputs.size(); ++i) {
    const Tensor& t = inputs[i];
    if (t.defined() && (t.dtype() != x.dtype() || t.sizes() != x.sizes())) return false;
  }
  if (!thread_state().autocast.enabled) return true;
  const amp::Policy policy = amp::policy_of(*node.op);
  return policy == amp::Policy::pass_through || policy == amp::Policy::widest;
}

std::vector<Tensor> call_node(const Node& node, std::span<Tensor> inputs, std::int64_t samples, bool may_overwrite) {
  if (!node.op) return node.function(inputs);
  Attributes copy;
  const void* const attributes = patched(node, samples, copy);
  if (node.op->view && node.name != "as_strided") return {view_again(node, inputs[0], attributes)};
  if (may_overwrite && fits_in_place(node, inputs)) {
    std::vector<const Tensor*> pointers;
    for (const Tensor& t : inputs) pointers.push_back(&t);
    call_op_into(*node.op, pointers, attributes, inputs[0], true);
    return {inputs[0]};
  }
  const Wanted wanted = wanted_by(node.name);
  std::vector<const Tensor*> pointers;
  for (Tensor& t : inputs) {
    t = in_form(t, wanted);
    pointers.push_back(&t);
  }
  std::vector<Tensor> results(node.outputs.size());
  call_op(*node.op, pointers, attributes, results);
  return results;
}

// The constant, repeated for so many samples.
Tensor constant_for(const Value& value, std::int64_t samples) {
  if (value.batch.empty()) return value.constant;
  Shape sizes = value.constant.sizes();
  for (std::size_t i = 0; i < value.batch.size(); ++i) {
    sizes[value.batch[i]] = static_cast<std::int64_t>(value.times[i]) * samples;
  }
  return value.constant.expand(sizes);
}

}  // namespace

std::vector<Tensor> run_node(const Node& node, std::span<const Tensor> inputs, std::int64_t samples) {
  std::vector<Tensor> own(inputs.begin(), inputs.end());
  return call_node(node, own, samples, false);
}

std::vector<Tensor> run_graph(const Graph& graph, std::span<const Tensor> inputs, const Watcher& watcher) {
  const std::int64_t samples = inputs[0].dim() == 0 ? 1 : inputs[0].sizes()[0];
  std::vector<Tensor> values(graph.values.size());
  for (std::size_t i = 0; i < graph.inputs.size(); ++i) values[static_cast<std::size_t>(graph.inputs[i])] = inputs[i];
  const auto is_given = [&](int v) {
    return graph.values[static_cast<std::size_t>(v)].constant.defined() ||
           std::find(graph.inputs.begin(), graph.inputs.end(), v) != graph.inputs.end();
  };
  const auto tensor = [&](int v) -> Tensor {
    if (v < 0) return {};
    const Value& value = graph.values[static_cast<std::size_t>(v)];
    return value.constant.defined() ? constant_for(value, samples) : values[static_cast<std::size_t>(v)];
  };
  std::vector<Tensor> taken;
  for (const Node& node : graph.nodes) {
    call_origin().module_path = node.module;
    taken.clear();
    for (const int v : node.inputs) taken.push_back(tensor(v));
    const bool overwrites = node.in_place && !node.inputs.empty() && node.inputs[0] >= 0 && !is_given(node.inputs[0]) &&
                            std::find(node.last.begin(), node.last.end(), node.inputs[0]) != node.last.end() &&
                            std::count(node.inputs.begin(), node.inputs.end(), node.inputs[0]) == 1;
    if (overwrites) values[static_cast<std::size_t>(node.inputs[0])] = {};
    std::vector<Tensor> results = call_node(node, taken, samples, overwrites);
    if (watcher) watcher(node, results);
    for (std::size_t i = 0; i < results.size(); ++i) {
      values[static_cast<std::size_t>(node.outputs[i])] = std::move(results[i]);
    }
    taken.clear();
    for (const int v : node.last) values[static_cast<std::size_t>(v)] = {};
  }
  call_origin().module_path.clear();
  std::vector<Tensor> outputs;
  for (const int v : graph.outputs) {
    Tensor result = tensor(v).contiguous();
    // Not on what is somebody else's, and each by itself.
    bool shared = graph.values[static_cast<std::size_t>(v)].constant.defined();
    for (const Tensor& t : inputs) shared = shared || (t.defined() && t.storage() == result.storage());
    for (const Tensor& t : outputs) shared = shared || t.storage() == result.storage();
    for (const Value& value : graph.values) {
      shared = shared || (value.constant.defined() && value.constant.storage() == result.storage());
    }
    outputs.push_back(shared ? result.clone(MemoryFormat::contiguous) : result);
  }
  return outputs;
}

}  // namespace halfstep::infer::detail
