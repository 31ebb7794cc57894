// SPDX-License-Identifier: Apache-2.0
#include "halfstep/amp/cast_cache.h"

#include <vector>

#include "halfstep/autograd/node.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/recomputing.h"
#include "halfstep/ops/recorder.h"

namespace halfstep::amp {
namespace {

struct Region {
  int depth = 0;
  std::uint64_t id = 0;
  std::vector<Tensor> cached;  // parameters whose slot holds an entry of this region
};

Region& region() {
  thread_local Region r;
  return r;
}

std::uint64_t next_region() {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

CastSlot& slot_of(const Tensor& parameter) {
  AutogradMeta& meta = autograd_meta(parameter);
  CastSlot* slot = meta.cast.get();
  return *(slot ? slot : meta.cast.set(new CastSlot));
}

Tensor same_memory(const Tensor& data) {
  const TensorImpl* p = data.impl();
  return Tensor(TensorImpl::make(p->storage, p->offset, p->sizes, p->strides, p->dtype));
}

bool is_copy_of(const CastSlot& slot, const Storage& source) {
  return slot.storage_id == source.id() && slot.contents == source.contents() && !source.address_held();
}

void note_copy_of(CastSlot& slot, const Storage& source) {
  slot.storage_id = source.id();
  slot.contents = source.contents();
}

// A replay reads the copy without asking whether it is good: it is brought up to date before. Nobody else writes while
// it runs, so that once is enough, whoever holds an address.
void refresh_before(KernelRecorder& recorder, const Tensor& source, const Tensor& copy) {
  recorder.uses(source);
  recorder.manage(copy);  // a count more on its memory would keep the optimizer from writing it
  recorder.before([source, copy] {
    CastSlot& slot = slot_of(source);
    std::lock_guard lock(slot.mutex);
    if (!slot.data.is_same(copy) || slot.storage_id != source.storage()->id()) return false;
    if (!is_copy_of(slot, *source.storage())) {
      Tensor to = copy;
      copy_unrecorded(to, source);
      note_copy_of(slot, *source.storage());
    }
    copy.storage()->data();  // on the device, too: what wrote it may have run on the CPU
    return true;
  });
}

}  // namespace

CastStats& cast_stats() {
  thread_local CastStats stats;
  return stats;
}

Tensor cached_cast(const Tensor& source, DType dtype) {
  const TensorImpl* p = source.impl();
  if (p->dtype == dtype) return source;
  Region& here = region();
  const ThreadState& state = thread_state();
  // The region of what is computed again has ended, but a copy that outlived it is good.
  const bool again = here.depth == 0 && halfstep::detail::recomputing();
  const bool cacheable = (here.depth > 0 || again) && state.autocast.cache && p->dtype == DType::f32 &&
                         p->requires_grad && !p->base && source.is_leaf() && !p->storage->address_held();
  if (!cacheable) {
    ++cast_stats().casts;
    return cast(source, dtype);
  }
  CastSlot& slot = slot_of(source);
  std::lock_guard lock(slot.mutex);
  const bool fresh = slot.data.defined() && slot.data.dtype() == dtype && is_copy_of(slot, *p->storage);
  if (fresh && slot.region == here.id && slot.recorded.defined() &&
      (!state.grad_enabled || slot.recorded.requires_grad())) {
    ++cast_stats().reused;
    return slot.recorded;
  }
  if (!fresh && again) {
    ++cast_stats().casts;
    return cast(source, dtype);
  }
  if (!fresh) {
    note_copy_of(slot, *p->storage);  // before it is read: who is given the address now is noticed at the next use
    slot.data = cast_unrecorded(source, dtype);
    ++cast_stats().casts;
  } else {
    ++cast_stats().reused;
    if (KernelRecorder* recorder = kernel_recorder()) [[unlikely]]
      refresh_before(*recorder, source, slot.data);
  }
  Tensor result = same_memory(slot.data);
  if (state.grad_enabled) {
    const Tensor* input = &source;
    const CastAttributes attributes = cast_attributes(dtype);
    op_hooks().record(cast_op(), {&input, 1}, &attributes, {&result, 1}, false);
  }
  if (again) return result;  // no region would let go of it
  if (slot.region != here.id) here.cached.push_back(source);
  slot.recorded = result;
  slot.region = here.id;
  return result;
}

void enter_region() {
  Region& here = region();
  if (here.depth++ == 0) here.id = next_region();
}

bool in_region() { return region().depth > 0; }

void leave_region() {
  Region& here = region();
  if (--here.depth > 0) return;
  for (const Tensor& parameter : here.cached) {
    CastSlot& slot = slot_of(parameter);
    std::lock_guard lock(slot.mutex);
    if (slot.region != here.id) continue;
    slot.recorded = Tensor();
    slot.region = 0;
    if (!slot.kept) slot.data = Tensor();
  }
  here.cached.clear();
}

void keep_copy(const Tensor& parameter, bool keep) {
  CastSlot& slot = slot_of(parameter);
  std::lock_guard lock(slot.mutex);
  slot.kept = keep;
  if (!keep && slot.region == 0) slot.data = Tensor();
}

Tensor kept_copy(const Tensor& parameter) {
  const AutogradMeta* meta = autograd_meta_or_null(parameter);
  if (!meta || !meta->cast) return {};
  CastSlot& slot = *meta->cast;
  std::lock_guard lock(slot.mutex);
  if (!slot.kept || !slot.data.defined()) return {};
  if (!is_copy_of(slot, *parameter.storage()) || slot.data.storage()->use_count() != 1 ||
      slot.data.strides() != parameter.strides()) {
    // A step that isn't made leaves the copy as it is, so it must be good before; and a graph or a region may still
    // read the old values. The next use casts anew.
    slot.data = Tensor();
    return {};
  }
  return slot.data;
}

void copy_written(const Tensor& parameter) {
  CastSlot& slot = slot_of(parameter);
  std::lock_guard lock(slot.mutex);
  note_copy_of(slot, *parameter.storage());
  if (slot.data.defined()) slot.data.storage()->bump_version();
}

}  // namespace halfstep::amp
