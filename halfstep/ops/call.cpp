// SPDX-License-Identifier: Apache-2.0
// How a call runs: autocast, shape rule, kernel, record.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/call_internal.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/mixed_internal.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/recorder.h"
#include "halfstep/runtime/caching_allocator.h"

namespace halfstep {
namespace {

std::atomic<int> bounds_wanted{0};

// Of an output, whose strides are dense: the number of elements is the number of places.
std::size_t bytes_of(const Op& op, const Shape& sizes, DType dtype) {
  auto bytes = static_cast<std::int64_t>(item_size(dtype));
  bool fits = true;
  for (const std::int64_t n : sizes) {
    if (n == 0) return 0;
    fits = fits && !__builtin_mul_overflow(bytes, n, &bytes);
  }
  if (!fits) fail<ShapeError>("{}: a result {} has too many elements", op.name, sizes.str());
  return static_cast<std::size_t>(bytes);
}

Storage* storage_of(KernelContext* context, int index) {
  const Tensor& input = *static_cast<detail::CallContext*>(context->owner)->inputs[static_cast<std::size_t>(index)];
  return input.defined() ? input.storage().get() : nullptr;
}
constexpr CpuKernelState kCpuState = {.storage = storage_of};
constexpr CpuKernelState kDryState = {.storage = storage_of, .dry = true};

// On meta, in place of kernels that can't run dry.
Status no_work(KernelContext*, const TensorView*, int, TensorView*, int, const void*) { return Status::ok; }

}  // namespace

namespace detail {

MixedHook& mixed_hook() {
  static MixedHook hook = nullptr;
  return hook;
}

bool magnitude_bounds_wanted() { return bounds_wanted.load(std::memory_order_relaxed) > 0; }

CallContext::CallContext(const KernelCall& call) : inputs(call.inputs), where(call.device) {
  // Only for memory that the call made: nobody else can write there.
  if (magnitude_bounds_wanted() && !call.outputs.empty() && call.outputs[0]->defined() &&
      call.outputs[0]->storage()->use_count() == 1) {
    first_output = call.outputs[0];
    set_magnitude_bound = [](KernelContext* context, float bound) {
      static_cast<CallContext*>(context->owner)->first_output->storage()->set_magnitude_bound(bound);
    };
  }
  device = where.index;
  owner = this;
  workspace = [](KernelContext* context, std::uint64_t bytes) -> void* {
    auto* self = static_cast<CallContext*>(context->owner);
    try {
      self->blocks.reserve(self->blocks.size() + 1);
      void* data = allocator_for(self->where).allocate(std::max<std::size_t>(bytes, 1));
      self->blocks.push_back({data, std::max<std::size_t>(bytes, 1)});
      return data;
    } catch (const std::exception& e) {
      self->error = e.what();
      return nullptr;
    }
  };
  set_error = [](KernelContext* context, const char* text) { static_cast<CallContext*>(context->owner)->error = text; };
}

CallContext::~CallContext() {
  for (const Block& b : blocks) allocator_for(where).deallocate(b.data, b.bytes);
}

std::size_t CallContext::workspace_bytes() const {
  std::size_t sum = 0;
  for (const Block& b : blocks) sum += (b.bytes + kWorkAlignment - 1) / kWorkAlignment * kWorkAlignment;
  return sum;
}

std::string describe(std::span<const Tensor* const> inputs) {
  std::string text;
  for (const Tensor* t : inputs) {
    if (!text.empty()) text += ", ";
    text += t->defined() ? fmt::format("{} {}", name(t->dtype()), t->sizes().str()) : std::string("none");
  }
  return text;
}

std::string describe(std::span<const TensorView> inputs) {
  std::string text;
  for (const TensorView& t : inputs) {
    if (!text.empty()) text += ", ";
    const Shape sizes(std::span(t.sizes, static_cast<std::size_t>(t.ndim)));
    text += t.defined ? fmt::format("{} {}", name(t.dtype), sizes.str()) : std::string("none");
  }
  return text;
}

void run_on_host(const KernelCall& call) {
  KernelFn kernel = call.table.find(Device{}, call.dtype);
  if (!kernel) [[unlikely]] {
    bool known = false;
    for (const auto& k : call.table.kernels[0]) known |= k.load() != nullptr;
    if (!known) fail<DeviceError>("{}: device cpu has no kernel for it", call.name);
    fail<DTypeError>("{}: {} is not supported here, got ({}); convert with .to(f32)?", call.name, name(call.dtype),
                     describe(call.inputs));
  }
  Views views(call.inputs, call.outputs);
  CallContext context(call);
  const bool dry = call.device.is_meta();
  if (dry && !call.table.traits[static_cast<std::size_t>(call.dtype)].runs_dry) kernel = no_work;
  context.state = const_cast<CpuKernelState*>(dry ? &kDryState : &kCpuState);
  const Status status = kernel(&context, views.in(), static_cast<int>(call.inputs.size()), views.out(),
                               static_cast<int>(call.outputs.size()), call.attributes);
  if (status != Status::ok) [[unlikely]] {
    const std::string why = context.error.empty() ? "its kernel refused these inputs" : context.error;
    fail<Error>("{}: {}, got ({})", call.name, why, describe(call.inputs));
  }
  if (KernelRecorder* recorder = kernel_recorder()) [[unlikely]]
    recorder->kernel(
        call, {.function = kernel, .bounded = context.first_output != nullptr, .workspace = context.workspace_bytes()});
}

}  // namespace detail

namespace {

ExecutionPath run_unobserved(const detail::KernelCall& call, std::uint64_t& number) {
  if (!call.device.is_host()) [[unlikely]]
    return detail::run_on_device(call, number);
  detail::run_on_host(call);
  return ExecutionPath::native;
}

// `op` is null for a kernel that runs by itself.
void run(const detail::KernelCall& call, const Op* op, bool in_place) {
  std::uint64_t number = 0;
  if (observed()) [[unlikely]] {
    detail::Observation observation({.name = call.name,
                                     .op = op,
                                     .inputs = call.inputs,
                                     .outputs = call.outputs,
                                     .attributes = call.attributes,
                                     .attributes_bytes = call.attributes_bytes,
                                     .device = call.device,
                                     .in_place = in_place,
                                     .kernel = call.table.name.c_str(),
                                     .dtype = call.dtype});
    const ExecutionPath path = run_unobserved(call, number);
    observation.done(path, number);
    return;
  }
  run_unobserved(call, number);
}

// All tensors of a call are on one device. 0-d tensors of the CPU may join any other (they are copied there): `moved`
// takes their copies, and `inputs` are turned to them.
void move_numbers(const Op& op, Device device, std::span<const Tensor*> inputs, std::vector<Tensor>& moved) {
  for (const Tensor*& t : inputs) {
    const TensorImpl* p = t->impl();
    if (!p || p->storage->device() == device) continue;
    if (!p->storage->device().is_cpu() || p->sizes.size() != 0) {
      fail<DeviceError>("{}: expected all tensors on one device, got {} and {}; move one with .to()", op.name,
                        device.str(), p->storage->device().str());
    }
    moved.reserve(inputs.size());
    moved.push_back(t->to(device));
    t = &moved.back();
  }
}

Device common_device(const Op& op, std::span<const Tensor*> inputs, std::vector<Tensor>& moved) {
  const TensorImpl* first = nullptr;
  for (const Tensor* t : inputs) {
    const TensorImpl* p = t->impl();
    if (!p) continue;
    if (!first) {
      first = p;
    } else if (p->storage->device() != first->storage->device()) [[unlikely]] {
      // The device is that of the tensors that can't join another.
      Device device = first->storage->device();
      if (device.is_cpu() && first->sizes.size() == 0) device = p->storage->device();
      move_numbers(op, device, inputs, moved);
      return device;
    }
  }
  return first ? first->storage->device() : Device{};
}

// Inputs after autocast and the shape rule's casts, on the stack for all but long lists.
struct Inputs {
  static constexpr std::size_t kInline = 8;
  const Tensor* fixed[kInline];
  std::vector<const Tensor*> many;
  std::span<const Tensor*> span;
  std::vector<Tensor> storage;  // made only when something is cast
  explicit Inputs(std::span<const Tensor* const> from) {
    if (from.size() <= kInline) {
      std::copy(from.begin(), from.end(), fixed);
      span = {fixed, from.size()};
    } else {
      many.assign(from.begin(), from.end());
      span = many;
    }
  }
};

constexpr std::size_t kMaxAttributes = 512;

struct Prepared {
  Inputs inputs;
  alignas(16) unsigned char attributes_copy[kMaxAttributes];
  const void* attributes;
  std::vector<Tensor> autocast_storage;
  std::vector<Tensor> moved;  // copies of numbers on the device of the others

  Prepared(const Op& op, std::span<const Tensor* const> from, const void* attributes_in)
      : inputs(from), attributes(attributes_in) {
    if (thread_state().autocast.enabled && op_hooks().autocast) autocast(op);
  }
  void autocast(const Op& op) {
    autocast_storage.resize(inputs.span.size());
    if (attributes) {
      std::memcpy(attributes_copy, attributes, op.attributes_size);
      attributes = attributes_copy;
    }
    AutocastCall call{op, inputs.span, autocast_storage, attributes ? attributes_copy : nullptr};
    op_hooks().autocast(call);
  }
};

bool any_requires_grad(std::span<const Tensor* const> inputs) {
  for (const Tensor* t : inputs) {
    const TensorImpl* p = t->impl();
    // A view may have got a history through its base since it was made.
    if (p && (p->requires_grad || (p->base && p->base->requires_grad))) return true;
  }
  return false;
}

// The inputs as the kernel takes them: those that the shape rule wants converted are, without a record (the engine
// casts gradients back).
std::span<const Tensor* const> converted(const Op& op, const InferContext& ctx, std::span<const Tensor* const> inputs,
                                         Inputs& held) {
  if (ctx.cast_mask == 0) return inputs;
  if (const detail::MixedHook hook = detail::mixed_hook(); hook && !thread_state().autocast.enabled) {
    hook(op, inputs, ctx.cast_dtype);
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Tensor& t = *inputs[i];
    if (!t.defined() || !(ctx.cast_mask >> std::min<std::size_t>(i, 63) & 1) || t.dtype() == ctx.cast_dtype) continue;
    if (held.storage.empty()) held.storage.resize(inputs.size());
    held.storage[i] = cast_unrecorded(t, ctx.cast_dtype);
    held.span[i] = &held.storage[i];
  }
  return held.span;
}

void call_view(const Op& op, const InferContext& ctx, std::span<const Tensor* const> inputs, const void* attributes,
               std::span<Tensor> outputs) {
  TensorImpl* source = inputs[0]->impl();
  const auto& o = ctx.outputs[0];
  Ref<TensorImpl> impl = TensorImpl::make(source->storage, ctx.view_offset, o.sizes, o.strides, source->dtype);
  // An unrecorded view of a tensor that requires grad is a constant: it must not find the base's history later.
  if (thread_state().grad_enabled || !source->requires_grad) {
    impl->base = source->base ? source->base : inputs[0]->impl_ref();
  }
  outputs[0] = Tensor(std::move(impl));
  if (thread_state().grad_enabled && source->requires_grad) op_hooks().record(op, inputs, attributes, outputs, false);
  if (observed()) [[unlikely]] {
    const Tensor* output = &outputs[0];
    detail::Observation({.name = op.name,
                         .op = &op,
                         .inputs = inputs,
                         .outputs = {&output, 1},
                         .attributes = attributes,
                         .attributes_bytes = op.attributes_size,
                         .device = source->storage->device(),
                         .path = ExecutionPath::view,
                         .dtype = source->dtype})
        .done(ExecutionPath::view);
  }
}

// What is allocated on a device while the op runs is known by its name.
struct AllocationLabel {
  const bool set;
  const char* outer = nullptr;
  AllocationLabel(Device device, const char* name) : set(!device.is_cpu()) {
    if (set) [[unlikely]]
      outer = std::exchange(allocation_label(), name);
  }
  ~AllocationLabel() {
    if (set) [[unlikely]]
      allocation_label() = outer;
  }
};

DType key_dtype(const Op& op, std::span<const Tensor* const> inputs, const Tensor& output) {
  if (op.key >= 0 && static_cast<std::size_t>(op.key) < inputs.size()) {
    const TensorImpl* p = inputs[static_cast<std::size_t>(op.key)]->impl();
    if (p) return p->dtype;
  }
  return output.impl()->dtype;
}

// The thread's interceptor, which takes no call while this lives.
class Intercepted {
 public:
  Intercepted() : interceptor_(std::exchange(thread_state().interceptor, nullptr)) {}
  ~Intercepted() { thread_state().interceptor = interceptor_; }
  Intercepted(const Intercepted&) = delete;
  Intercepted& operator=(const Intercepted&) = delete;
  CallInterceptor* operator->() const { return interceptor_; }

 private:
  CallInterceptor* interceptor_;
};

}  // namespace

void call_op(const Op& op, std::span<const Tensor* const> raw_inputs, const void* raw_attributes,
             std::span<Tensor> outputs) {
  if (thread_state().interceptor) [[unlikely]] {
    Intercepted()->call(op, raw_inputs, raw_attributes, outputs);
    return;
  }
  Prepared call(op, raw_inputs, raw_attributes);
  const Device device = common_device(op, call.inputs.span, call.moved);
  const std::span<const Tensor* const> inputs = call.inputs.span;
  InferContext ctx(op, inputs, call.attributes);
  op.infer(ctx);
  if (op.view) {
    call_view(op, ctx, inputs, call.attributes, outputs);
    return;
  }
  if (static_cast<std::size_t>(ctx.num_outputs) != outputs.size()) {
    fail<InternalError>("{}: its rule gives {} outputs, {} were asked for", op.name, ctx.num_outputs, outputs.size());
  }
  const AllocationLabel label(device, op.name);
  std::array<const Tensor*, kMaxOutputs> output_pointers;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto& o = ctx.outputs[i];
    outputs[i] = Tensor(
        TensorImpl::make(Storage::allocate(bytes_of(op, o.sizes, o.dtype), device), 0, o.sizes, o.strides, o.dtype));
    output_pointers[i] = &outputs[i];
  }
  {
    Inputs held(inputs);
    const auto kernel_inputs = converted(op, ctx, inputs, held);
    run({.table = *op.table,
         .name = op.name,
         .device = device,
         .dtype = key_dtype(op, kernel_inputs, outputs[0]),
         .inputs = kernel_inputs,
         .outputs = {output_pointers.data(), outputs.size()},
         .attributes = call.attributes,
         .attributes_bytes = op.attributes_size,
         .fresh = true},
        &op, false);
  }
  if (op.grad && thread_state().grad_enabled && any_requires_grad(inputs)) {
    op_hooks().record(op, inputs, call.attributes, outputs, false);
  }
}

void call_op_into(const Op& op, std::span<const Tensor* const> raw_inputs, const void* raw_attributes,
                  Tensor& destination, bool in_place) {
  check_defined(destination, op.name, "a destination");
  if (thread_state().interceptor) [[unlikely]] {
    Intercepted()->call_into(op, raw_inputs, raw_attributes, destination, in_place);
    return;
  }
  const Tensor* destination_pointer = &destination;
  const bool recording =
      thread_state().grad_enabled && (any_requires_grad(raw_inputs) || any_requires_grad({&destination_pointer, 1}));
  if (recording && !in_place) {
    fail<AutogradError>(
        "{}: the out form is not recorded, but a tensor of it requires grad; use the plain form, or NoGrad", op.name);
  }
  if (recording && op_hooks().check_in_place) op_hooks().check_in_place(op, destination);
  Prepared call(op, raw_inputs, raw_attributes);
  const Device device = common_device(op, call.inputs.span, call.moved);
  if (destination.device() != device) {
    fail<DeviceError>("{}: expected a destination on {}, got one on {}", op.name, device.str(),
                      destination.device().str());
  }
  const std::span<const Tensor* const> inputs = call.inputs.span;
  InferContext ctx(op, inputs, call.attributes);
  op.infer(ctx);
  if (ctx.num_outputs != 1) fail<InternalError>("{}: only ops of one output have an in-place form", op.name);
  const auto& o = ctx.outputs[0];
  TensorImpl& dest = *destination.impl();
  if (o.sizes != dest.sizes) {
    fail<ShapeError>("{}: expected a result that fits the destination {}, got {}", op.name, dest.sizes.str(),
                     o.sizes.str());
  }
  if (is_floating(o.dtype) && !is_floating(dest.dtype)) {
    fail<DTypeError>("{}: a {} result can't be written to a {} destination; convert it first", op.name, name(o.dtype),
                     name(dest.dtype));
  }
  if (!dest.contiguous) {
    for (int d = 0; d < dest.sizes.size(); ++d) {
      if (dest.strides[d] == 0 && dest.sizes[d] > 1) {
        fail<Error>("{}: the destination {} is expanded: several elements are one place in memory; clone it before",
                    op.name, dest.sizes.str());
      }
    }
  }
  {
    Inputs held(inputs);
    const auto kernel_inputs = converted(op, ctx, inputs, held);
    // Straight into the destination where nothing has to be converted and no input but an exactly equal view lies under
    // it.
    bool direct = o.dtype == dest.dtype;
    for (const Tensor* t : kernel_inputs) {
      const TensorImpl* p = t->impl();
      if (!p || p->storage != dest.storage) continue;
      if (p->offset != dest.offset || p->strides != dest.strides || p->sizes != dest.sizes) direct = false;
    }
    if (direct) {
      const Tensor* output = &destination;
      run({.table = *op.table,
           .name = op.name,
           .device = device,
           .dtype = key_dtype(op, kernel_inputs, destination),
           .inputs = kernel_inputs,
           .outputs = {&output, 1},
           .attributes = call.attributes,
           .attributes_bytes = op.attributes_size},
          &op, in_place);
    } else {
      Tensor result(
          TensorImpl::make(Storage::allocate(bytes_of(op, o.sizes, o.dtype), device), 0, o.sizes, o.strides, o.dtype));
      const Tensor* output = &result;
      run({.table = *op.table,
           .name = op.name,
           .device = device,
           .dtype = key_dtype(op, kernel_inputs, result),
           .inputs = kernel_inputs,
           .outputs = {&output, 1},
           .attributes = call.attributes,
           .attributes_bytes = op.attributes_size,
           .fresh = true},
          &op, in_place);
      copy_unrecorded(destination, result);
    }
  }
  dest.storage->bump_version();
  if (recording) op_hooks().record(op, inputs, call.attributes, {&destination, 1}, true);
}

void run_kernel(const KernelTable& table, const char* name, Device device, DType dtype,
                std::span<const Tensor* const> inputs, std::span<const Tensor* const> outputs, const void* attributes,
                std::size_t attributes_bytes, bool live) {
  for (const auto list : {inputs, outputs}) {
    for (const Tensor* t : list) {
      if (t->defined() && t->device() != device) [[unlikely]] {
        fail<DeviceError>(
            "{}: expected all tensors on {}, got one on {}; was a module moved after its optimizer was made?", name,
            device.str(), t->device().str());
      }
    }
  }
  run({.table = table,
       .name = name,
       .device = device,
       .dtype = dtype,
       .inputs = inputs,
       .outputs = outputs,
       .attributes = attributes,
       .attributes_bytes = attributes_bytes,
       .live = live},
      nullptr, false);
  for (const Tensor* t : outputs) {
    if (t->defined()) t->storage()->forget_derived();
  }
}

void want_magnitude_bounds(bool wanted) { bounds_wanted.fetch_add(wanted ? 1 : -1, std::memory_order_relaxed); }

}  // namespace halfstep
