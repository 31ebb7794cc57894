// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <mutex>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/capture/recording_internal.h"
#include "halfstep/core/fail.h"
#include "halfstep/ops/call_internal.h"

namespace halfstep::detail {
namespace {

constexpr std::size_t kAlignment = 64;
std::size_t rounded(std::size_t bytes) {
  return (std::max<std::size_t>(bytes, 1) + kAlignment - 1) & ~(kAlignment - 1);
}

}  // namespace

void* CaptureArena::allocate(std::size_t bytes) {
  const std::size_t size = rounded(bytes);
  const std::lock_guard lock(mutex_);
  // The smallest free block that it fits in, unless most of that would lie idle.
  const auto found = free_.lower_bound(size);
  if (found != free_.end() && found->first <= 2 * size) {
    void* data = found->second.back();
    found->second.pop_back();
    if (found->second.empty()) free_.erase(found);
    ++users_;
    return data;
  }
  void* data = allocator_for(Device{}).allocate(size);
  blocks_.emplace(static_cast<const char*>(data), size);
  ++users_;
  return data;
}

void CaptureArena::deallocate(void* data, std::size_t) noexcept {
  std::unique_lock lock(mutex_);
  const auto block = blocks_.find(static_cast<const char*>(data));
  if (closed_) {
    allocator_for(Device{}).deallocate(data, block->second);
    blocks_.erase(block);
  } else {
    free_[block->second].push_back(data);
  }
  release(std::move(lock));
}

bool CaptureArena::owns(const void* data) const {
  const std::lock_guard lock(mutex_);
  auto after = blocks_.upper_bound(static_cast<const char*>(data));
  if (after == blocks_.begin()) return false;
  --after;
  return static_cast<const char*>(data) < after->first + after->second;
}

std::size_t CaptureArena::in_use() const {
  const std::lock_guard lock(mutex_);
  return users_ - 1;
}

void CaptureArena::close() noexcept {
  std::unique_lock lock(mutex_);
  closed_ = true;
  for (const auto& [size, list] : free_) {
    for (void* data : list) {
      allocator_for(Device{}).deallocate(data, size);
      blocks_.erase(static_cast<const char*>(data));
    }
  }
  free_.clear();
  release(std::move(lock));
}

void CaptureArena::release(std::unique_lock<std::mutex> lock) noexcept {
  if (--users_ > 0) return;
  lock.unlock();
  delete this;
}

Tensor gradient_of(const TensorImpl& leaf) {
  const auto* meta = static_cast<const AutogradMeta*>(leaf.grad_slot.get());
  return meta ? meta->grad : Tensor();
}

Recording::Recording(std::span<const Tensor> inputs, const std::vector<Ref<TensorImpl>>& leaves)
    : arena_(CaptureArena::make()) {
  for (const auto& leaf : leaves) start_.emplace_back(leaf, gradient_of(*leaf));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) {
      aliases_.emplace_back();
      continue;
    }
    const TensorImpl& p = *inputs[i].impl();
    auto storage = Storage::wrap(p.storage->data(), p.storage->bytes(), p.storage->device(), [held = p.storage] {});
    inputs_.emplace_back(storage.get(), i);
    aliases_.emplace_back(TensorImpl::make(std::move(storage), p.offset, p.sizes, p.strides, p.dtype));
  }
  for (const Tensor& t : inputs) input_data_.push_back(t.defined() ? t.impl()->data() : nullptr);
}

Recording::~Recording() {
  results_.clear();
  gradients_.clear();
  kept_.clear();
  before_.clear();
  steps_.clear();
  for (const auto& [data, bytes] : workspace_) allocator_for(Device{}).deallocate(data, bytes);
  if (arena_) arena_->close();
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

void Recording::uses(const Tensor& parameter) { note_leaf(parameter); }

void Recording::add_view(const Tensor& tensor, bool written, Step& step) {
  TensorView view = view_of(tensor);
  Storage* place = nullptr;
  if (tensor.defined()) {
    const TensorImpl& p = *tensor.impl();
    shapes_.push_back(p.sizes);
    view.sizes = shapes_.back().data();
    shapes_.push_back(p.strides);
    view.strides = shapes_.back().data();
    Storage* storage = p.storage.get();
    const auto input = std::find_if(inputs_.begin(), inputs_.end(), [&](const auto& i) { return i.first == storage; });
    if (input != inputs_.end()) {
      relocations_.push_back(
          {views_.size(), input->second,
           static_cast<const char*>(view.data) - static_cast<const char*>(input_data_[input->second])});
      if (written) step.written_inputs.push_back(input->second);
    } else if (view.data && !arena_->owns(view.data)) {
      if (!managed_.contains(storage)) {
        outside_.emplace(storage, p.storage);
        const Ref<TensorImpl> root = p.base ? p.base : Ref<TensorImpl>::share(tensor.impl());
        modes_.try_emplace(root.get(), root, root->requires_grad);
      }
      place = storage;
      if (written) step.written.push_back(storage);
    }
  }
  views_.push_back(view);
  storages_.push_back(place);
}

void Recording::kernel(const KernelCall& call, KernelFn function, bool bounded) {
  for (const auto list : {call.inputs, call.outputs}) {
    for (const Tensor* t : list) {
      if (t->defined()) note_leaf(*t);
    }
  }
  if (!arena_ || !refusal_.empty()) return;
  Step& step = steps_.emplace_back();
  step.function = function;
  step.name = call.name;
  step.attributes = call.attributes;
  if (call.attributes && call.attributes_bytes) {
    attributes_.push_back(std::make_unique<unsigned char[]>(call.attributes_bytes));
    std::memcpy(attributes_.back().get(), call.attributes, call.attributes_bytes);
    step.attributes = attributes_.back().get();
  }
  step.first_view = views_.size();
  step.inputs = static_cast<int>(call.inputs.size());
  step.outputs = static_cast<int>(call.outputs.size());
  step.bounded = bounded;
  for (const Tensor* t : call.inputs) add_view(*t, false, step);
  for (const Tensor* t : call.outputs) {
    add_view(*t, true, step);
    if (t->defined()) bounds_.erase(t->storage().get());
  }
  if (bounded) {
    step.bound = call.outputs[0]->storage()->magnitude_bound();
    bounds_[call.outputs[0]->storage().get()] = &step.bound;
  }
}

void Recording::host(std::function<void()> work) {
  if (arena_ && refusal_.empty()) steps_.emplace_back().work = std::move(work);
}

void Recording::before(std::function<bool()> work) {
  if (arena_ && refusal_.empty()) before_.push_back(std::move(work));
}

void Recording::keep(const Tensor& tensor) {
  if (arena_) kept_.push_back(tensor);
}

const float* Recording::bound_of(const Tensor& tensor) {
  const auto found = bounds_.find(tensor.storage().get());
  return found == bounds_.end() ? nullptr : found->second;
}

bool Recording::finish(const std::vector<Tensor>& results, const std::vector<Ref<TensorImpl>>& leaves,
                       std::span<const Tensor> inputs) {
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
    if (t.defined() && arena_->owns(t.impl()->data())) ours.insert(t.storage().get());
  };
  for (const Tensor& t : results_) count(t);
  for (const Tensor& t : kept_) count(t);
  for (const auto& [leaf, gradient] : gradients_) count(gradient);
  return arena_->in_use() <= ours.size();
}

bool Recording::valid() const {
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

// What a kernel asks for in a replay.
struct Recording::Context : KernelContext {
  Recording& recording;
  Step* step = nullptr;
  std::size_t block = 0;  // of the workspace
  std::size_t used = 0;
  std::string error;
  CpuKernelState storages;

  explicit Context(Recording& r) : recording(r) {
    owner = this;
    workspace = [](KernelContext* context, std::uint64_t bytes) -> void* {
      return static_cast<Context*>(context->owner)->take(bytes);
    };
    set_error = [](KernelContext* context, const char* text) { static_cast<Context*>(context->owner)->error = text; };
    storages.storage = [](KernelContext* context, int index) -> Storage* {
      const auto& self = *static_cast<Context*>(context->owner);
      return self.recording.storages_[self.step->first_view + static_cast<std::size_t>(index)];
    };
    state = &storages;
  }

  void begin(Step& s) {
    step = &s;
    block = used = 0;
    s.bound = std::numeric_limits<float>::infinity();
    set_magnitude_bound = s.bounded ? [](KernelContext* context,
                                         float bound) { static_cast<Context*>(context->owner)->step->bound = bound; }
                                    : static_cast<void (*)(KernelContext*, float)>(nullptr);
  }

  // Scratch is the same memory for all kernels, kept from replay to replay.
  void* take(std::uint64_t bytes) {
    const std::size_t size = rounded(bytes);
    auto& blocks = recording.workspace_;
    while (block < blocks.size() && used + size > blocks[block].second) ++block, used = 0;
    if (block == blocks.size()) {
      try {
        const std::size_t fresh = std::max<std::size_t>(size, std::size_t{1} << 20);
        blocks.reserve(blocks.size() + 1);
        blocks.emplace_back(allocator_for(Device{}).allocate(fresh), fresh);
      } catch (const std::exception& e) {
        error = e.what();
        return nullptr;
      }
    }
    void* data = static_cast<char*>(blocks[block].first) + used;
    used += size;
    return data;
  }
};

std::vector<Tensor> Recording::replay(std::span<const Tensor> inputs) {
  for (const Relocation& r : relocations_) {
    views_[r.view].data = static_cast<char*>(inputs[r.input].impl()->data()) + r.offset;
  }
  Context context(*this);
  for (Step& step : steps_) {
    if (!step.function) {
      step.work();
      continue;
    }
    const auto count = static_cast<std::size_t>(step.inputs + step.outputs);
    // Kernels may change the views that they are given.
    scratch_.assign(views_.begin() + static_cast<std::ptrdiff_t>(step.first_view),
                    views_.begin() + static_cast<std::ptrdiff_t>(step.first_view + count));
    context.begin(step);
    const Status status = step.function(&context, scratch_.data(), step.inputs, scratch_.data() + step.inputs,
                                        step.outputs, step.attributes);
    if (status != Status::ok) {
      fail<Error>("{}: {}, in the replay of a captured step", step.name,
                  context.error.empty() ? "its kernel refused these inputs" : context.error);
    }
    for (Storage* storage : step.written) {
      storage->bump_version();
      storage->forget_derived();
    }
    for (const std::size_t i : step.written_inputs) {
      inputs[i].storage()->bump_version();
      inputs[i].storage()->forget_derived();
    }
  }
  for (const auto& [leaf, gradient] : gradients_) {
    const Tensor parameter(leaf);
    const Tensor now = gradient_of(*leaf);
    if (now.defined() != gradient.defined() || (now.defined() && !now.is_same(gradient))) {
      parameter.set_grad(gradient);
    }
    if (gradient.defined()) gradient.storage()->bump_version();
  }
  const NoGrad no_grad;
  std::vector<Tensor> results;
  results.reserve(results_.size());
  for (const Tensor& t : results_) results.push_back(t.defined() ? t.clone() : t);
  return results;
}

}  // namespace halfstep::detail
