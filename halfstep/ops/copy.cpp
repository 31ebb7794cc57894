// SPDX-License-Identifier: Apache-2.0
// Conversion, cloning and copying.
#include "halfstep/ops/copy.h"

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/observer.h"
#include "halfstep/ops/recorder.h"
#include "halfstep/runtime/device_backend.h"
#include "halfstep/runtime/plugin_loader.h"
#include "halfstep/runtime/queue.h"
#include "halfstep/runtime/transfer.h"

namespace halfstep {
namespace {

const Op& to_op = define_op({
    .name = "to",
    .signature = "to(input, dtype)",
    .infer =
        [](InferContext& ctx) {
          check_defined(ctx.input(0), ctx.name(), "a tensor");
          const Tensor& x = ctx.input(0);
          ctx.output(x.sizes(), strides_like(x.sizes(), x.strides()),
                     static_cast<DType>(ctx.attributes<CastAttributes>().dtype));
        },
    .grad = [](GradContext& c) { c.set(0, cast(c.grad(), c.grad_dtype(0))); },
    .attributes = &attribute_struct<CastAttributes>(),
});

const Op& clone_op = define_op({
    .name = "clone",
    .signature = "clone(input)",
    .infer =
        [](InferContext& ctx) {
          check_defined(ctx.input(0), ctx.name(), "a tensor");
          const Tensor& x = ctx.input(0);
          const auto format = static_cast<MemoryFormat>(ctx.attributes<ViewAttributes>().dim);
          const Shape strides = format == MemoryFormat::contiguous      ? contiguous_strides(x.sizes())
                                : format == MemoryFormat::channels_last ? channels_last_strides(x.sizes())
                                                                        : strides_like(x.sizes(), x.strides());
          ctx.output(x.sizes(), strides, x.dtype());
        },
    .grad = [](GradContext& c) { c.set(0, c.grad()); },
    .attributes = &attribute_struct<ViewAttributes>(),
});

// copy_: input 0 is the destination (its old values don't matter), input 1 the source.
const Op& copy_op = define_op({
    .name = "copy",
    .signature = "copy_(input, source)",
    .infer =
        [](InferContext& ctx) {
          check_defined(ctx.input(1), ctx.name(), "a source");
          const Tensor& to = ctx.input(0);
          const Shape shape = broadcast_shapes(to.sizes(), ctx.input(1).sizes(), ctx.name());
          if (shape != to.sizes()) {
            fail<ShapeError>("copy_: expected a source that broadcasts to {}, got {}", to.sizes().str(),
                             ctx.input(1).sizes().str());
          }
          ctx.output(to.sizes(), to.strides(), to.dtype());
        },
    .grad =
        [](GradContext& c) {
          if (c.needs(0)) c.set(0, zeros(c.input_sizes(0), {.dtype = c.input_dtype(0), .device = c.device(0)}));
          c.set(1, c.grad());
        },
});

const Op& to_device_op() {
  static const Op& op = define_op({
      .name = "to_device",
      .signature = "to(input, device)",
      .infer = [](InferContext& ctx) { ctx.output(ctx.input(0).sizes(), ctx.input(0).dtype()); },
      .grad = [](GradContext& c) { c.set(0, c.grad().to(c.device(0))); },
  });
  return op;
}
[[maybe_unused]] const Op& to_device_defined = to_device_op();

void check_readable(const Tensor& source, const char* what, Device device) {
  if (source.device().is_meta() && device != source.device()) {
    fail<DeviceError>("{}: expected values to copy to {}, got {} {} of the device meta, where tensors have none", what,
                      device.str(), name(source.dtype()), source.sizes().str());
  }
}

// The tensor on the CPU, where the result of an op that ran there has stayed; else undefined.
Tensor still_on_host(const Tensor& t) {
  if (t.device().is_cpu()) return {};
  Ref<Storage> host = t.storage()->host_copy();
  KernelRecorder* const recorder = kernel_recorder();
  if (!host || (recorder && !recorder->owns(*t.storage()))) return {};
  backend_for(t.device(), "copy to host").check_alive("copy to host", t.device().index);
  const TensorImpl& p = *t.impl();
  return Tensor(TensorImpl::make(std::move(host), p.offset, p.sizes, p.strides, p.dtype));
}

// Tells a recorder that all elements of a dense tensor were copied between the CPU and a device.
void note_copy(KernelRecorder& recorder, const Tensor& to, const Tensor& from, bool non_blocking) {
  const auto item = static_cast<std::int64_t>(from.item_size());
  recorder.uses(from);
  recorder.uses(to);
  recorder.copy({to.storage(), to.storage_offset() * item}, {from.storage(), from.storage_offset() * item},
                static_cast<std::size_t>(from.numel() * item), non_blocking);
}

// The same elements on another device, in the layout that they have (row-major when they have gaps).
Tensor transferred(const Tensor& source, Device device, bool non_blocking) {
  check_readable(source, "to", device);
  if (device.is_meta()) {
    return empty_strided(source.sizes(), strides_like(source.sizes(), source.strides()),
                         {.dtype = source.dtype(), .device = device});
  }
  if (const Tensor here = device.is_cpu() ? still_on_host(source) : Tensor(); here.defined()) {
    Tensor result = empty_strided(here.sizes(), strides_like(here.sizes(), here.strides()),
                                  {.dtype = here.dtype(), .device = Device{}});
    copy_unrecorded(result, here);
    return result;
  }
  const Tensor dense = source.is_contiguous(MemoryFormat::preserve) ? source : [&] {
    Tensor copy = empty_strided(source.sizes(), contiguous_strides(source.sizes()),
                                {.dtype = source.dtype(), .device = source.device()});
    copy_unrecorded(copy, source);
    return copy;
  }();
  KernelRecorder* const recorder = kernel_recorder();
  if (recorder && !device.is_cpu() && !dense.device().is_cpu()) [[unlikely]]
    recorder->refuse("it copies from device to device");
  Tensor result = [&] {
    const OwnMemory own;  // a replay copies there before its kernels are enqueued
    return empty_strided(dense.sizes(), dense.strides(), {.dtype = dense.dtype(), .device = device});
  }();
  if (!dense.device().is_cpu()) dense.storage()->use_on(current_native_queue(dense.device()));
  if (non_blocking && device.is_cpu() && !recorder) {
    // Into memory that the device writes by itself; ordinary memory would have to be waited for.
    const auto bytes = static_cast<std::size_t>(dense.numel()) * dense.item_size();
    void* pinned = allocate_pinned(dense.device(), bytes);
    result = from_blob(pinned, dense.sizes(), dense.strides(), dense.dtype(), [pinned] { free_pinned(pinned); });
  }
  copy_memory(result.impl()->data(), device, dense.impl()->data(), dense.device(),
              static_cast<std::size_t>(dense.numel()) * dense.item_size(), non_blocking);
  if (recorder) [[unlikely]]
    note_copy(*recorder, result, dense, non_blocking);
  return result;
}

Tensor to_device(const Tensor& source, Device device, bool non_blocking) {
  check_defined(source, "to", "a tensor");
  if (source.device() == device) return source;
  const Op& op = to_device_op();
  Tensor result;
  const Tensor* in = &source;
  const Tensor* out = &result;
  if (observed()) [[unlikely]] {
    detail::Observation observation({.name = op.name,
                                     .op = &op,
                                     .inputs = {&in, 1},
                                     .outputs = {&out, 1},
                                     .attributes = nullptr,
                                     .device = device,
                                     .dtype = source.dtype()});
    // Observers read what has come to the CPU.
    result = transferred(source, device, non_blocking && !device.is_cpu());
    observation.done(ExecutionPath::transfer);
  } else {
    result = transferred(source, device, non_blocking);
  }
  if (thread_state().grad_enabled && source.requires_grad())
    op_hooks().record(op, {&in, 1}, nullptr, {&result, 1}, false);
  return result;
}

}  // namespace

const Op& cast_op() { return to_op; }

Tensor cast(const Tensor& source, DType dtype) {
  check_defined(source, "to", "a tensor");
  if (source.dtype() == dtype) return source;
  return call(to_op, {&source}, cast_attributes(dtype));
}

Tensor cast_unrecorded(const Tensor& source, DType dtype) {
  Tensor result = empty_like(source, dtype);
  copy_unrecorded(result, source);
  return result;
}

void copy_unrecorded(Tensor& destination, const Tensor& source) {
  if (destination.device() != source.device()) {
    check_readable(source, "copy", destination.device());
    if (destination.device().is_meta()) return;
    if (const Tensor here = destination.device().is_cpu() ? still_on_host(source) : Tensor(); here.defined()) {
      return copy_unrecorded(destination, here);
    }
    if (destination.dtype() == source.dtype() && destination.sizes() == source.sizes() &&
        destination.strides() == source.strides() && source.is_contiguous(MemoryFormat::preserve)) {
      for (const Tensor* t : {&source, static_cast<const Tensor*>(&destination)}) {
        if (!t->device().is_cpu()) t->storage()->use_on(current_native_queue(t->device()));
      }
      copy_memory(destination.impl()->data(), destination.device(), source.impl()->data(), source.device(),
                  static_cast<std::size_t>(source.numel()) * source.item_size());
      if (KernelRecorder* recorder = kernel_recorder()) [[unlikely]]
        note_copy(*recorder, destination, source, false);
      destination.storage()->forget_magnitude_bound();
      destination.storage()->forget_derived();
      return;
    }
    // The narrower dtype travels.
    if (item_size(destination.dtype()) < item_size(source.dtype()) && source.numel() == destination.numel()) {
      copy_unrecorded(destination,
                      transferred(cast_unrecorded(source, destination.dtype()), destination.device(), false));
    } else {
      copy_unrecorded(destination, transferred(source, destination.device(), false));
    }
    return;
  }
  const Tensor* from = &source;
  const Tensor* to = &destination;
  run_kernel(*to_op.table, "copy", destination.device(), source.dtype(), {&from, 1}, {&to, 1});
}

Tensor Tensor::to(DType dtype, const ToOptions& options) const {
  check_defined(*this, "to", "a tensor");
  if (this->dtype() == dtype &&
      (options.memory_format == MemoryFormat::preserve || is_contiguous(options.memory_format))) {
    return options.copy ? clone() : *this;
  }
  const Tensor converted = cast(*this, dtype);
  return options.memory_format == MemoryFormat::preserve ? converted : converted.contiguous(options.memory_format);
}

Tensor Tensor::to(Device device, const ToOptions& options) const { return to(device, dtype(), options); }

Tensor Tensor::to(Device device, DType dtype, const ToOptions& options) const {
  check_defined(*this, "to", "a tensor");
  if (device == this->device()) return to(dtype, options);
  // The narrower dtype travels.
  const bool before = halfstep::item_size(dtype) < item_size();
  const Tensor here = before ? to(dtype) : *this;
  // The CPU converts at once what has come: it must have come.
  const bool converts = here.dtype() != dtype || options.memory_format != MemoryFormat::preserve;
  const Tensor there = to_device(here, device, options.non_blocking && !(device.is_cpu() && converts));
  return there.to(dtype, {.memory_format = options.memory_format});
}

Tensor Tensor::pin_memory(std::optional<Device> device) const {
  check_defined(*this, "pin_memory", "a tensor");
  if (!this->device().is_cpu()) {
    fail<DeviceError>("pin_memory: expected a tensor of the CPU, got one of {}", this->device().str());
  }
  if (is_pinned()) return *this;
  if (CaptureSink* sink = capture_sink()) [[unlikely]]
    sink->refuse("it pins memory");
  if (!device) {
    load_plugins();
    for (DeviceBackend* b : backends()) {
      if (b->count > 0 && b->has_pinned()) {
        device = b->device(0);
        break;
      }
    }
  }
  const Tensor dense = is_contiguous(MemoryFormat::preserve) ? *this : contiguous();
  const auto bytes = static_cast<std::size_t>(dense.numel()) * dense.item_size();
  void* memory = allocate_pinned(device.value_or(Device{}), bytes);
  Tensor result = from_blob(memory, dense.sizes(), dense.strides(), dense.dtype(), [memory] { free_pinned(memory); });
  copy_memory(memory, Device{}, dense.impl()->data(), Device{}, bytes);
  return result;
}

bool Tensor::is_pinned() const {
  return defined() && device().is_cpu() && numel() != 0 && is_pinned_memory(impl()->data());
}

Tensor Tensor::clone(MemoryFormat format) const {
  return call(clone_op, {this}, ViewAttributes{.dim = static_cast<std::int64_t>(format)});
}

Tensor Tensor::contiguous(MemoryFormat format) const { return is_contiguous(format) ? *this : clone(format); }

Tensor& Tensor::copy_(const Tensor& source) {
  check_defined(*this, "copy_", "a destination");
  if (source.defined() && source.device() != device()) {
    const Tensor moved = source.to(device());
    return call_in_place(copy_op, *this, {&moved});
  }
  return call_in_place(copy_op, *this, {&source});
}

Scalar Tensor::item_scalar() const {
  check_defined(*this, "item", "a tensor");
  if (CaptureSink* sink = capture_sink()) [[unlikely]]
    sink->refuse("it reads a value with item()");
  if (numel() != 1) fail<ShapeError>("item: expected a tensor of one element, got {}", sizes().str());
  check_readable(*this, "item", Device{});
  const Tensor here = still_on_host(*this);
  const Tensor& from = here.defined() ? here : *this;
  return visit_all(dtype(), [&](auto tag) -> Scalar {
    using T = typename decltype(tag)::type;
    T value;
    read_memory(&value, from.impl()->data(), from.device(), sizeof(T));
    if constexpr (std::is_same_v<T, bool>) {
      return Scalar(value);
    } else if constexpr (std::is_integral_v<T>) {
      return Scalar(static_cast<std::int64_t>(value));
    } else {
      return Scalar(static_cast<double>(value));
    }
  });
}

template <class T>
std::vector<T> Tensor::to_vector() const {
  check_defined(*this, "to_vector", "a tensor");
  std::vector<T> values(static_cast<std::size_t>(numel()));
  if (CaptureSink* sink = capture_sink()) [[unlikely]]
    sink->refuse("it reads values with to_vector()");
  if (values.empty()) return values;
  check_readable(*this, "to_vector", Device{});
  Tensor target = from_blob(values.data(), sizes(), dtype_of<T>);
  copy_unrecorded(target, *this);
  return values;
}
template std::vector<float> Tensor::to_vector<float>() const;
template std::vector<double> Tensor::to_vector<double>() const;
template std::vector<std::int64_t> Tensor::to_vector<std::int64_t>() const;

}  // namespace halfstep
