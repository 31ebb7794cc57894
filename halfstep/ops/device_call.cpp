// SPDX-License-Identifier: Apache-2.0
// Kernels of other devices than the CPU: enqueued on the thread's queue, given the layouts that they take, and replaced
// by the CPU's where there are none.
#include <algorithm>
#include <string_view>

#include "halfstep/core/fail.h"
#include "halfstep/ops/call_internal.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/recorder.h"
#include "halfstep/runtime/device_backend.h"
#include "halfstep/runtime/device_wait_internal.h"
#include "halfstep/runtime/fallback.h"
#include "halfstep/runtime/queue.h"

namespace halfstep::detail {
namespace {

std::string refusal(const KernelCall& call) {
  const DeviceBackend& backend = backend_for(call.device, call.name);
  const std::string why = backend.ask(call.table.name, call.table.version, call.dtype).reason;
  return fmt::format("no kernel for {}{}", name(call.dtype), why.empty() ? "" : ": " + why);
}

void note(const KernelCall& call, KernelFn kernel, const CallContext& context) {
  if (KernelRecorder* recorder = kernel_recorder()) [[unlikely]] {
    recorder->kernel(call, {.function = kernel,
                            .state = context.state,
                            .queue = context.queue,
                            .bounded = context.first_output != nullptr,
                            .workspace = context.workspace_bytes()});
  }
}

// The kernel takes row-major tensors only: others are copied into such ones, and results out of them.
Status run_contiguous(const KernelCall& call, KernelFn kernel, CallContext& context) {
  std::vector<Tensor> made;
  made.reserve(call.inputs.size() + call.outputs.size());
  std::vector<const Tensor*> inputs(call.inputs.begin(), call.inputs.end());
  std::vector<const Tensor*> outputs(call.outputs.begin(), call.outputs.end());
  const auto row_major = [&](const Tensor& t) {
    return empty_strided(t.sizes(), contiguous_strides(t.sizes()), {.dtype = t.dtype(), .device = call.device});
  };
  for (const Tensor*& t : inputs) {
    if (!t->defined() || t->is_contiguous()) continue;
    Tensor copy = row_major(*t);
    copy_unrecorded(copy, *t);
    made.push_back(std::move(copy));
    t = &made.back();
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const Tensor*& t = outputs[i];
    if (!t->defined() || t->is_contiguous()) continue;
    // Written in place: the copy that was made of the input is the output as well.
    const Tensor* same = nullptr;
    for (std::size_t j = 0; j < inputs.size() && !same; ++j) {
      const Tensor* original = call.inputs[j];
      if (original->defined() && original->storage() == t->storage() &&
          original->storage_offset() == t->storage_offset() && original->sizes() == t->sizes() &&
          original->strides() == t->strides()) {
        same = inputs[j];
      }
    }
    if (same) {
      t = same;
      continue;
    }
    Tensor copy = row_major(*t);
    if (!call.fresh) copy_unrecorded(copy, *t);
    made.push_back(std::move(copy));
    t = &made.back();
  }
  Views views(inputs, outputs);
  const Status status = kernel(&context, views.in(), static_cast<int>(inputs.size()), views.out(),
                               static_cast<int>(outputs.size()), call.attributes);
  if (status != Status::ok) return status;
  note({.table = call.table,
        .name = call.name,
        .device = call.device,
        .dtype = call.dtype,
        .inputs = inputs,
        .outputs = outputs,
        .attributes = call.attributes,
        .attributes_bytes = call.attributes_bytes,
        .live = call.live},
       kernel, context);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i] == call.outputs[i]) continue;
    Tensor destination = *call.outputs[i];
    copy_unrecorded(destination, *outputs[i]);
  }
  return status;
}

bool needs_contiguous(const KernelCall& call) {
  const auto strided = [](const Tensor* t) { return t->defined() && !t->is_contiguous(); };
  return std::any_of(call.inputs.begin(), call.inputs.end(), strided) ||
         std::any_of(call.outputs.begin(), call.outputs.end(), strided);
}

// A failing kernel can be replaced only when its inputs are still there.
bool writes_over_inputs(const KernelCall& call) {
  for (const Tensor* out : call.outputs) {
    for (const Tensor* in : call.inputs) {
      if (in->defined() && out->defined() && in->storage() == out->storage()) return true;
    }
  }
  return false;
}

}  // namespace

void raise_launch(Device device, const char* name, Status status, const std::string& error, const std::string& inputs) {
  DeviceBackend& backend = backend_for(device, name);
  if (error.empty() || status == Status::lost) backend.raise(static_cast<halfstep_status>(status), name, device.index);
  if (status == Status::out_of_memory) {
    fail<OutOfMemoryError>("{}: {}, on {}, got ({})", name, error, device.str(), inputs);
  }
  fail<DeviceError>("{}: {}, on {}, got ({})", name, error, device.str(), inputs);
}

ExecutionPath run_on_device(const KernelCall& call, std::uint64_t& number) {
  DeviceBackend& backend = backend_for(call.device, call.name);
  const int index = call.device.index;
  backend.check_alive(call.name, index);
  // What comes back from the CPU is copied on this queue too.
  void* const queue = current_native_queue(call.device);
  for (const auto list : {call.inputs, call.outputs}) {
    for (const Tensor* t : list) {
      if (const TensorImpl* p = t->impl()) p->storage->use_on(queue);
    }
  }
  const KernelFn kernel = backend.kernel(call.table, call.dtype);
  if (!kernel) {
    run_fallback(call, refusal(call), false);
    return ExecutionPath::fallback;
  }
  const FallbackOptions options = fallback_options();
  const bool waits = options.failing || synchronous();
  if (CaptureSink* sink = capture_sink(); sink && waits) [[unlikely]]
    sink->refuse("every op waits until it is done");
  const bool contiguous =
      !call.table.strided[call.device.type][static_cast<std::size_t>(call.dtype)].load(std::memory_order_relaxed) &&
      needs_contiguous(call);
  // The conversion that would make them contiguous is this very op.
  if (contiguous && std::string_view(call.table.name) == "to") {
    run_fallback(call, fmt::format("a kernel for {} that takes contiguous tensors only", name(call.dtype)), false);
    return ExecutionPath::fallback;
  }
  CallContext context(call);
  context.queue = queue;
  context.state =
      call.table.states[call.device.type][static_cast<std::size_t>(call.dtype)].load(std::memory_order_relaxed);
  // With failures caught, what was enqueued before must not be taken for this kernel's failure.
  if (options.failing) synchronize(call.device);
  context.call = number = backend.begin_call(call.name, index);
  Status status;
  if (contiguous) {
    status = run_contiguous(call, kernel, context);
  } else {
    Views views(call.inputs, call.outputs);
    status = kernel(&context, views.in(), static_cast<int>(call.inputs.size()), views.out(),
                    static_cast<int>(call.outputs.size()), call.attributes);
    if (status == Status::ok) note(call, kernel, context);
  }
  if (status == Status::unsupported) {
    run_fallback(call, "no kernel for these inputs" + (context.error.empty() ? "" : ": " + context.error), false);
    return ExecutionPath::fallback;
  }
  const bool started = status == Status::ok;
  try {
    if (status != Status::ok) raise_launch(call.device, call.name, status, context.error, describe(call.inputs));
    if (waits) {
      const DeviceWait waiting;
      backend.check(backend.table.synchronize(index), call.name, index);
      backend.passed(index);
    }
  } catch (const DeviceLostError&) {
    throw;
  } catch (const DeviceError& e) {
    if (!options.failing) throw;
    if (started && writes_over_inputs(call)) {
      fail<DeviceError>("{}; it worked in place, so that it can't be done again on the CPU", e.what());
    }
    run_fallback(call, e.what(), true);
    return ExecutionPath::fallback;
  }
  return contiguous ? ExecutionPath::contiguous : ExecutionPath::native;
}

}  // namespace halfstep::detail
