// SPDX-License-Identifier: Apache-2.0
// Fills the op layer's record slot: a node for each recorded call.
#include <cstring>
#include <optional>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/autograd/node.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/pool.h"
#include "halfstep/ops/copy.h"

namespace halfstep {
namespace {

class OpNode final : public Node {
 public:
  OpNode(const Op& op, std::span<const Tensor* const> inputs, const void* attributes, std::span<Tensor> results,
         bool in_place)
      : op_(op) {
    const std::size_t n = inputs.size();
    if (SavingHook* hook = saving_hook()) [[unlikely]]
      hook->read(inputs);
    edges.reserve(n);
    metas_.reserve(n);
    std::uint32_t saves = 0;
    for (std::size_t i = 0; i < n; ++i) {
      Edge edge = gradient_edge(*inputs[i]);
      const TensorImpl* p = inputs[i]->impl();
      if (p) {
        const bool wide = edge.node && edge.node->accepts_float32 && is_low_precision(p->dtype);
        metas_.push_back({p->sizes, p->dtype, wide ? DType::f32 : p->dtype, p->storage->device(), bool(edge.node)});
      } else {
        metas_.push_back({{}, DType::f32, DType::f32, {}, false});
      }
      if (edge.node) saves |= op.saves[std::min(i, op.saves.size() - 1)];
      edges.push_back(std::move(edge));
    }
    if (op.attributes_size) {
      attributes_ = op.attributes_size <= sizeof(inline_attributes_)
                        ? inline_attributes_
                        : (heap_attributes_ = std::make_unique<unsigned char[]>(op.attributes_size)).get();
      std::memcpy(attributes_, attributes, op.attributes_size);
    }
    if (saves & 0xffff) {
      inputs_.resize(n);
      for (std::size_t i = 0; i < n; ++i) {
        if (!(saves >> std::min<std::size_t>(i, 15) & 1)) continue;
        // In place, what lies in the destination's memory holds new values already: reading it later must fail.
        const bool overwritten = in_place && inputs[i]->defined() && inputs[i]->storage() == results[0].storage();
        inputs_[i] = SavedTensor(*inputs[i], false, overwritten ? 1 : 0);
      }
    }
    if (saves >> 16) {
      outputs_.resize(results.size());
      for (std::size_t i = 0; i < results.size(); ++i) {
        if (saves >> (16 + i) & 1) outputs_[i] = SavedTensor(results[i], true);
      }
    }
    outputs.reserve(results.size());
    for (const Tensor& t : results) outputs.push_back({t.impl()->sizes, t.impl()->dtype, t.impl()->storage->device()});
    adds_gradients = op.adds_gradients;
    accepts_float32 = (op.float32_gradient || &op == &cast_op()) && metas_[0].dtype == DType::f32 &&
                      is_low_precision(results[0].impl()->dtype);
  }

  // A training step makes and drops dozens of them.
  static void* operator new(std::size_t) { return pool_allocate<OpNode>(); }
  static void operator delete(void* p) { pool_deallocate<OpNode>(p); }

  std::string name() const override { return op_.name; }

  void apply(std::span<Tensor> grads, std::span<Tensor> results, bool create_graph) override {
    if (released_) {
      fail<AutogradError>(
          "backward of {}: the graph was freed by an earlier backward pass; pass {{.retain_graph = true}} to the "
          "earlier one",
          op_.name);
    }
    const Ref<Node> self = Ref<Node>::share(this);
    Tensor inputs[8];
    std::vector<Tensor> many;
    Tensor* saved = inputs;
    if (metas_.size() > 8) {
      many.resize(metas_.size());
      saved = many.data();
    }
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      saved[i] = inputs_[i].unpack(self, 0, op_.name, "input", static_cast<int>(i));
    }
    Tensor saved_outputs[kMaxOutputs];
    for (std::size_t i = 0; i < outputs_.size(); ++i) {
      saved_outputs[i] =
          outputs_[i].unpack(self, static_cast<std::uint32_t>(i), op_.name, "output", static_cast<int>(i));
    }
    const bool two = grads.size() > outputs.size();
    GradContext context(op_, attributes_, metas_, {saved, metas_.size()}, {saved_outputs, outputs.size()},
                        grads.first(outputs.size()), results, create_graph, two ? grads.back() : Tensor());
    op_.grad(context);
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (!results[i].defined()) continue;
      if (!edges[i].node) {
        results[i] = Tensor();
        continue;
      }
      results[i] = fit_gradient(results[i], metas_[i].sizes, metas_[i].dtype, edges[i].node->accepts_float32, op_.name);
    }
  }

  std::optional<GradSlice> slice() const override {
    if (!op_.grad_slice) return std::nullopt;
    return op_.grad_slice(attributes_);
  }

  void release_saved() override {
    released_ = !inputs_.empty() || !outputs_.empty();
    inputs_.clear();
    outputs_.clear();
  }

 private:
  const Op& op_;
  std::vector<GradContext::Input> metas_;
  std::vector<SavedTensor> inputs_;
  std::vector<SavedTensor> outputs_;
  void* attributes_ = nullptr;
  std::unique_ptr<unsigned char[]> heap_attributes_;
  alignas(16) unsigned char inline_attributes_[64];
  bool released_ = false;
};

void record(const Op& op, std::span<const Tensor* const> inputs, const void* attributes, std::span<Tensor> outputs,
            bool in_place) {
  // Integer results (indices of a maximum) have no gradient.
  bool differentiable = false;
  for (const Tensor& t : outputs) differentiable |= is_floating(t.impl()->dtype);
  if (!differentiable) return;
  auto node = Ref<Node>::adopt(new OpNode(op, inputs, attributes, outputs, in_place));
  if (in_place) {
    rebase_history(outputs[0], std::move(node));
    return;
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (is_floating(outputs[i].impl()->dtype)) set_history(outputs[i], node, static_cast<std::uint32_t>(i));
  }
}

void check_in_place(const Op& op, const Tensor& destination) {
  if (!op.grad && is_floating(destination.dtype())) {
    fail<AutogradError>("{}_: it has no gradient, but a tensor of it requires grad; use NoGrad or detach()", op.name);
  }
  const Tensor root = destination.impl()->base ? Tensor(destination.impl()->base) : destination;
  if (!root.impl()->requires_grad || !root.is_leaf()) return;
  fail<AutogradError>(
      "{}_: {} {} is a {}leaf that requires grad and can't be changed in place while operations are recorded; use "
      "NoGrad",
      op.name, name(destination.dtype()), destination.sizes().str(), destination.impl()->base ? "view of a " : "");
}

[[maybe_unused]] const bool installed = [] {
  op_hooks().record = record;
  op_hooks().check_in_place = check_in_place;
  return true;
}();

}  // namespace
}  // namespace halfstep
