// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/op.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/copy.h"

namespace halfstep {
namespace {

struct OpTable {
  std::shared_mutex mutex;
  std::map<std::string, std::unique_ptr<Op>, std::less<>> ops;
};
OpTable& op_table() {
  static OpTable& table = *new OpTable;
  return table;
}

struct Observers {
  std::atomic<int> count{0};
  std::shared_mutex mutex;
  std::vector<OpObserver*> list;
};
Observers& observers() {
  static Observers& instance = *new Observers;
  return instance;
}

TensorView view_of(const Tensor& t) {
  const TensorImpl* p = t.impl();
  if (!p) return {nullptr, nullptr, nullptr, 0, 0, DType::f32, false, false};
  return {p->data(), p->sizes.data(), p->strides.data(), p->numel, p->sizes.size(), p->dtype, true, p->contiguous};
}

std::atomic<int> bounds_wanted{0};

// Scratch of one kernel call: freed when the call is over.
struct CallContext : KernelContext {
  struct Block {
    void* data;
    std::size_t bytes;
  };
  std::vector<Block> blocks;
  std::string error;
  const Tensor* first_output = nullptr;

  explicit CallContext(Device where, std::span<const Tensor* const> outputs) {
    set_magnitude_bound = nullptr;
    // Only for memory that the call made: nobody else can write there.
    if (bounds_wanted.load(std::memory_order_relaxed) > 0 && !outputs.empty() && outputs[0]->defined() &&
        outputs[0]->storage()->use_count() == 1) {
      first_output = outputs[0];
      set_magnitude_bound = [](KernelContext* context, float bound) {
        static_cast<CallContext*>(context->owner)->first_output->storage()->set_magnitude_bound(bound);
      };
    }
    device = where;
    queue = nullptr;
    owner = this;
    workspace = [](KernelContext* context, std::size_t bytes) -> void* {
      auto* self = static_cast<CallContext*>(context->owner);
      try {
        self->blocks.reserve(self->blocks.size() + 1);
        void* data = allocator_for(context->device).allocate(std::max<std::size_t>(bytes, 1));
        self->blocks.push_back({data, std::max<std::size_t>(bytes, 1)});
        return data;
      } catch (const std::exception& e) {
        self->error = e.what();
        return nullptr;
      }
    };
    set_error = [](KernelContext* context, const char* text) {
      static_cast<CallContext*>(context->owner)->error = text;
    };
  }
  ~CallContext() {
    for (const Block& b : blocks) allocator_for(device).deallocate(b.data, b.bytes);
  }
};

std::string describe(std::span<const Tensor* const> inputs) {
  std::string text;
  for (const Tensor* t : inputs) {
    if (!text.empty()) text += ", ";
    text += t->defined() ? fmt::format("{} {}", name(t->dtype()), t->sizes().str()) : std::string("none");
  }
  return text;
}

void run(const KernelTable& table, const char* name, Device device, DType dtype, std::span<const Tensor* const> inputs,
         std::span<const Tensor* const> outputs, const void* attributes) {
  const KernelFn kernel = table.find(device, dtype);
  if (!kernel) [[unlikely]] {
    bool known = false;
    for (KernelFn k : table.kernels[device.type]) known |= k != nullptr;
    if (!known) fail<DeviceError>("{}: device {} has no kernel for it", name, device.str());
    fail<DTypeError>("{}: {} is not supported here, got ({}); convert with .to(f32)?", name, halfstep::name(dtype),
                     describe(inputs));
  }
  constexpr std::size_t kInline = 12;
  TensorView fixed[kInline + kMaxOutputs];
  std::vector<TensorView> many;
  TensorView* views = fixed;
  if (inputs.size() + outputs.size() > std::size(fixed)) {
    many.resize(inputs.size() + outputs.size());
    views = many.data();
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) views[i] = view_of(*inputs[i]);
  for (std::size_t i = 0; i < outputs.size(); ++i) views[inputs.size() + i] = view_of(*outputs[i]);
  CallContext context(device, outputs);
  const Status status = kernel(&context, views, static_cast<int>(inputs.size()), views + inputs.size(),
                               static_cast<int>(outputs.size()), attributes);
  if (status != Status::ok) [[unlikely]] {
    const std::string why = context.error.empty() ? "its kernel refused these inputs" : context.error;
    fail<Error>("{}: {}, got ({})", name, why, describe(inputs));
  }
}

// All tensors of a call are on one device; 0-d tensors of the CPU may join any.
Device common_device(const Op& op, std::span<const Tensor* const> inputs) {
  const TensorImpl* first = nullptr;
  for (const Tensor* t : inputs) {
    const TensorImpl* p = t->impl();
    if (!p) continue;
    if (!first) {
      first = p;
    } else if (p->storage->device() != first->storage->device()) [[unlikely]] {
      fail<DeviceError>("{}: expected all tensors on one device, got {} and {}", op.name,
                        first->storage->device().str(), p->storage->device().str());
    }
  }
  return first ? first->storage->device() : Device{};
}

void notify(const Op& op, std::span<const Tensor* const> inputs, const void* attributes,
            std::span<const Tensor> outputs) {
  Observers& all = observers();
  std::shared_lock lock(all.mutex);
  for (OpObserver* o : all.list) o->on_call(op, inputs, attributes, outputs);
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
std::span<const Tensor* const> converted(const InferContext& ctx, std::span<const Tensor* const> inputs, Inputs& held) {
  if (ctx.cast_mask == 0) return inputs;
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
  if (observers().count.load(std::memory_order_relaxed) != 0) [[unlikely]]
    notify(op, inputs, attributes, outputs);
}

DType key_dtype(const Op& op, std::span<const Tensor* const> inputs, const Tensor& output) {
  if (op.key >= 0 && static_cast<std::size_t>(op.key) < inputs.size()) {
    const TensorImpl* p = inputs[static_cast<std::size_t>(op.key)]->impl();
    if (p) return p->dtype;
  }
  return output.impl()->dtype;
}

}  // namespace

const Op& define_op(const Op& declaration) {
  if (declaration.attributes_size > kMaxAttributes) {
    fail<InternalError>("define_op: attributes of {} take {} bytes, at most {} are allowed", declaration.name,
                        declaration.attributes_size, kMaxAttributes);
  }
  OpTable& table = op_table();
  std::lock_guard lock(table.mutex);
  if (table.ops.contains(declaration.name))
    fail<Error>("define_op: there is already an op called {}", declaration.name);
  auto op = std::make_unique<Op>(declaration);
  op->table = &kernel_table(declaration.name);
  op->id = static_cast<int>(table.ops.size());
  const Op& result = *op;
  table.ops.emplace(declaration.name, std::move(op));
  return result;
}

const Op* find_op(std::string_view name) {
  OpTable& table = op_table();
  std::shared_lock lock(table.mutex);
  auto it = table.ops.find(name);
  return it == table.ops.end() ? nullptr : it->second.get();
}

std::vector<const Op*> all_ops() {
  OpTable& table = op_table();
  std::shared_lock lock(table.mutex);
  std::vector<const Op*> result;
  for (const auto& [name, op] : table.ops) result.push_back(op.get());
  return result;
}

void InferContext::output(const Shape& sizes, DType dtype) { output(sizes, contiguous_strides(sizes), dtype); }
void InferContext::output(const Shape& sizes, const Shape& strides, DType dtype) {
  if (num_outputs == kMaxOutputs) fail<InternalError>("{}: more than {} outputs", op_.name, kMaxOutputs);
  outputs[static_cast<std::size_t>(num_outputs++)] = {sizes, strides, dtype};
}
void InferContext::view(const Shape& sizes, const Shape& strides, std::int64_t offset) {
  output(sizes, strides, input(0).dtype());
  view_offset = offset;
}

void call_op(const Op& op, std::span<const Tensor* const> raw_inputs, const void* raw_attributes,
             std::span<Tensor> outputs) {
  Prepared call(op, raw_inputs, raw_attributes);
  const std::span<const Tensor* const> inputs = call.inputs.span;
  const Device device = common_device(op, inputs);
  InferContext ctx(op, inputs, call.attributes);
  op.infer(ctx);
  if (op.view) {
    call_view(op, ctx, inputs, call.attributes, outputs);
    return;
  }
  if (static_cast<std::size_t>(ctx.num_outputs) != outputs.size()) {
    fail<InternalError>("{}: its rule gives {} outputs, {} were asked for", op.name, ctx.num_outputs, outputs.size());
  }
  std::array<const Tensor*, kMaxOutputs> output_pointers;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto& o = ctx.outputs[i];
    // The rule's strides are dense, so the number of elements is the number of places.
    const auto bytes = static_cast<std::size_t>(o.sizes.numel()) * item_size(o.dtype);
    outputs[i] = Tensor(TensorImpl::make(Storage::allocate(bytes, device), 0, o.sizes, o.strides, o.dtype));
    output_pointers[i] = &outputs[i];
  }
  {
    Inputs held(inputs);
    const auto kernel_inputs = converted(ctx, inputs, held);
    run(*op.table, op.name, device, key_dtype(op, kernel_inputs, outputs[0]), kernel_inputs,
        {output_pointers.data(), outputs.size()}, call.attributes);
  }
  if (op.grad && thread_state().grad_enabled && any_requires_grad(inputs)) {
    op_hooks().record(op, inputs, call.attributes, outputs, false);
  }
  if (observers().count.load(std::memory_order_relaxed) != 0) [[unlikely]] {
    notify(op, inputs, call.attributes, outputs);
  }
}

void call_op_into(const Op& op, std::span<const Tensor* const> raw_inputs, const void* raw_attributes,
                  Tensor& destination, bool in_place) {
  check_defined(destination, op.name, "a destination");
  const Tensor* destination_pointer = &destination;
  const bool recording =
      thread_state().grad_enabled && (any_requires_grad(raw_inputs) || any_requires_grad({&destination_pointer, 1}));
  if (recording && !in_place) {
    fail<AutogradError>(
        "{}: the out form is not recorded, but a tensor of it requires grad; use the plain form, or NoGrad", op.name);
  }
  if (recording && op_hooks().check_in_place) op_hooks().check_in_place(op, destination);
  Prepared call(op, raw_inputs, raw_attributes);
  const std::span<const Tensor* const> inputs = call.inputs.span;
  const Device device = common_device(op, inputs);
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
    const auto kernel_inputs = converted(ctx, inputs, held);
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
      run(*op.table, op.name, device, key_dtype(op, kernel_inputs, destination), kernel_inputs, {&output, 1},
          call.attributes);
    } else {
      Tensor result(
          TensorImpl::make(Storage::allocate(static_cast<std::size_t>(o.sizes.numel()) * item_size(o.dtype), device), 0,
                           o.sizes, o.strides, o.dtype));
      const Tensor* output = &result;
      run(*op.table, op.name, device, key_dtype(op, kernel_inputs, result), kernel_inputs, {&output, 1},
          call.attributes);
      copy_unrecorded(destination, result);
    }
  }
  dest.storage->bump_version();
  if (recording) op_hooks().record(op, inputs, call.attributes, {&destination, 1}, true);
  if (observers().count.load(std::memory_order_relaxed) != 0) [[unlikely]] {
    notify(op, inputs, call.attributes, {&destination, 1});
  }
}

void run_kernel(const KernelTable& table, const char* name, Device device, DType dtype,
                std::span<const Tensor* const> inputs, std::span<const Tensor* const> outputs, const void* attributes) {
  run(table, name, device, dtype, inputs, outputs, attributes);
}

void detail::check_attributes(const Op& op, std::size_t size) {
  fail<InternalError>("{}: called with attributes of {} bytes, declared with {}", op.name, size, op.attributes_size);
}

ThreadState& thread_state() {
  thread_local ThreadState state;
  return state;
}

OpHooks& op_hooks() {
  static OpHooks hooks;
  return hooks;
}

void want_magnitude_bounds(bool wanted) { bounds_wanted.fetch_add(wanted ? 1 : -1, std::memory_order_relaxed); }

void add_observer(OpObserver* observer) {
  Observers& all = observers();
  std::lock_guard lock(all.mutex);
  all.list.push_back(observer);
  all.count.fetch_add(1);
}

void remove_observer(OpObserver* observer) {
  Observers& all = observers();
  std::lock_guard lock(all.mutex);
  if (std::erase(all.list, observer)) all.count.fetch_sub(1);
}

void infer_elementwise(InferContext& ctx, DType dtype) {
  const Tensor& first = ctx.input(0);
  const TensorImpl* a = first.impl();
  check_defined(first, ctx.name(), "input 0");
  // Most calls: one input, or two of the same shape and layout.
  bool same = a->contiguous;
  for (int i = 1; same && i < ctx.size(); ++i) {
    const TensorImpl* b = ctx.input(i).impl();
    same = b && b->contiguous && b->sizes == a->sizes;
  }
  if (same) {
    ctx.output(a->sizes, a->strides, dtype);
    return;
  }
  Shape sizes = a->sizes;
  for (int i = 1; i < ctx.size(); ++i) {
    check_defined(ctx.input(i), ctx.name(), "an input");
    sizes = broadcast_shapes(sizes, ctx.input(i).sizes(), ctx.name());
  }
  for (int i = 0; i < ctx.size(); ++i) {
    const Tensor& t = ctx.input(i);
    if (t.sizes() == sizes && sizes.size() > 1 && !t.is_contiguous() && is_dense(sizes, t.strides())) {
      ctx.output(sizes, strides_like(sizes, t.strides()), dtype);
      return;
    }
    if (t.sizes() == sizes && t.is_contiguous()) break;
  }
  ctx.output(sizes, dtype);
}

DType result_type(std::span<const Tensor* const> inputs, const char* op) {
  // PyTorch's three ranks: tensors with dimensions, then 0-d tensors (numbers have a function of their own); a lower
  // rank counts only when its kind (bool, integer, floating) is higher than all of the ranks above.
  const auto kind = [](DType d) { return d == DType::boolean ? 0 : is_integral(d) ? 1 : 2; };
  std::optional<DType> ranks[2];
  for (const Tensor* t : inputs) {
    if (!t->defined()) continue;
    std::optional<DType>& rank = ranks[t->dim() == 0 ? 1 : 0];
    if (!rank) {
      rank = t->dtype();
    } else {
      const auto both = promote_types(*rank, t->dtype());
      if (!both) {
        fail<DTypeError>("{}: {} and {} have no common dtype; convert one with .to()", op, name(*rank),
                         name(t->dtype()));
      }
      rank = both;
    }
  }
  if (!ranks[0]) return ranks[1].value_or(DType::f32);
  if (ranks[1] && kind(*ranks[1]) > kind(*ranks[0])) {
    const auto both = promote_types(*ranks[0], *ranks[1]);
    if (!both) fail<DTypeError>("{}: {} and {} have no common dtype", op, name(*ranks[0]), name(*ranks[1]));
    return *both;
  }
  return *ranks[0];
}

DType result_type(const Tensor& input, const Scalar& number) {
  const DType dtype = input.dtype();
  if (number.is_floating() && !is_floating(dtype)) return DType::f32;
  if (number.kind() == Scalar::Kind::integer && dtype == DType::boolean) return DType::i64;
  return dtype;
}

void check_floating(const Tensor& input, const char* op) {
  const DType d = input.dtype();
  if (d != DType::f32 && d != DType::f64 && d != DType::f16 && d != DType::bf16) {
    fail<DTypeError>("{}: expected f32, f64, f16 or bf16, got {} {}", op, name(d), input.sizes().str());
  }
}

void check_defined(const Tensor& input, const char* op, const char* what) {
  if (!input.defined()) [[unlikely]]
    fail<Error>("{}: expected {}, got an undefined tensor", op, what);
}

}  // namespace halfstep
