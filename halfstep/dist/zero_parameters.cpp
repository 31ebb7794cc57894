// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/zero_parameters_internal.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/autograd/node.h"
#include "halfstep/core/capture.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/view.h"

namespace halfstep::dist::detail {

struct ParameterShards::Entry {
  NamedTensor parameter;
  int owner;
  Shape strides;
  bool contiguous;
  Ref<Storage> nothing;  // what lies there while the values don't
  int users = 0;

  Entry(NamedTensor p, int rank)
      : parameter(std::move(p)),
        owner(rank),
        strides(parameter.tensor.strides()),
        contiguous(parameter.tensor.impl()->contiguous) {}
  TensorImpl& impl() const { return *parameter.tensor.impl(); }
};

// A tensor that the backward pass needs: a parameter, its 16-bit copy, or a view of either. It is made again then.
class ParameterShards::Saved final : public SavedSlot {
 public:
  Saved(std::shared_ptr<ParameterShards> shards, Entry& entry, const Tensor& tensor)
      : shards_(std::move(shards)),
        entry_(entry),
        offset_(tensor.storage_offset()),
        sizes_(tensor.sizes()),
        strides_(tensor.strides()),
        dtype_(tensor.dtype()) {
    if (tensor.requires_grad()) edge = gradient_edge(tensor);
  }
  Tensor get(const std::string&) override {
    const CapturePause pause;
    const NoGrad no_grad;
    Tensor values = shards_->values_of(entry_);
    if (values.dtype() != dtype_) values = cast_unrecorded(values, dtype_);
    return Tensor(TensorImpl::make(values.storage(), offset_, sizes_, strides_, dtype_));
  }

 private:
  std::shared_ptr<ParameterShards> shards_;
  Entry& entry_;
  std::int64_t offset_;
  Shape sizes_, strides_;
  DType dtype_;
};

// What modules save while their parameters are here. The rest goes to the hook that was set before, such as that of a
// checkpoint around the module, which then never sees parameters: it would keep them.
class ParameterShards::Hook final : public SavingHook {
 public:
  explicit Hook(ParameterShards& shards) : shards_(shards), before_(saving_hook()) { saving_hook() = this; }
  ~Hook() override { saving_hook() = before_; }
  Hook(const Hook&) = delete;
  Hook& operator=(const Hook&) = delete;

  std::shared_ptr<SavedSlot> save(const Tensor& tensor, bool is_output, std::uint32_t version) override {
    for (Entry* e : shards_.live_) {
      const Ref<Storage>& storage = tensor.storage();
      bool found = storage == e->impl().storage;
      if (const AutogradMeta* meta = autograd_meta_or_null(e->parameter.tensor); !found && meta && meta->cast) {
        // It is locked while the copy is being made.
        const std::unique_lock lock(meta->cast->mutex, std::try_to_lock);
        found = lock && meta->cast->data.defined() && storage == meta->cast->data.storage();
      }
      if (found) return std::make_shared<Saved>(shards_.shared_from_this(), *e, tensor);
    }
    return before_ ? before_->save(tensor, is_output, version) : nullptr;
  }
  void read(std::span<const Tensor* const> inputs) override {
    if (!before_) return;
    std::vector<const Tensor*> others;
    for (const Tensor* t : inputs) {
      const bool own = std::any_of(shards_.live_.begin(), shards_.live_.end(),
                                   [&](const Entry* e) { return t->defined() && e->parameter.tensor.is_same(*t); });
      if (!own) others.push_back(t);
    }
    before_->read(others);
  }
  bool is_of(const ParameterShards& shards) const { return &shards_ == &shards; }

 private:
  ParameterShards& shards_;
  SavingHook* before_;
};

// Parameters are here for its lifetime; those of a module's forward pass come again in its backward pass.
class ParameterShards::Guard {
 public:
  Guard(std::shared_ptr<ParameterShards> shards, std::vector<Entry*> entries, bool of_module)
      : shards_(std::move(shards)), entries_(std::move(entries)) {
    std::size_t done = 0;
    try {
      for (; done < entries_.size(); ++done) shards_->bring(*entries_[done]);
    } catch (...) {
      entries_.resize(done);
      leave();
      throw;
    }
    if (!of_module) return;
    const auto* own = dynamic_cast<const Hook*>(saving_hook());
    if (!own || !own->is_of(*shards_)) hook_.emplace(*shards_);
  }
  ~Guard() { leave(); }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

 private:
  void leave() {
    hook_.reset();
    for (Entry* e : entries_) shards_->free(*e);
  }

  std::shared_ptr<ParameterShards> shards_;
  std::vector<Entry*> entries_;
  std::optional<Hook> hook_;
};

ParameterShards::ParameterShards(const NamedTensors& parameters, const std::function<int(const Tensor&)>& owner,
                                 const ProcessGroup& group)
    : group_(group) {
  for (const NamedTensor& p : parameters) entries_.push_back(std::make_unique<Entry>(p, owner(p.tensor)));
}
ParameterShards::~ParameterShards() = default;

void ParameterShards::attach(const nn::ModuleBase& module) {
  module.apply([this](const std::string&, const nn::ModuleBase& m) {
    std::vector<Tensor> own;
    for (const Tensor& p : m.own_parameters()) {
      if (entry_of(p)) own.push_back(p);
    }
    if (own.empty()) return;
    m.set_forward_guard([self = shared_from_this(), own] { return self->gather_for_module(own); });
  });
  for (const auto& e : entries_) {
    if (e->owner != group_.rank()) {
      e->users = 1;
      free(*e);
    } else if (e->impl().storage->address_held()) {
      // Nothing that is made of the values would be kept here, such as the 16-bit copy, but would on the others.
      const NoGrad no_grad;
      TensorImpl& p = e->impl();
      const Tensor copy = Tensor(TensorImpl::make(p.storage, p.offset, {p.numel}, {1}, p.dtype)).clone();
      p.storage = copy.storage();
      p.offset = 0;
    }
  }
}

ParameterShards::Entry* ParameterShards::entry_of(const Tensor& parameter) {
  for (const auto& e : entries_) {
    if (e->parameter.tensor.is_same(parameter)) return e.get();
  }
  return nullptr;
}

// The owner's values, as a tensor with the parameter's layout: on the owner its own, elsewhere memory of its own.
Tensor ParameterShards::values_of(const Entry& e) {
  const TensorImpl& p = e.impl();
  const bool here = e.owner == group_.rank();
  // In the order of the memory, whatever the layout.
  const Tensor flat = here ? Tensor(TensorImpl::make(p.storage, p.offset, {p.numel}, {1}, p.dtype))
                           : empty({p.numel}, {.dtype = p.dtype, .device = p.storage->device()});
  group_.broadcast(flat, e.owner, e.parameter.name).wait();
  return Tensor(TensorImpl::make(flat.storage(), flat.storage_offset(), p.sizes, e.strides, p.dtype));
}

void ParameterShards::bring(Entry& e) {
  if (CaptureSink* sink = capture_sink()) [[unlikely]]
    sink->refuse("parameters are divided among the ranks (ZeRO stage 3)");
  if (e.users > 0) {
    ++e.users;
    return;
  }
  const CapturePause pause;
  const NoGrad no_grad;
  const Tensor values = values_of(e);
  e.users = 1;
  live_.push_back(&e);
  if (e.owner == group_.rank()) return;
  TensorImpl& p = e.impl();
  p.storage = values.storage();
  p.offset = 0;
  p.strides = e.strides;
  p.contiguous = e.contiguous;
}

void ParameterShards::free(Entry& e) {
  if (--e.users > 0) return;
  std::erase(live_, &e);
  if (e.owner == group_.rank()) return;
  TensorImpl& p = e.impl();
  if (!e.nothing) {
    const CapturePause pause;
    const NoGrad no_grad;
    e.nothing = full({1}, std::numeric_limits<double>::quiet_NaN(), {.dtype = p.dtype, .device = p.storage->device()})
                    .storage();
  }
  p.storage = e.nothing;
  p.offset = 0;
  p.strides = Shape(std::vector<std::int64_t>(static_cast<std::size_t>(p.sizes.size()), 0));
  p.contiguous = false;
  // The 16-bit copy goes with it.
  if (AutogradMeta* meta = autograd_meta_or_null(e.parameter.tensor); meta && meta->cast) {
    const std::lock_guard lock(meta->cast->mutex);
    meta->cast->data = meta->cast->recorded = Tensor();
    meta->cast->region = 0;
  }
}

std::shared_ptr<void> ParameterShards::gather(const std::vector<Tensor>& parameters) {
  std::vector<Entry*> entries;
  for (const Tensor& p : parameters) entries.push_back(entry_of(p));
  return std::make_shared<Guard>(shared_from_this(), std::move(entries), true);
}

std::shared_ptr<void> ParameterShards::gather_all() {
  std::vector<Entry*> entries;
  for (const auto& e : entries_) entries.push_back(e.get());
  return std::make_shared<Guard>(shared_from_this(), std::move(entries), false);
}

std::shared_ptr<void> ParameterShards::gather_for_module(const std::vector<Tensor>& parameters) {
  std::shared_ptr<void> guard = gather(parameters);
  if (!watching_) return guard;
  const std::size_t begin = pass_->size();
  pass_->push_back({begin, parameters});
  return {nullptr, [pass = pass_, begin, guard](void*) mutable {
            guard.reset();
            pass->push_back({begin, {}});
          }};
}

std::shared_ptr<void> ParameterShards::watch_pass() {
  pass_ = std::make_shared<Pass>();
  watching_ = true;
  return {nullptr, [self = shared_from_this()](void*) { self->watching_ = false; }};
}

void ParameterShards::follow_pass() {
  if (!pass_) return;
  std::map<std::size_t, std::shared_ptr<void>> here;
  for (const Event& e : *pass_) {
    if (e.parameters.empty()) {
      here.erase(e.begin);
    } else {
      here[e.begin] = gather(e.parameters);
    }
  }
}

std::int64_t ParameterShards::bytes() const {
  std::int64_t bytes = 0;
  for (const auto& e : entries_) {
    if (e->impl().storage != e->nothing) {
      bytes += e->impl().numel * static_cast<std::int64_t>(item_size(e->impl().dtype));
    }
  }
  return bytes;
}

}  // namespace halfstep::dist::detail
