// SPDX-License-Identifier: Apache-2.0
#include "halfstep/autograd/function.h"

#include <cxxabi.h>

#include <cstdlib>

#include "halfstep/autograd/node.h"
#include "halfstep/core/fail.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"

namespace halfstep {
namespace {

std::string type_name(const std::type_info& type) {
  int status = 0;
  char* text = abi::__cxa_demangle(type.name(), nullptr, nullptr, &status);
  std::string result = status == 0 ? text : type.name();
  std::free(text);
  const auto colon = result.rfind("::");
  return colon == std::string::npos ? result : result.substr(colon + 2);
}

Tensor alias(const Tensor& t) {
  const TensorImpl* p = t.impl();
  return Tensor(TensorImpl::make(p->storage, p->offset, p->sizes, p->strides, p->dtype));
}

}  // namespace

FunctionContext::FunctionContext() = default;
FunctionContext::~FunctionContext() = default;
void FunctionContext::save_for_backward(std::vector<Tensor> tensors) { saved_ = std::move(tensors); }

class FunctionNode final : public Node {
 public:
  struct Input {
    Shape sizes;
    DType dtype = DType::f32;
    bool tensor = false;  // or a plain value's place in the list of arguments
  };

  // `off`: forward() runs with autocast off, whatever the region.
  FunctionNode(const std::type_info& type, FunctionCall::Backward backward, bool off)
      : name_(type_name(type)), backward_(backward), state_(thread_state().autocast) {
    if (off) state_.enabled = false;
  }

  std::string name() const override { return name_; }

  void keep(std::vector<SavedTensor> saved, std::vector<std::uint32_t> outputs) {
    saved_ = std::move(saved);
    saved_outputs_ = std::move(outputs);
  }

  void apply(std::span<Tensor> grads, std::span<Tensor> results, bool) override {
    if (released_) {
      fail<AutogradError>(
          "backward of {}: the graph was freed by an earlier backward pass; pass {{.retain_graph = true}} to the "
          "earlier one",
          name_);
    }
    const Ref<Node> self = Ref<Node>::share(this);
    std::vector<Tensor> given(grads.begin(), grads.end());
    if (context.materialize_) {
      for (std::size_t i = 0; i < given.size(); ++i) {
        if (given[i].defined() || !is_floating(outputs[i].dtype)) continue;
        given[i] = zeros(outputs[i].sizes, {.dtype = outputs[i].dtype, .device = outputs[i].device});
      }
    }
    std::vector<Tensor> back;
    {
      const Scope scope(*this);
      for (std::size_t i = 0; i < saved_.size(); ++i) {
        context.saved_.push_back(
            saved_[i].unpack(self, saved_outputs_[i], name_.c_str(), "saved tensor", static_cast<int>(i)));
      }
      back = backward_(context, given);
    }
    std::size_t tensors = 0;
    for (const Input& input : inputs) tensors += input.tensor;
    const bool each = back.size() == inputs.size();
    if (!each && back.size() != tensors) {
      fail<AutogradError>("backward of {}: expected {} gradients, one for each tensor argument, got {}", name_, tensors,
                          back.size());
    }
    std::size_t next = 0, edge = 0;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].tensor) {
        if (each && back[i].defined()) {
          fail<AutogradError>("backward of {}: argument {} is no tensor, but a gradient came for it", name_, i);
        }
        continue;
      }
      const Tensor& g = each ? back[i] : back[next++];
      const Edge& to = edges[edge];
      if (g.defined() && to.node) {
        if (!g.is_floating()) {
          fail<DTypeError>("backward of {}: expected a floating gradient for tensor argument {}, got {}", name_, edge,
                           halfstep::name(g.dtype()));
        }
        results[edge] = fit_gradient(g, inputs[i].sizes, inputs[i].dtype, to.node->accepts_float32, name_);
      }
      ++edge;
    }
  }

  void release_saved() override {
    released_ = !saved_.empty();
    saved_.clear();
  }

  FunctionContext context;
  std::vector<Input> inputs;  // one for each argument; edges has those that are tensors

 private:
  // The autocast state that forward() ran in, and no tensors left in the context afterwards.
  class Scope {
   public:
    explicit Scope(FunctionNode& node) : node_(node), was_(std::exchange(thread_state().autocast, node.state_)) {
      node_.context.saved_.clear();
    }
    ~Scope() {
      thread_state().autocast = std::move(was_);
      node_.context.saved_.clear();
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    FunctionNode& node_;
    AutocastState was_;
  };

  std::string name_;
  FunctionCall::Backward backward_;
  AutocastState state_;
  std::vector<SavedTensor> saved_;
  std::vector<std::uint32_t> saved_outputs_;
  bool released_ = false;
};

struct FunctionCall::Impl {
  Ref<FunctionNode> node;
  std::optional<DType> cast_inputs;
  std::vector<Tensor> tensors;  // as forward() gets them
  std::vector<std::uint32_t> versions;
  bool recording = false;
};

FunctionCall::FunctionCall(const std::type_info& type, Backward backward, std::optional<DType> cast_inputs)
    : impl_(std::make_unique<Impl>()) {
  cast_ = cast_inputs && thread_state().autocast.enabled;
  impl_->node = Ref<FunctionNode>::adopt(new FunctionNode(type, backward, cast_));
  impl_->cast_inputs = cast_inputs;
}
FunctionCall::~FunctionCall() = default;

FunctionContext& FunctionCall::context() { return impl_->node->context; }

Tensor FunctionCall::add(const Tensor& tensor) {
  Tensor t = tensor;
  const DType d = t.defined() ? t.dtype() : DType::boolean;
  // Recorded: a gradient goes back through the cast, a second derivative too.
  const bool on = cast_ && t.defined() && (thread_state().autocast.device_types >> t.device().type & 1);
  if (on && (d == DType::f32 || is_low_precision(d))) t = cast(t, *impl_->cast_inputs);
  impl_->tensors.push_back(t);
  FunctionNode::Input input;
  input.tensor = true;
  if (t.defined()) input.sizes = t.sizes(), input.dtype = t.dtype();
  impl_->node->inputs.push_back(input);
  return t;
}

void FunctionCall::add_plain() { impl_->node->inputs.push_back({}); }

void FunctionCall::prepare() {
  FunctionNode& node = *impl_->node;
  const bool grad = GradMode::is_enabled();
  for (const Tensor& t : impl_->tensors) {
    node.edges.push_back(grad ? gradient_edge(t) : Edge{});
    node.context.needs_.push_back(static_cast<bool>(node.edges.back().node));
    impl_->recording |= node.context.needs_.back();
    impl_->versions.push_back(t.defined() ? t.version() : 0);
  }
}

void FunctionCall::finish(const std::vector<Tensor*>& outputs) {
  FunctionNode& node = *impl_->node;
  FunctionContext& context = node.context;
  std::vector<Tensor> saved = std::move(context.saved_), fixed = std::move(context.non_differentiable_);
  context.saved_.clear(), context.non_differentiable_.clear();
  if (!impl_->recording) return;
  for (std::size_t i = 0; i < impl_->tensors.size(); ++i) {
    if (context.needs_[i] && impl_->tensors[i].version() != impl_->versions[i]) {
      fail<AutogradError>(
          "{}: tensor argument {}, which requires grad, was changed in place by forward(); return a new tensor instead",
          node.name(), i);
    }
  }
  // Handles of their own: what forward() returns may be known elsewhere, and must not get this history there.
  std::vector<Tensor> raw, fresh;
  for (Tensor* t : outputs) {
    if (!t->defined()) fail<AutogradError>("{}: forward() returned an undefined tensor", node.name());
    raw.push_back(*t);
    bool shared = false;
    for (const Tensor& in : impl_->tensors) shared |= in.defined() && in.storage() == t->storage();
    const NoGrad no_grad;
    fresh.push_back(shared ? alias(*t).clone() : alias(*t));
    node.outputs.push_back({t->sizes(), t->dtype(), t->device()});
  }
  std::vector<SavedTensor> kept;
  std::vector<std::uint32_t> kept_outputs;
  for (const Tensor& t : saved) {
    std::uint32_t output = 0;
    bool is_output = false, is_input = false;
    for (const Tensor& in : impl_->tensors) is_input |= t.defined() && t.is_same(in);
    for (std::size_t o = 0; o < raw.size() && !is_input && t.defined(); ++o) {
      if (!t.is_same(raw[o])) continue;
      is_output = true, output = static_cast<std::uint32_t>(o);
    }
    bool differentiable = is_output && is_floating(raw[output].dtype());
    for (const Tensor& f : fixed) differentiable &= !(is_output && f.is_same(raw[output]));
    kept.emplace_back(is_output ? fresh[output] : t, differentiable);
    kept_outputs.push_back(output);
  }
  node.keep(std::move(kept), std::move(kept_outputs));
  const Ref<Node> shared = Ref<Node>::share(&node);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    bool differentiable = is_floating(fresh[i].dtype());
    for (const Tensor& t : fixed) differentiable &= !t.is_same(raw[i]);
    if (differentiable) set_history(fresh[i], shared, static_cast<std::uint32_t>(i));
    *outputs[i] = fresh[i];
  }
}

}  // namespace halfstep
