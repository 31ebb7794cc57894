// SPDX-License-Identifier: Apache-2.0
// What a run of a step leaves to be repeated.
#include <algorithm>
#include <cstring>

#include "halfstep/capture/recording_internal.h"
#include "halfstep/ops/call_internal.h"

namespace halfstep::detail {

Tensor gradient_of(const TensorImpl& leaf) {
  const auto* meta = static_cast<const AutogradMeta*>(leaf.grad_slot.get());
  return meta ? meta->grad : Tensor();
}

Recording::Recording(std::span<const Tensor> inputs, const std::vector<Ref<TensorImpl>>& leaves)
    : arena_(CaptureArena::make(Device{})) {
  for (const auto& leaf : leaves) start_.emplace_back(leaf, gradient_of(*leaf));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) {
      aliases_.emplace_back();
      continue;
    }
    const TensorImpl& p = *inputs[i].impl();
    // The alias is no allocator's.
    if (const Device device = p.storage->device(); !device.is_cpu()) p.storage->use_on(current_native_queue(device));
    auto storage = Storage::wrap(p.storage->data(), p.storage->bytes(), p.storage->device(), [held = p.storage] {});
    inputs_.emplace_back(storage.get(), i);
    aliases_.emplace_back(TensorImpl::make(std::move(storage), p.offset, p.sizes, p.strides, p.dtype));
  }
  for (const Tensor& t : inputs) input_data_.push_back(t.defined() ? t.impl()->data() : nullptr);
}

Recording::~Recording() {
  drop_graphs();
  results_.clear();
  gradients_.clear();
  kept_.clear();
  before_.clear();
  steps_.clear();
  for (CaptureArena* arena : arenas()) {
    if (arena) arena->close();
  }
}

Allocator* Recording::memory(Device device) {
  if (!arena_ || !refusal_.empty()) return nullptr;
  if (device.is_cpu()) return arena_;
  if (device.is_meta()) {
    if (!meta_arena_) meta_arena_ = CaptureArena::make(device);
    return meta_arena_;
  }
  if (!use_device(device, current_native_queue(device))) return nullptr;
  if (!device_arena_) device_arena_ = CaptureArena::make(device);
  device_arena_->set_alone(own_memory_);
  return device_arena_;
}

bool Recording::use_device(Device device, void* queue) {
  if (!queue_) {
    device_ = device;
    backend_ = &backend_for(device, "capture");
    queue_ = Queue::current(device);
  }
  if (device != device_) {
    refuse("it computes on " + device_.str() + " and on " + device.str());
  } else if (queue != queue_->native()) {
    refuse("it computes on several queues");
  }
  return refusal_.empty();
}

bool Recording::owns(const void* data) const {
  const auto all = arenas();
  return std::any_of(all.begin(), all.end(), [&](const auto* arena) { return arena && arena->owns(data); });
}

std::size_t Recording::blocks_in_use() const {
  std::size_t sum = 0;
  for (const CaptureArena* arena : arenas()) sum += arena ? arena->in_use() : 0;
  return sum;
}

std::size_t Recording::bytes() const {
  std::size_t sum = 0;
  for (const CaptureArena* arena : arenas()) sum += arena ? arena->bytes() : 0;
  return sum;
}

std::optional<Recording::Lies> Recording::find(const void* data) const {
  for (CaptureArena* arena : arenas()) {
    if (!arena) continue;
    if (const auto place = arena->find(data)) return Lies{arena, *place};
  }
  return std::nullopt;
}

std::optional<Recording::Lies> Recording::note_use(const void* data) {
  const auto found = find(data);
  if (found) found->arena->use(found->place, steps_.size() - 1);
  return found;
}

void Recording::refuse(std::string why) {
  if (refusal_.empty()) refusal_ = std::move(why);
}

void Recording::note_leaf(const Tensor& tensor) {
  TensorImpl* p = tensor.impl();
  if (p->base) p = p->base.get();
  if (!p->requires_grad || !known_leaves_.insert(p).second) return;
  const auto* meta = static_cast<const AutogradMeta*>(p->grad_slot.get());
  if (meta && meta->grad_fn) {
    known_leaves_.erase(p);
    return;
  }
  leaves_.push_back(Ref<TensorImpl>::share(p));
  if (!arena_) return;
  places_.emplace_back(leaves_.back(), p->storage.get());
  modes_.try_emplace(p, leaves_.back(), true);  // also where a kernel sees its 16-bit copy only
}

void Recording::manage(const Tensor& tensor) { managed_.insert(tensor.storage().get()); }

void Recording::note_mode(const Tensor& tensor) {
  const Ref<TensorImpl>& base = tensor.impl()->base;
  const Ref<TensorImpl> root = base ? base : Ref<TensorImpl>::share(tensor.impl());
  modes_.try_emplace(root.get(), root, root->requires_grad);
}

void Recording::uses(const Tensor& tensor) {
  if (!tensor.defined()) return;
  note_leaf(tensor);
  const TensorImpl& p = *tensor.impl();
  if (!arena_ || !refusal_.empty() || managed_.contains(p.storage.get()) || owns(p.storage->address())) return;
  const auto is_it = [&](const auto& input) { return input.first == p.storage.get(); };
  if (p.numel == 0 || std::any_of(inputs_.begin(), inputs_.end(), is_it)) return;
  outside_.emplace(p.storage.get(), p.storage);
  note_mode(tensor);
}

Storage* Recording::place(const Ref<Storage>& storage, const void* data, bool written, Step& step) {
  Storage* const s = storage.get();
  const auto input = std::find_if(inputs_.begin(), inputs_.end(), [&](const auto& i) { return i.first == s; });
  if (input != inputs_.end()) {
    relocations_.push_back({views_.size(), input->second,
                            static_cast<const char*>(data) - static_cast<const char*>(input_data_[input->second])});
    if (written) step.written_inputs.push_back(input->second);
    return nullptr;
  }
  if (!data) return nullptr;
  if (const auto lies = note_use(data)) {
    lying_.emplace_back(views_.size(), *lies);
    if (step.kind == Step::Kind::copy && written) step.early = lies->arena->is_alone(lies->place);
    return nullptr;
  }
  if (!managed_.contains(s)) outside_.emplace(s, storage);
  if (written) step.written.push_back(s);
  return s;
}

void Recording::add_view(const Tensor& tensor, bool written, Step& step) {
  TensorView view = view_of(tensor);
  Storage* outside = nullptr;
  if (tensor.defined()) {
    const TensorImpl& p = *tensor.impl();
    shapes_.push_back(p.sizes);
    view.sizes = shapes_.back().data();
    shapes_.push_back(p.strides);
    view.strides = shapes_.back().data();
    outside = place(p.storage, view.data, written, step);
    if (outside && !managed_.contains(outside)) note_mode(tensor);
  }
  views_.push_back(view);
  storages_.push_back(outside);
}

void Recording::kernel(const KernelCall& call, const KernelRun& run) {
  for (const auto list : {call.inputs, call.outputs}) {
    for (const Tensor* t : list) {
      if (t->defined()) note_leaf(*t);
    }
  }
  if (!call.device.is_host() && !use_device(call.device, run.queue)) return;
  if (!arena_ || !refusal_.empty()) return;
  Step& step = steps_.emplace_back();
  step.device = call.device;
  step.function = run.function;
  step.state = run.state;
  step.table = &call.table;
  step.name = call.name;
  step.dtype = call.dtype;
  step.attributes = call.attributes;
  if (call.live) {
    step.live_bytes = call.attributes_bytes;
  } else if (call.attributes && call.attributes_bytes) {
    attributes_.push_back(std::make_unique<unsigned char[]>(call.attributes_bytes));
    std::memcpy(attributes_.back().get(), call.attributes, call.attributes_bytes);
    step.attributes = attributes_.back().get();
  }
  step.first_view = views_.size();
  step.inputs = static_cast<int>(call.inputs.size());
  step.outputs = static_cast<int>(call.outputs.size());
  step.fresh = call.fresh;
  step.bounded = run.bounded;
  CaptureArena* const arena = call.device.is_cpu() ? arena_ : call.device.is_meta() ? meta_arena_ : device_arena_;
  if (arena && run.workspace >= kLeastPlannedWork) {
    step.work_bytes = run.workspace;
    working_.emplace_back(&step, Lies{arena, arena->add_work(run.workspace, steps_.size() - 1)});
  }
  for (const Tensor* t : call.inputs) add_view(*t, false, step);
  for (const Tensor* t : call.outputs) {
    add_view(*t, true, step);
    if (t->defined()) bounds_.erase(t->storage().get());
  }
  if (run.bounded) {
    step.bound = call.outputs[0]->storage()->magnitude_bound();
    bounds_[call.outputs[0]->storage().get()] = &step.bound;
  }
}

void Recording::copy(const Bytes& to, const Bytes& from, std::size_t count, bool non_blocking) {
  const Device device = to.storage->device().is_cpu() ? from.storage->device() : to.storage->device();
  if (!use_device(device, current_native_queue(device)) || !arena_ || count == 0) return;
  Step& step = steps_.emplace_back();
  step.kind = Step::Kind::copy;
  step.from = from.storage->device();
  step.to = to.storage->device();
  step.bytes = count;
  step.non_blocking = non_blocking;
  step.first_view = views_.size();
  for (const Bytes* part : {&from, &to}) {
    TensorView view = view_of({});
    view.data = static_cast<char*>(const_cast<void*>(part->storage->address())) + part->begin;
    Storage* const outside = place(part->storage, view.data, part == &to, step);
    views_.push_back(view);
    storages_.push_back(outside);
  }
  bounds_.erase(to.storage.get());
}

void Recording::host(std::function<void()> work) {
  if (!arena_ || !refusal_.empty()) return;
  Step& step = steps_.emplace_back();
  step.kind = Step::Kind::host;
  step.work = std::move(work);
}

void Recording::exchange(std::span<const Tensor> tensors, std::function<void()> work) {
  for (const Tensor& t : tensors) {
    if (!t.device().is_host() && !use_device(t.device(), current_native_queue(t.device()))) return;
  }
  if (!arena_ || !refusal_.empty()) return;
  Step& step = steps_.emplace_back();
  step.kind = Step::Kind::host;
  step.ordered = true;
  step.work = std::move(work);
  for (const Tensor& t : tensors) {
    Storage* const storage = t.storage().get();
    bounds_.erase(storage);
    note_use(storage->address());
    // What isn't in memory of the arenas is kept by uses().
    const bool kept = owns(storage->address()) || outside_.contains(storage);
    if (!t.device().is_host() && kept) step.exchanged.push_back(storage);
  }
}

void Recording::before(std::function<bool()> work) {
  if (arena_ && refusal_.empty()) before_.push_back(std::move(work));
}

Tensor Recording::stand_in(const Tensor& tensor) {
  const TensorImpl& p = *tensor.impl();
  const auto lies = find(p.storage->address());
  if (!lies) return {};
  auto storage = Storage::wrap(p.storage->data(), p.storage->bytes(), p.storage->device(), {});
  stand_ins_.emplace_back(storage, *lies);
  return Tensor(TensorImpl::make(std::move(storage), p.offset, p.sizes, p.strides, p.dtype));
}

void Recording::keep(const Tensor& tensor) {
  if (arena_) kept_.push_back(tensor);
}

const float* Recording::bound_of(const Tensor& tensor) {
  const auto found = bounds_.find(tensor.storage().get());
  return found == bounds_.end() ? nullptr : found->second;
}

void Recording::settle(const std::vector<Tensor>& results, const std::vector<Ref<TensorImpl>>& leaves) {
  const auto bring = [](const Tensor& t) {
    if (t.defined()) t.storage()->data();
  };
  for (const Tensor& t : results) bring(t);
  for (const Tensor& t : kept_) bring(t);
  for (const auto* list : {&leaves, static_cast<const std::vector<Ref<TensorImpl>>*>(&leaves_)}) {
    for (const auto& leaf : *list) bring(gradient_of(*leaf));
  }
}

bool Recording::finish(const std::vector<Tensor>& results, const std::vector<Ref<TensorImpl>>& leaves,
                       std::span<const Tensor> inputs) {
  if (queue_ && current_native_queue(device_) != queue_->native()) refuse("it computes on a queue of its own");
  for (const Step& step : steps_) {
    for (const std::size_t i : step.written_inputs) {
      inputs[i].storage()->bump_version();
      inputs[i].storage()->forget_derived();
    }
  }
  for (const Tensor& t : results) {
    if (t.defined()) {
      const Storage* storage = t.storage().get();
      for (const auto& [input, index] : inputs_) {
        if (input == storage) refuse("it returns an input");
      }
    }
    results_.push_back(t.defined() ? t.detach() : t);
  }
  for (const auto& list : {leaves, leaves_}) {
    for (const auto& leaf : list) {
      if (std::any_of(gradients_.begin(), gradients_.end(), [&](const auto& g) { return g.first == leaf; })) continue;
      gradients_.emplace_back(leaf, gradient_of(*leaf));
    }
  }
  for (const auto& [leaf, gradient] : start_) {
    if (!gradient.defined()) continue;
    Storage* storage = gradient.storage().get();
    if (outside_.contains(storage)) added_to_.emplace_back(leaf, storage);
  }
  start_.clear();
  bounds_.clear();
  for (const Tensor& t : aliases_) {
    if (t.defined() && (t.impl()->use_count() > 1 || t.storage()->use_count() > 1)) refuse("it keeps an input");
  }
  aliases_.clear();  // not ours to keep
  inputs_.clear();
  std::set<const Storage*> ours;
  const auto count = [&](const Tensor& t) {
    if (t.defined() && owns(t.storage()->address())) ours.insert(t.storage().get());
  };
  for (const Tensor& t : results_) count(t);
  for (const Tensor& t : kept_) count(t);
  for (const auto& [leaf, gradient] : gradients_) count(gradient);
  if (blocks_in_use() > ours.size()) return false;
  if (!refusal_.empty()) return true;
  try {
    place_memory();
  } catch (const OutOfMemoryError&) {
    // A step that runs by itself has less at a time.
    refuse("there is not enough memory to keep all of its own");
    return true;
  }
  if (!queue_ && !no_chains_ && refusal_.empty()) find_chains();
  return true;
}

void Recording::place_memory() {
  std::set<const Storage*> seen;
  for (const Tensor& t : kept_) {
    if (t.defined()) seen.insert(t.storage().get());  // whose addresses the host's work has
  }
  std::map<const CaptureArena*, std::vector<Ref<Storage>>> outlasting;
  const auto add = [&](const Tensor& t) {
    if (!t.defined() || t.storage()->address_held() || !seen.insert(t.storage().get()).second) return;
    if (const auto lies = find(t.storage()->address())) outlasting[lies->arena].push_back(t.storage());
  };
  for (const Tensor& t : results_) add(t);
  for (const auto& [leaf, gradient] : gradients_) add(gradient);
  for (CaptureArena* arena : arenas()) {
    if (arena) arena->place(outlasting[arena]);
  }
  for (const auto& [view, lies] : lying_) views_[view].data = lies.arena->address(lies.place);
  for (const auto& [step, lies] : working_) step->work_memory = lies.arena->address(lies.place);
  for (const auto& [storage, lies] : stand_ins_) storage->move_to(lies.arena->address(lies.place));
  lying_ = {};
  working_ = {};
  stand_ins_.clear();
}

bool Recording::valid() const {
  if (queue_ && current_native_queue(device_) != queue_->native()) return false;  // the caller's
  for (const auto& [impl, held] : modes_) {
    if (impl->requires_grad != held.second) return false;
    // Nobody but us uses it any more: neither the tensor, nor its memory by another.
    if (impl->use_count() < 2 && impl->storage->use_count() <= 2) return false;
  }
  for (const auto& [leaf, storage] : places_) {
    if (leaf->storage.get() != storage) return false;
  }
  for (const auto& [leaf, storage] : added_to_) {
    const Tensor now = gradient_of(*leaf);
    if (!now.defined() || now.storage().get() != storage) return false;
  }
  return true;
}

bool Recording::ready() {
  return std::all_of(before_.begin(), before_.end(), [](const auto& work) { return work(); });
}

}  // namespace halfstep::detail
