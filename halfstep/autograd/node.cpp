// SPDX-License-Identifier: Apache-2.0
#include "halfstep/autograd/node.h"

#include <deque>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/pool.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"

namespace halfstep {
namespace {

std::atomic<std::uint64_t> g_sequence{0};

// Adds what comes to the leaf's gradient.
class AccumulateGrad final : public Node {
 public:
  explicit AccumulateGrad(TensorImpl* leaf) : leaf_(leaf) {
    sequence = ~std::uint64_t{0};  // gradients are put down as soon as they are whole
    outputs.push_back({leaf->sizes, leaf->dtype, leaf->storage->device()});
  }
  std::string name() const override { return "accumulate_grad"; }

  void apply(std::span<Tensor> grads, std::span<Tensor>, bool create_graph) override {
    std::unique_lock lock(mutex);
    if (!leaf_ || !leaf_->try_retain()) return;  // nobody can read it any more
    const Tensor leaf(Ref<TensorImpl>::adopt(leaf_));
    const Tensor gradient = fit_gradient(grads[0], leaf.sizes(), leaf.dtype(), false, name());
    AutogradMeta& meta = autograd_meta(leaf);
    if (!meta.grad.defined()) {
      // Taken over where nobody else can see it (two handles on it are ours); else copied, so that a later in-place
      // step doesn't reach into the graph, another leaf's gradient or a tensor of the caller's.
      const TensorImpl* p = gradient.impl();
      const bool own = !create_graph && p->use_count() <= 2 && p->storage->use_count() == 1 && !p->base &&
                       gradient.is_contiguous(MemoryFormat::preserve);
      meta.grad = create_graph ? gradient.clone() : own ? gradient.detach() : gradient.detach().clone();
    } else if (create_graph) {
      meta.grad = add_recorded(meta.grad, gradient);
    } else {
      meta.grad.add_(gradient);
    }
    const auto hooks = meta.post_accumulate_hooks;
    lock.unlock();
    for (const AutogradMeta::PostAccumulateHook& hook : hooks) {
      if (CaptureSink* sink = capture_sink(); sink && !hook.recorded) [[unlikely]]
        sink->refuse("gradient hooks are functions of the host");
      hook.function(leaf);
    }
  }

  void forget_leaf() {
    std::lock_guard lock(mutex);
    leaf_ = nullptr;
  }

 private:
  static Tensor add_recorded(const Tensor& a, const Tensor& b) {
    EnableGrad on;
    return a + b;
  }
  TensorImpl* leaf_;
};

// The history of a base after one of its views was written to: the gradient of the written part goes through the
// writing node, the rest past it.
class ViewWrite final : public Node {
 public:
  ViewWrite(const Tensor& base, const Tensor& view, Ref<Node> write)
      : base_sizes_(base.sizes()),
        base_strides_(base.strides()),
        sizes_(view.sizes()),
        strides_(view.strides()),
        offset_(view.storage_offset() - base.storage_offset()),
        write_(std::move(write)) {
    edges.push_back(gradient_edge(base));
    for (std::size_t i = 1; i < write_->edges.size(); ++i) edges.push_back(write_->edges[i]);
    outputs.push_back({base.sizes(), base.dtype(), base.device()});
  }
  std::string name() const override { return write_->name() + " (in place on a view)"; }

  void apply(std::span<Tensor> grads, std::span<Tensor> results, bool create_graph) override {
    Tensor whole = grads[0];
    if (whole.strides() != base_strides_ || whole.storage_offset() != 0) {
      Tensor laid_out = empty_strided(base_sizes_, base_strides_, {.dtype = whole.dtype(), .device = whole.device()});
      laid_out.copy_(whole);
      whole = laid_out;
    }
    Tensor part = as_strided(whole, sizes_, strides_, offset_).clone();
    std::vector<Tensor> inner(write_->edges.size());
    write_->apply({&part, 1}, inner, create_graph);
    if (edges[0].node) {
      Tensor replaced = inner[0].defined()
                            ? fit_gradient(inner[0], sizes_, whole.dtype(), false, name())
                            : Tensor(full(sizes_, 0, {.dtype = whole.dtype(), .device = whole.device()}));
      Tensor result = whole.clone();
      as_strided(result, sizes_, strides_, offset_).copy_(replaced);
      results[0] = result;
    }
    for (std::size_t i = 1; i < inner.size(); ++i) results[i] = inner[i];
  }
  void release_saved() override { write_->release_saved(); }

 private:
  Shape base_sizes_, base_strides_, sizes_, strides_;
  std::int64_t offset_;
  Ref<Node> write_;
};

}  // namespace

Node::Node() : sequence(g_sequence.fetch_add(1, std::memory_order_relaxed)) {
  if (observed()) [[unlikely]]
    module = std::make_shared<const std::string>(call_origin().module_path);
}
Node::~Node() = default;

void Node::destroy() {
  // A graph is a long chain: taking it down node by node from a list keeps the stack flat.
  thread_local std::vector<Node*>* pending = nullptr;
  if (pending) {
    pending->push_back(this);
    return;
  }
  std::vector<Node*> list{this};
  pending = &list;
  while (!list.empty()) {
    Node* node = list.back();
    list.pop_back();
    delete node;
  }
  pending = nullptr;
}

void* AutogradMeta::operator new(std::size_t) { return pool_allocate<AutogradMeta>(); }
void AutogradMeta::operator delete(void* p) { pool_deallocate<AutogradMeta>(p); }

AutogradMeta::~AutogradMeta() {
  if (accumulator) static_cast<AccumulateGrad*>(accumulator.get())->forget_leaf();
  if (retains_grad && grad_fn) {
    std::lock_guard lock(grad_fn->mutex);
    std::erase_if(grad_fn->retained, [&](const Node::Retained& r) { return r.tensor == self; });
  }
}

// Threads that share parameters may make the slot at the same time. (A unique_ptr holds its pointer and nothing else.)
static std::atomic_ref<GradSlot*> slot_of(TensorImpl* impl) {
  static_assert(sizeof(impl->grad_slot) == sizeof(GradSlot*));
  return std::atomic_ref(*reinterpret_cast<GradSlot**>(&impl->grad_slot));
}

AutogradMeta& autograd_meta(const Tensor& tensor) {
  TensorImpl* impl = tensor.impl();
  std::atomic_ref<GradSlot*> slot = slot_of(impl);
  GradSlot* found = slot.load(std::memory_order_acquire);
  if (!found) {
    auto made = std::make_unique<AutogradMeta>(impl);
    if (slot.compare_exchange_strong(found, made.get(), std::memory_order_acq_rel)) found = made.release();
  }
  return static_cast<AutogradMeta&>(*found);
}

AutogradMeta* autograd_meta_or_null(const Tensor& tensor) {
  return static_cast<AutogradMeta*>(slot_of(tensor.impl()).load(std::memory_order_acquire));
}

Edge gradient_edge(const Tensor& tensor) {
  TensorImpl* impl = tensor.impl();
  if (!impl) return {};
  if (impl->base && impl->base->grad_slot) {
    // The base may have been given a new history through another view since this view was made.
    const auto& base = static_cast<AutogradMeta&>(*impl->base->grad_slot);
    if (base.rebases != 0) {
      AutogradMeta& meta = autograd_meta(tensor);
      if (meta.rebases != base.rebases) {
        EnableGrad on;
        const Tensor again = as_strided(Tensor(impl->base), impl->sizes, impl->strides, impl->offset);
        const AutogradMeta* fresh = autograd_meta_or_null(again);
        if (fresh && fresh->grad_fn) {
          meta.grad_fn = fresh->grad_fn;
          meta.output = fresh->output;
          impl->requires_grad = true;
        }
        meta.rebases = base.rebases;
      }
    }
  }
  if (!impl->requires_grad) return {};
  AutogradMeta& meta = autograd_meta(tensor);
  if (meta.grad_fn) return {meta.grad_fn, meta.output};
  Node* accumulator = meta.accumulator.get();
  if (!accumulator) accumulator = meta.accumulator.set(new AccumulateGrad(impl));
  return {Ref<Node>::share(accumulator), 0};
}

void set_history(const Tensor& tensor, Ref<Node> node, std::uint32_t index) {
  AutogradMeta& meta = autograd_meta(tensor);
  meta.grad_fn = std::move(node);
  meta.output = index;
  tensor.impl()->requires_grad = true;
}

void rebase_history(const Tensor& tensor, Ref<Node> node) {
  TensorImpl* impl = tensor.impl();
  if (!impl->base) {
    set_history(tensor, std::move(node), 0);
    // Views made before see the write too.
    ++autograd_meta(tensor).rebases;
    return;
  }
  const Tensor base(impl->base);
  auto write = Ref<Node>::adopt(new ViewWrite(base, tensor, std::move(node)));
  set_history(base, std::move(write), 0);
  ++autograd_meta(base).rebases;
  impl->requires_grad = true;
  autograd_meta(tensor).rebases = 0;
  gradient_edge(tensor);
}

Tensor fit_gradient(const Tensor& gradient, const Shape& sizes, DType dtype, bool keep_float32,
                    const std::string& node) {
  Tensor g = gradient;
  if (g.sizes() != sizes) g = sum_to(g, sizes, node.c_str());
  if (g.dtype() != dtype && !(keep_float32 && g.dtype() == DType::f32)) g = cast(g, dtype);
  return g;
}

SavingHook*& saving_hook() {
  thread_local SavingHook* hook = nullptr;
  return hook;
}

SavedTensor::SavedTensor(const Tensor& tensor, bool is_output, std::uint32_t version_lag) : is_output_(is_output) {
  if (!tensor.defined()) return;
  version_ = tensor.version() - version_lag;
  if (version_lag != 0) {
    // It can't be read any more, only named. The tensor itself would be a cycle: it is about to get this history.
    const TensorImpl* p = tensor.impl();
    tensor_ = Tensor(TensorImpl::make(p->storage, p->offset, p->sizes, p->strides, p->dtype));
    return;
  }
  if (SavingHook* hook = saving_hook()) [[unlikely]] {
    slot_ = hook->save(tensor, is_output, version_);
    if (slot_) return;
  }
  if (is_output) {
    const TensorImpl* p = tensor.impl();
    tensor_ = Tensor(TensorImpl::make(p->storage, p->offset, p->sizes, p->strides, p->dtype));
  } else {
    tensor_ = tensor;
  }
}

Tensor SavedTensor::unpack(const Ref<Node>& self, std::uint32_t output, const char* op, const char* role,
                           int index) const {
  if (slot_) [[unlikely]] {
    const Tensor again = slot_->get(fmt::format("backward of {}: its {} {}", op, role, index));
    if (!GradMode::is_enabled()) return again;
    if (is_output_) {
      set_history(again, self, output);
    } else if (slot_->edge.node) {
      set_history(again, slot_->edge.node, slot_->edge.index);
    }
    return again;
  }
  if (!tensor_.defined()) return {};
  if (tensor_.version() != version_) {
    fail<AutogradError>(
        "backward of {}: its {} {}, a {} tensor {}, was changed in place after it was saved (version {}, now {}); "
        "clone it before the change",
        op, role, index, name(tensor_.dtype()), tensor_.sizes().str(), version_, tensor_.version());
  }
  if (!is_output_) return tensor_;
  const TensorImpl* p = tensor_.impl();
  Tensor again(TensorImpl::make(p->storage, p->offset, p->sizes, p->strides, p->dtype));
  if (GradMode::is_enabled()) set_history(again, self, output);
  return again;
}

}  // namespace halfstep
