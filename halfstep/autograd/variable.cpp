// SPDX-License-Identifier: Apache-2.0
// The methods of Tensor that have to do with gradients.
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/node.h"
#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"

namespace halfstep {
namespace {

std::uint64_t next_hook_id() {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

Tensor& Tensor::requires_grad_(bool on) {
  check_defined(*this, "requires_grad_", "a tensor");
  if (on == impl()->requires_grad) return *this;
  if (on && (!is_floating() || is_float8(dtype()))) {
    fail<AutogradError>("requires_grad_: expected f32, f64, f16 or bf16, got {}", name(dtype()));
  }
  if (!is_leaf()) {
    fail<AutogradError>("requires_grad_: only leaves can be changed; use detach() for a copy without history");
  }
  impl()->requires_grad = on;
  return *this;
}

bool Tensor::is_leaf() const {
  check_defined(*this, "is_leaf", "a tensor");
  const AutogradMeta* meta = autograd_meta_or_null(*this);
  return !meta || !meta->grad_fn;
}

Tensor Tensor::grad() const {
  check_defined(*this, "grad", "a tensor");
  const AutogradMeta* meta = autograd_meta_or_null(*this);
  return meta ? meta->grad : Tensor();
}

void Tensor::set_grad(const Tensor& gradient) const {
  check_defined(*this, "set_grad", "a tensor");
  if (gradient.defined()) {
    if (gradient.sizes() != sizes()) {
      fail<ShapeError>("set_grad: expected {}, got {}", sizes().str(), gradient.sizes().str());
    }
    if (gradient.device() != device()) {
      fail<DeviceError>("set_grad: expected a gradient on {}, got {}", device().str(), gradient.device().str());
    }
    if (!gradient.is_floating())
      fail<DTypeError>("set_grad: expected a floating dtype, got {}", name(gradient.dtype()));
  }
  if (!gradient.defined() && !autograd_meta_or_null(*this)) return;
  autograd_meta(*this).grad = gradient;
}

void Tensor::backward(const Tensor& gradient, const BackwardOptions& options) const {
  halfstep::backward({*this}, {gradient}, options);
}

Tensor Tensor::detach() const {
  check_defined(*this, "detach", "a tensor");
  const TensorImpl* p = impl();
  return Tensor(TensorImpl::make(p->storage, p->offset, p->sizes, p->strides, p->dtype));
}

void Tensor::retain_grad() const {
  check_defined(*this, "retain_grad", "a tensor");
  if (!requires_grad()) fail<AutogradError>("retain_grad: the tensor doesn't require grad");
  const Edge edge = gradient_edge(*this);
  AutogradMeta& meta = autograd_meta(*this);
  if (!meta.grad_fn || meta.retains_grad) return;  // leaves keep theirs anyway
  meta.retains_grad = true;
  std::lock_guard lock(edge.node->mutex);
  edge.node->retained.push_back({edge.index, impl()});
}

std::uint64_t Tensor::register_hook(std::function<Tensor(const Tensor&)> hook) const {
  check_defined(*this, "register_hook", "a tensor");
  if (!requires_grad()) fail<AutogradError>("register_hook: the tensor doesn't require grad");
  const Edge edge = gradient_edge(*this);
  const std::uint64_t id = next_hook_id();
  ++capture_generation();
  std::lock_guard lock(edge.node->mutex);
  edge.node->hooks.push_back({id, edge.index, std::move(hook)});
  return id;
}

namespace {

std::uint64_t add_post_accumulate_hook(const Tensor& leaf, std::function<void(const Tensor&)> hook, bool recorded,
                                       const char* call) {
  check_defined(leaf, call, "a tensor");
  if (!leaf.requires_grad() || !leaf.is_leaf()) fail<AutogradError>("{}: expected a leaf that requires grad", call);
  const std::uint64_t id = next_hook_id();
  ++capture_generation();
  autograd_meta(leaf).post_accumulate_hooks.push_back({id, std::move(hook), recorded});
  return id;
}

}  // namespace

std::uint64_t Tensor::register_post_accumulate_grad_hook(std::function<void(const Tensor&)> hook) const {
  return add_post_accumulate_hook(*this, std::move(hook), false, "register_post_accumulate_grad_hook");
}

std::uint64_t register_recorded_grad_hook(const Tensor& leaf, std::function<void(const Tensor&)> hook) {
  return add_post_accumulate_hook(leaf, std::move(hook), true, "register_recorded_grad_hook");
}

void Tensor::remove_hook(std::uint64_t id) const {
  check_defined(*this, "remove_hook", "a tensor");
  ++capture_generation();
  if (AutogradMeta* meta = autograd_meta_or_null(*this)) {
    std::erase_if(meta->post_accumulate_hooks, [&](const auto& h) { return h.id == id; });
  }
  const Edge edge = gradient_edge(*this);
  if (!edge.node) return;
  std::lock_guard lock(edge.node->mutex);
  std::erase_if(edge.node->hooks, [&](const Node::Hook& h) { return h.id == id; });
}

}  // namespace halfstep
