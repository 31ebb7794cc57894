// SPDX-License-Identifier: Apache-2.0
// A recorded step once more: its kernels on the CPU or enqueued on the device, its copies and the host's work between.
#include <algorithm>
#include <limits>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/capture/replay_internal.h"
#include "halfstep/core/fail.h"
#include "halfstep/ops/call_internal.h"
#include "halfstep/runtime/transfer.h"

namespace halfstep::detail {

Recording::Context::Context(Recording& r) : recording(r) {
  owner = this;
  workspace = [](KernelContext* context, std::uint64_t bytes) -> void* {
    auto& self = *static_cast<Context*>(context->owner);
    if (void* const planned = self.work(bytes)) return planned;
    try {
      return self.scratch->take(bytes);
    } catch (const std::exception& e) {
      self.error = e.what();
      return nullptr;
    }
  };
  set_error = [](KernelContext* context, const char* text) { static_cast<Context*>(context->owner)->error = text; };
  storages.storage = [](KernelContext* context, int index) -> Storage* {
    const auto& self = *static_cast<Context*>(context->owner);
    return self.recording.storages_[self.step->first_view + static_cast<std::size_t>(index)];
  };
}

// In a replay a kernel may ask for more than in the recorded step: what it kept of the contents of a tensor then, it
// makes anew where the tensor is the recording's.
void* Recording::Context::work(std::uint64_t bytes) {
  const std::uint64_t size = (bytes + kWorkAlignment - 1) / kWorkAlignment * kWorkAlignment;
  if (!step->work_memory || size > step->work_bytes - worked) return nullptr;
  return static_cast<char*>(step->work_memory) + std::exchange(worked, worked + size);
}

void Recording::Context::begin(Step& s) {
  step = &s;
  worked = 0;
  error.clear();
  const bool on_device = s.on_device();
  if (on_device && !recording.device_workspace_) recording.device_workspace_.emplace(recording.device_);
  const bool dry = s.device.is_meta();
  scratch = on_device ? &*recording.device_workspace_ : dry ? &recording.meta_workspace_ : &recording.workspace_;
  storages.dry = dry;
  scratch->begin();
  device = on_device ? recording.device_.index : 0;
  queue = on_device ? recording.queue_->native() : nullptr;
  state = on_device ? s.state : &storages;
  call = 0;
  s.bound = std::numeric_limits<float>::infinity();
  set_magnitude_bound = s.bounded ? [](KernelContext* context,
                                       float bound) { static_cast<Context*>(context->owner)->step->bound = bound; }
                                  : static_cast<void (*)(KernelContext*, float)>(nullptr);
}

void Recording::relocate(std::span<const Tensor> inputs) {
  for (const Relocation& r : relocations_) {
    views_[r.view].data = static_cast<char*>(inputs[r.input].impl()->data()) + r.offset;
  }
}

void Recording::wrote(const Step& step, std::span<const Tensor> inputs) {
  for (Storage* storage : step.written) {
    storage->bump_version();
    storage->forget_derived();
  }
  for (const std::size_t i : step.written_inputs) {
    inputs[i].storage()->bump_version();
    inputs[i].storage()->forget_derived();
  }
}

Status Recording::call(Step& step, Context& context) {
  const auto count = static_cast<std::size_t>(step.inputs + step.outputs);
  // Kernels may change the views that they are given.
  scratch_.assign(views_.begin() + static_cast<std::ptrdiff_t>(step.first_view),
                  views_.begin() + static_cast<std::ptrdiff_t>(step.first_view + count));
  context.begin(step);
  if (step.on_device()) {
    context.call = building_ ? backend_->graph_call(step.name) : backend_->begin_call(step.name, device_.index);
  }
  return step.function(&context, scratch_.data(), step.inputs, scratch_.data() + step.inputs, step.outputs,
                       step.attributes);
}

void Recording::launch(Step& step, Context& context) {
  if (step.on_device()) backend_->check_alive(step.name, device_.index);
  const Status status = call(step, context);
  if (status == Status::ok) return;
  if (!step.on_device()) {
    fail<Error>("{}: {}, in the replay of a captured step", step.name,
                context.error.empty() ? "its kernel refused these inputs" : context.error);
  }
  const std::span<const TensorView> views = std::span(views_).subspan(step.first_view);
  const auto in = views.first(static_cast<std::size_t>(step.inputs));
  if (status != Status::unsupported) raise_launch(device_, step.name, status, context.error, describe(in));
  // As for a call by itself.
  run_fallback({.table = *step.table,
                .name = step.name,
                .device = device_,
                .dtype = step.dtype,
                .inputs = {},
                .outputs = {},
                .attributes = step.attributes},
               in, views.subspan(in.size(), static_cast<std::size_t>(step.outputs)),
               "no kernel for these inputs" + (context.error.empty() ? "" : ": " + context.error));
}

void Recording::run(Step& step, Context& context, std::span<const Tensor> inputs) {
  switch (step.kind) {
    case Step::Kind::host:
      step.work();
      // The CPU may have computed a part of it in the device's place, and kernels that follow read the device's memory.
      for (Storage* storage : step.exchanged) storage->data();
      return;
    case Step::Kind::copy:
      copy_memory(views_[step.first_view + 1].data, step.to, views_[step.first_view].data, step.from, step.bytes,
                  step.non_blocking);
      break;
    case Step::Kind::kernel:
      launch(step, context);
      break;
  }
  wrote(step, inputs);
}

std::vector<Tensor> Recording::replay(std::span<const Tensor> inputs) {
  run_again(inputs);
  const NoGrad no_grad;
  std::vector<Tensor> results;
  results.reserve(results_.size());
  for (const Tensor& t : results_) results.push_back(t.defined() ? t.clone() : t);
  return results;
}

// A gradient of the recording that is given to it is read before the replay has other things in its memory.
std::vector<Tensor> Recording::outside_of_own_memory(std::span<const Tensor> inputs) const {
  const auto ours = [&](const Tensor& t) { return t.defined() && owns(t.storage()->address()); };
  if (std::none_of(inputs.begin(), inputs.end(), ours)) return {};  // as always, and without taking memory
  std::vector<Tensor> result(inputs.begin(), inputs.end());
  for (std::size_t i = 0; i < result.size(); ++i) {
    if (!ours(result[i])) continue;
    const bool written = std::any_of(steps_.begin(), steps_.end(), [&](const Step& s) {
      return std::find(s.written_inputs.begin(), s.written_inputs.end(), i) != s.written_inputs.end();
    });
    if (written) continue;
    const NoGrad no_grad;
    const Tensor copy = result[i].clone();
    // The calls have the input's strides, which the copy of a part of a gradient may not have.
    if (copy.strides() == result[i].strides()) result[i] = copy;
  }
  return result;
}

void Recording::run_again(std::span<const Tensor> given) {
  const std::vector<Tensor> copied = outside_of_own_memory(given);
  const std::span<const Tensor> inputs = copied.empty() ? given : std::span<const Tensor>(copied);
  relocate(inputs);
  if (queue_) {
    // Memory of other queues is used on this one, and its contents may be on the host still.
    const auto prepare = [&](Storage& storage) {
      if (storage.device() != device_) return;
      storage.use_on(queue_->native());
      storage.data();
    };
    for (const auto& [storage, held] : outside_) prepare(*storage);
    for (const Tensor& t : inputs) {
      if (t.defined()) prepare(*t.storage());
    }
    for (const auto& [leaf, gradient] : gradients_) {
      if (gradient.defined()) prepare(*gradient.storage());
    }
  }
  Context context(*this);
  used_graphs_ = false;
  if (can_have_graphs()) {
    run_with_graphs(context, inputs);
  } else {
    std::size_t at = 0;
    for (const Chain& chain : chains_) {
      for (; at < chain.first; ++at) run(steps_[at], context, inputs);
      if (run_chain(chain, inputs)) at = chain.last;
    }
    for (; at < steps_.size(); ++at) run(steps_[at], context, inputs);
  }
  ++replays_;
  for (const auto& [leaf, gradient] : gradients_) {
    const Tensor parameter(leaf);
    const Tensor now = gradient_of(*leaf);
    if (now.defined() != gradient.defined() || (now.defined() && !now.is_same(gradient))) {
      parameter.set_grad(gradient);
    }
    if (gradient.defined()) gradient.storage()->bump_version();
  }
}

}  // namespace halfstep::detail
