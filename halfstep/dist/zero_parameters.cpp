// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/zero_parameters_internal.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "halfstep/autograd/engine_internal.h"
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
  std::size_t number;
  int owner;
  Shape strides;
  bool contiguous;
  Ref<Storage> nothing;  // what lies there while the values don't
  int users = 0;

  Entry(NamedTensor p, std::size_t at, int rank)
      : parameter(std::move(p)),
        number(at),
        owner(rank),
        strides(parameter.tensor.strides()),
        contiguous(parameter.tensor.impl()->contiguous) {}
  TensorImpl& impl() const { return *parameter.tensor.impl(); }
};

// Values on their way to all ranks, one parameter after the other: ranks that differ learn it at the first one that
// does, and none has begun more than another then.
struct ParameterShards::Gather {
  GatherOrder::Unit unit;
  std::vector<Tensor> values;  // of those that have been begun, in the order of the memory, whatever the layout
  Work work;                   // of the last of them
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
    Tensor values = shards_->values_of({entry_.number}, true)[0];
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
      if (found || is_cast_of(tensor, e->parameter.tensor))
        return std::make_shared<Saved>(shards_.shared_from_this(), *e, tensor);
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
  // A copy of a parameter in 16 bits that nobody keeps, as in a second run after the region of the first one.
  static bool is_cast_of(const Tensor& tensor, const Tensor& parameter) {
    if (!is_low_precision(tensor.dtype()) || tensor.sizes() != parameter.sizes()) return false;
    const AutogradMeta* meta = autograd_meta_or_null(tensor);
    if (!meta || !meta->grad_fn || !meta->grad_fn->accepts_float32 || meta->grad_fn->edges.size() != 1) return false;
    return meta->grad_fn->edges[0].node.get() == gradient_edge(parameter).node.get();
  }

  ParameterShards& shards_;
  SavingHook* before_;
};

// Parameters are here for its lifetime; those of a module's forward pass come again in its backward pass.
class ParameterShards::Guard {
 public:
  Guard(std::shared_ptr<ParameterShards> shards, std::vector<Entry*> entries, bool of_module)
      : shards_(std::move(shards)), entries_(std::move(entries)) {
    shards_->bring(entries_, of_module);
    if (!of_module) return;
    const auto* own = dynamic_cast<const Hook*>(saving_hook());
    if (!own || !own->is_of(*shards_)) hook_.emplace(*shards_);
  }
  ~Guard() {
    hook_.reset();
    for (Entry* e : entries_) shards_->free(*e);
  }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

 private:
  std::shared_ptr<ParameterShards> shards_;
  std::vector<Entry*> entries_;
  std::optional<Hook> hook_;
};

ParameterShards::ParameterShards(const NamedTensors& parameters, const std::function<int(const Tensor&)>& owner,
                                 const ProcessGroup& group, bool prefetch)
    : group_(group), prefetch_(prefetch) {
  for (const NamedTensor& p : parameters) {
    entries_.push_back(std::make_unique<Entry>(p, entries_.size(), owner(p.tensor)));
  }
}
ParameterShards::~ParameterShards() = default;

void ParameterShards::attach(const nn::ModuleBase& module) {
  module.apply([this](const std::string& path, const nn::ModuleBase& m) {
    std::vector<Tensor> own;
    for (const Tensor& p : m.own_parameters()) {
      if (entry_of(p)) own.push_back(p);
    }
    const bool whole = path.empty();
    if (own.empty() && !whole) return;
    m.set_forward_guard([self = shared_from_this(), own, whole] {
      if (whole) self->begin_pass_of_network();
      return own.empty() ? nullptr : self->gather_for_module(own);
    });
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

// Recomputation in a backward pass belongs to that.
void ParameterShards::begin_pass() {
  if (halfstep::detail::backward_depth() > 0) return;
  drop_ahead();
  order_.begin(GradMode::is_enabled());
}

void ParameterShards::values_change() {
  drop_ahead();
  if (halfstep::detail::backward_depth() == 0) order_.begin(true);
}

// It is waited for, as its owners' values may be written to from now on.
void ParameterShards::drop_ahead() {
  if (!ahead_) return;
  const std::unique_ptr<Gather> gather = std::move(ahead_);
  ++stats_.discarded;
  gather->work.wait();
}

// `ahead`: ranks that don't expect the same find out as those do that ask for different parameters.
void ParameterShards::begin_next(Gather& gather, bool ahead) {
  const Entry& e = *entries_[gather.unit[gather.values.size()]];
  const TensorImpl& p = e.impl();
  const bool here = e.owner == group_.rank();
  const Tensor flat = here ? Tensor(TensorImpl::make(p.storage, p.offset, {p.numel}, {1}, p.dtype))
                           : empty({p.numel}, {.dtype = p.dtype, .device = p.storage->device()});
  gather.values.push_back(flat);
  gather.work = group_.broadcast(flat, e.owner, ahead ? e.parameter.name + ", ahead" : e.parameter.name);
}

// The owners' values, as tensors with the parameters' layouts: on an owner its own, elsewhere memory of their own.
std::vector<Tensor> ParameterShards::values_of(const GatherOrder::Unit& unit, bool follows_order) {
  std::unique_ptr<Gather> gather = std::move(ahead_);
  if (gather && gather->unit == unit) {
    ++stats_.ahead;
    if (gather->work.done()) ++stats_.arrived;
  } else {
    if (gather) ++stats_.discarded;
    gather = std::make_unique<Gather>(Gather{.unit = unit, .values = {}, .work = {}});
    begin_next(*gather, false);
  }
  ++stats_.gathers;
  const auto begin = std::chrono::steady_clock::now();
  gather->work.wait();
  while (gather->values.size() < unit.size()) {
    begin_next(*gather, false);
    gather->work.wait();
  }
  stats_.wait_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (const GatherOrder::Unit* next = prefetch_ && follows_order ? order_.next(unit) : nullptr) {
    ahead_ = std::make_unique<Gather>(Gather{.unit = *next, .values = {}, .work = {}});
    begin_next(*ahead_, true);
  }
  std::vector<Tensor> values;
  for (std::size_t k = 0; k < unit.size(); ++k) {
    const Entry& e = *entries_[unit[k]];
    const Tensor& flat = gather->values[k];
    values.push_back(
        Tensor(TensorImpl::make(flat.storage(), flat.storage_offset(), e.impl().sizes, e.strides, e.impl().dtype)));
  }
  return values;
}

void ParameterShards::bring(const std::vector<Entry*>& entries, bool of_module) {
  if (CaptureSink* sink = capture_sink()) [[unlikely]]
    sink->refuse("parameters are divided among the ranks (ZeRO stage 3)");
  GatherOrder::Unit unit;
  for (const Entry* e : entries) {
    if (e->users == 0 && std::find(unit.begin(), unit.end(), e->number) == unit.end()) unit.push_back(e->number);
  }
  // The largest comes ahead.
  std::stable_sort(unit.begin(), unit.end(), [this](std::size_t a, std::size_t b) {
    return entries_[a]->impl().numel > entries_[b]->impl().numel;
  });
  if (!unit.empty()) {
    const CapturePause pause;
    const NoGrad no_grad;
    const std::vector<Tensor> values = values_of(unit, of_module);
    for (std::size_t k = 0; k < unit.size(); ++k) place(*entries_[unit[k]], values[k]);
  }
  for (Entry* e : entries) ++e->users;
}

void ParameterShards::place(Entry& e, const Tensor& values) {
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
  drop_ahead();
  std::vector<Entry*> entries;
  for (const auto& e : entries_) entries.push_back(e.get());
  return std::make_shared<Guard>(shared_from_this(), std::move(entries), false);
}

std::shared_ptr<void> ParameterShards::gather_for_module(const std::vector<Tensor>& parameters) {
  std::shared_ptr<void> guard = gather(parameters);
  if (!watching_) return guard;
  const std::size_t begin = pass_->size();
  pass_->push_back({Event::brought, begin, parameters});
  return {nullptr, [pass = pass_, begin, guard](void*) mutable {
            guard.reset();
            pass->push_back({Event::let_go, begin, {}});
          }};
}

void ParameterShards::begin_pass_of_network() {
  begin_pass();
  if (watching_) pass_->push_back({Event::pass_begins, 0, {}});
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
    switch (e.kind) {
      case Event::pass_begins:
        begin_pass();
        break;
      case Event::brought:
        here[e.begin] = gather(e.parameters);
        break;
      case Event::let_go:
        here.erase(e.begin);
        break;
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
  for (std::size_t k = 0; ahead_ && k < ahead_->values.size(); ++k) {
    const Tensor& t = ahead_->values[k];
    if (entries_[ahead_->unit[k]]->owner != group_.rank()) {
      bytes += t.numel() * static_cast<std::int64_t>(t.item_size());
    }
  }
  return bytes;
}

}  // namespace halfstep::dist::detail
