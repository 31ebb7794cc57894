// SPDX-License-Identifier: Apache-2.0
// Ops: their declaration, how a call runs, and the hooks that autograd and autocast fill.
//
// The path of a call: autocast hook (casts inputs according to the policy), shape rule, kernel for the device and dtype
// (else the CPU's, with copies to it and back), autograd record. Observers (ops/observer.h) are notified along the way.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <type_traits>

#include "halfstep/core/tensor.h"
#include "halfstep/ops/observer.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep {

struct AttributeStruct;
struct Op;
class InferContext;
class GradContext;

/// Shape and dtype rule: checks the inputs and declares the outputs. Throws user-facing errors.
using InferFn = void (*)(InferContext&);
/// Gradient rule, written with recorded ops, so that it is itself differentiable.
using GradFn = void (*)(GradContext&);

/// The part of a tensor that slice(dim, start, end, step) reads; `selected`: without `dim`, as select() does.
struct GradSlice {
  int dim = 0;
  std::int64_t start = 0, end = 0, step = 1;
  bool selected = false;
};

/// For Op::saves: the op's inputs `i...`.
template <class... I>
constexpr std::uint32_t in(I... i) {
  return ((1u << i) | ... | 0u);
}
/// For Op::saves: the op's outputs `i...`.
template <class... I>
constexpr std::uint32_t out(I... i) {
  return ((1u << (16 + i)) | ... | 0u);
}

/// Declaration of an op; see define_op.
struct Op {
  const char* name;                             ///< as in PyTorch, where it has one
  int version = 1;                              ///< raised when attributes or meaning change
  const char* signature = "";                   ///< for the docs: `add(input, other, alpha=1)`
  InferFn infer = nullptr;                      ///< null for composites, which are functions of other ops
  GradFn grad = nullptr;                        ///< null: not differentiable (or a composite)
  std::array<std::uint32_t, 8> saves = {};      ///< saves[i]: what the gradient of input i reads, as in(...) | out(...)
  const AttributeStruct* attributes = nullptr;  ///< &attribute_struct<A>() for one of ops/attributes.h; null: none
  std::uint32_t attributes_size = 0;            ///< of a custom op's struct, which has no description
  int dtype_attribute = -1;        ///< offset of an optional dtype there (a signed byte) that gives the result's dtype
  int key = 0;                     ///< the input whose dtype chooses the kernel (after casts); -1: output 0
  bool view = false;               ///< the output shares the first input's storage; no kernel runs
  bool composite = false;          ///< made of other ops
  bool backward = false;           ///< part of a backward pass: called by gradient rules only
  std::uint32_t state_inputs = 0;  ///< inputs, as in(...), that are a state and no operands: autocast leaves them in
                                   ///< float32, as 16 bits would lose what many steps have gathered
  GradSlice (*grad_slice)(const void* attributes) = nullptr;  ///< for a result that is a slice of input 0: which. The
                                                              ///< gradient is zero elsewhere, and a backward pass puts
                                                              ///< several together without padding each with zeros
  bool float32_gradient = false;  ///< where input 0 is f32 and the result has 16 bits, the result's gradient may
                                  ///< come in f32: like that of a cast, it isn't rounded on the way
  bool adds_gradients = false;    ///< where two gradients come for result 0, the rule may get both, so that its kernel
                                  ///< adds them up while it reads them (GradContext::more())
  // Filled by define_op.
  KernelTable* table = nullptr;
  int id = -1;
  /// Private to the autocast hook: its cached lookup for this op, read and written atomically.
  mutable std::int8_t autocast_class = -1;
};

/// Adds an op to the table of ops and returns the reference used for calls. Throws Error if the name is taken.
HS_API const Op& define_op(const Op& declaration);
/// The op of that name, or null.
HS_API const Op* find_op(std::string_view name);
/// All ops, in alphabetical order.
HS_API std::vector<const Op*> all_ops();

/// The largest number of outputs of an op.
inline constexpr int kMaxOutputs = 8;

/// The shape rule's inputs and results.
class HS_API InferContext {
 public:
  InferContext(const Op& op, std::span<const Tensor* const> inputs, const void* attributes)
      : op_(op), inputs_(inputs), attributes_(attributes) {}

  /// The op that is called, its name, and its inputs; an input that was left out is an undefined tensor, for which
  /// has() is false.
  const Op& op() const { return op_; }
  const char* name() const { return op_.name; }
  int size() const { return static_cast<int>(inputs_.size()); }
  const Tensor& input(int i) const { return *inputs_[static_cast<std::size_t>(i)]; }
  bool has(int i) const { return i < size() && input(i).defined(); }
  /// The attributes of the call, of the type that the op declared.
  template <class A>
  const A& attributes() const {
    return *static_cast<const A*>(attributes_);
  }

  /// Adds an output, row-major.
  void output(const Shape& sizes, DType dtype);
  /// Adds an output with explicit strides.
  void output(const Shape& sizes, const Shape& strides, DType dtype);
  /// For views: the output's place in the first input's storage (offset in elements from the storage's start).
  void view(const Shape& sizes, const Shape& strides, std::int64_t offset);
  /// Converts the inputs whose bit is set in `mask` to `dtype` before the kernel sees them (undefined ones are
  /// skipped).
  void cast(DType dtype, std::uint64_t mask = ~std::uint64_t{0}) { cast_dtype = dtype, cast_mask = mask; }

  /// The rule's results, for call_op().
  struct Output {
    Shape sizes;
    Shape strides;
    DType dtype;
  };
  std::array<Output, kMaxOutputs> outputs;
  int num_outputs = 0;
  std::int64_t view_offset = 0;
  DType cast_dtype = DType::f32;
  std::uint64_t cast_mask = 0;

 private:
  const Op& op_;
  std::span<const Tensor* const> inputs_;
  const void* attributes_;
};

/// Rule of elementwise ops: all inputs broadcast together; the output keeps the layout of the first dense input of full
/// size.
HS_API void infer_elementwise(InferContext& ctx, DType dtype);
/// The dtype that inputs of these dtypes compute in, by PyTorch's promotion: tensors with dimensions count before 0-d
/// ones of the same kind. Throws DTypeError, naming `op`.
HS_API DType result_type(std::span<const Tensor* const> inputs, const char* op);
/// As above, with a scalar.
HS_API DType result_type(const Tensor& input, const Scalar& number);
/// Throws DTypeError unless the dtype is f32, f64, f16 or bf16.
HS_API void check_floating(const Tensor& input, const char* op);
/// Throws Error if the tensor is undefined, naming the argument.
HS_API void check_defined(const Tensor& input, const char* op, const char* what);
/// For ops whose results have sizes that depend on values: throws DeviceError for a tensor of meta, which has none.
HS_API void check_values(const Tensor& input, const char* op);

/// A gradient rule's inputs and results. Gradients set here may be of any dtype and of a broadcast shape: the engine
/// sums and casts them to fit the input.
class HS_API GradContext {
 public:
  struct Input {
    Shape sizes;
    DType dtype;
    DType grad_dtype;  ///< f32 where the input is the cast of a float32 tensor: a gradient written in f32 skips a
                       ///< rounding
    Device device;
    bool needs_grad;
  };

  GradContext(const Op& op, const void* attributes, std::span<const Input> metas, std::span<const Tensor> inputs,
              std::span<const Tensor> outputs, std::span<const Tensor> grads, std::span<Tensor> results,
              bool create_graph, const Tensor& more = {})
      : create_graph(create_graph),
        op_(op),
        attributes_(attributes),
        metas_(metas),
        inputs_(inputs),
        outputs_(outputs),
        grads_(grads),
        results_(results),
        more_(more) {}

  /// The op that was called, with its attributes.
  const Op& op() const { return op_; }
  /// As InferContext::attributes().
  template <class A>
  const A& attributes() const {
    return *static_cast<const A*>(attributes_);
  }
  int size() const { return static_cast<int>(metas_.size()); }
  /// Whether the gradient of input i is requested.
  bool needs(int i) const { return i < size() && metas_[static_cast<std::size_t>(i)].needs_grad; }
  const Shape& input_sizes(int i) const { return metas_[static_cast<std::size_t>(i)].sizes; }
  DType input_dtype(int i) const { return metas_[static_cast<std::size_t>(i)].dtype; }
  DType grad_dtype(int i) const { return metas_[static_cast<std::size_t>(i)].grad_dtype; }
  Device device(int i) const { return metas_[static_cast<std::size_t>(i)].device; }
  /// A saved input or output (undefined when it was not saved or not given).
  const Tensor& input(int i) const { return inputs_[static_cast<std::size_t>(i)]; }
  const Tensor& output(int i = 0) const { return outputs_[static_cast<std::size_t>(i)]; }
  /// The gradient of output i; undefined when the output was not used (output 0 of a one-output op always has one).
  const Tensor& grad(int i = 0) const { return grads_[static_cast<std::size_t>(i)]; }
  /// Of an op that adds_gradients: what is still to be added to grad(0), of its sizes, strides and dtype, the sum being
  /// rounded to that; undefined where nothing is.
  const Tensor& more() const { return more_; }
  int num_outputs() const { return static_cast<int>(grads_.size()); }
  /// Sets the gradient of input i.
  void set(int i, Tensor gradient) { results_[static_cast<std::size_t>(i)] = std::move(gradient); }

  /// Whether the backward pass is recorded: a fused backward op without its own gradient must then give way to recorded
  /// ops.
  const bool create_graph;

 private:
  const Op& op_;
  const void* attributes_;
  std::span<const Input> metas_;
  std::span<const Tensor> inputs_;
  std::span<const Tensor> outputs_;
  std::span<const Tensor> grads_;
  std::span<Tensor> results_;
  Tensor more_;
};

// ----------------------------------------------------------------------------------------------------------------
// calls

/// Runs an op of any number of inputs and outputs. `attributes` is its struct (null for ops without).
HS_API void call_op(const Op& op, std::span<const Tensor* const> inputs, const void* attributes,
                    std::span<Tensor> outputs);
/// Runs an op of one output and writes the result into `destination`, which keeps its dtype and shape (the result must
/// broadcast to it). With `in_place` the destination is the op's input 0 and the write is recorded; otherwise it is an
/// `out` form, which is not recorded.
HS_API void call_op_into(const Op& op, std::span<const Tensor* const> inputs, const void* attributes,
                         Tensor& destination, bool in_place);

/// For ops that have none.
struct NoAttributes {};

namespace detail {
HS_API void check_attributes(const Op& op, std::size_t size);
template <class A>
const void* attributes_pointer(const Op& op, const A& attributes) {
  if constexpr (std::is_same_v<A, NoAttributes>) {
    if (op.attributes_size != 0) check_attributes(op, 0);
    return nullptr;
  } else {
    static_assert(std::is_trivially_copyable_v<A>);
    if (op.attributes_size != sizeof(A)) check_attributes(op, sizeof(A));
    return &attributes;
  }
}
}  // namespace detail

/// Runs an op of one output.
template <class A = NoAttributes>
Tensor call(const Op& op, std::initializer_list<const Tensor*> inputs, const A& attributes = {}) {
  Tensor result;
  call_op(op, {inputs.begin(), inputs.size()}, detail::attributes_pointer(op, attributes), {&result, 1});
  return result;
}
/// Runs an op of N outputs.
template <int N, class A = NoAttributes>
std::array<Tensor, N> call_n(const Op& op, std::initializer_list<const Tensor*> inputs, const A& attributes = {}) {
  std::array<Tensor, N> results;
  call_op(op, {inputs.begin(), inputs.size()}, detail::attributes_pointer(op, attributes), results);
  return results;
}
/// Runs an op of one output on a list of tensors.
template <class A = NoAttributes>
Tensor call(const Op& op, std::span<const Tensor> inputs, const A& attributes = {}) {
  std::vector<const Tensor*> pointers;
  for (const Tensor& t : inputs) pointers.push_back(&t);
  Tensor result;
  call_op(op, pointers, detail::attributes_pointer(op, attributes), {&result, 1});
  return result;
}
/// The in-place form: `destination` is also input 0.
template <class A = NoAttributes>
Tensor& call_in_place(const Op& op, Tensor& destination, std::initializer_list<const Tensor*> others,
                      const A& attributes = {}) {
  std::array<const Tensor*, 8> inputs{&destination};
  std::size_t n = 1;
  for (const Tensor* t : others) inputs[n++] = t;
  call_op_into(op, {inputs.data(), n}, detail::attributes_pointer(op, attributes), destination, true);
  return destination;
}
/// The `out` form.
template <class A = NoAttributes>
Tensor& call_out(const Op& op, Tensor& destination, std::initializer_list<const Tensor*> inputs,
                 const A& attributes = {}) {
  call_op_into(op, {inputs.begin(), inputs.size()}, detail::attributes_pointer(op, attributes), destination, false);
  return destination;
}

/// Runs the kernel of the table called for `device` and `dtype` on tensors as they are: no casts, no record. For passes
/// over many tensors, such as optimizers. Undefined tensors become absent inputs. A kernel that the device lacks runs
/// on the CPU, with copies to it and back. `attributes` (null for none) is a struct of `attributes_bytes` bytes; a
/// `live` one lives as long as the caller of the kernel, and a captured step reads it again in every replay. Throws
/// DeviceError when there is no kernel, or tensors are elsewhere than on `device`.
HS_API void run_kernel(const KernelTable& table, const char* name, Device device, DType dtype,
                       std::span<const Tensor* const> inputs, std::span<const Tensor* const> outputs,
                       const void* attributes, std::size_t attributes_bytes, bool live = false);
/// The same with a struct local to this call, or none.
template <class A = NoAttributes>
void run_kernel(const KernelTable& table, const char* name, Device device, DType dtype,
                std::span<const Tensor* const> inputs, std::span<const Tensor* const> outputs,
                const A& attributes = {}) {
  static_assert(!std::is_pointer_v<A> && !std::is_null_pointer_v<A> && std::is_trivially_copyable_v<A>);
  if constexpr (std::is_same_v<A, NoAttributes>) {
    run_kernel(table, name, device, dtype, inputs, outputs, nullptr, 0);
  } else {
    run_kernel(table, name, device, dtype, inputs, outputs, &attributes, sizeof(A));
  }
}

/// Requests that kernels report bounds of their results (Storage::magnitude_bound), or withdraws the request; a
/// gradient scaler does so for its lifetime. Requests are counted.
HS_API void want_magnitude_bounds(bool wanted);

// ----------------------------------------------------------------------------------------------------------------
// hooks

/// A region's precision on one thread; amp/autocast.h is the way to change it.
struct AutocastState {
  bool enabled = false;
  bool cache = true;
  DType dtype = DType::f16;
  std::uint16_t device_types = 0xffff;    ///< bit i: kind i of device
  std::shared_ptr<const void> overrides;  ///< amp's
};

/// Takes a thread's calls of ops before they run, to give them other inputs or to change their results: how a network
/// is quantized without being rewritten. Its own calls are not taken.
class HS_API CallInterceptor {
 public:
  virtual ~CallInterceptor() = default;
  /// In the place of call_op(op, inputs, attributes, outputs), views included: it calls that itself.
  virtual void call(const Op& op, std::span<const Tensor* const> inputs, const void* attributes,
                    std::span<Tensor> outputs) = 0;
  /// In the place of call_op_into(op, inputs, attributes, destination, in_place).
  virtual void call_into(const Op& op, std::span<const Tensor* const> inputs, const void* attributes,
                         Tensor& destination, bool in_place) = 0;
  /// One that takes calls as this one does from now on, for a function that is run a second time (checkpoint()).
  virtual std::shared_ptr<CallInterceptor> again() const = 0;
};

/// A thread's mode: whether calls are recorded, in what precision they run, and who takes them.
struct ThreadState {
  bool grad_enabled = true;
  AutocastState autocast;
  CallInterceptor* interceptor = nullptr;  ///< null: nobody
};
HS_API ThreadState& thread_state();

/// What the autocast hook may change about a call.
struct AutocastCall {
  const Op& op;
  std::span<const Tensor*> inputs;  ///< pointers may be redirected to tensors in `storage`
  std::span<Tensor> storage;        ///< as many as inputs
  void* attributes;                 ///< a modifiable copy (null for ops without)
};

/// The slots. Set once, when the library is loaded.
struct OpHooks {
  void (*autocast)(AutocastCall& call) = nullptr;
  /// Called when recording is on and an input needs a gradient. `destination` is set for in-place calls (then
  /// outputs[0] is it).
  void (*record)(const Op& op, std::span<const Tensor* const> inputs, const void* attributes, std::span<Tensor> outputs,
                 bool in_place) = nullptr;
  /// Called before an in-place write while recording is on.
  void (*check_in_place)(const Op& op, const Tensor& destination) = nullptr;
};
HS_API OpHooks& op_hooks();

/// Turns autocast off on this thread for its lifetime: inside a composite the policy has already been applied.
class HS_API AutocastOff {
 public:
  AutocastOff() : was_(thread_state().autocast.enabled) { thread_state().autocast.enabled = false; }
  ~AutocastOff() { thread_state().autocast.enabled = was_; }
  AutocastOff(const AutocastOff&) = delete;
  AutocastOff& operator=(const AutocastOff&) = delete;

 private:
  bool was_;
};

/// A function composed of other ops that has its own row in the policy table: applies that row to the inputs and runs
/// `body` (which takes a `std::span<const Tensor>`) with autocast off.
template <class F>
auto composite(const Op& op, std::initializer_list<const Tensor*> inputs, F&& body) {
  std::vector<Tensor> held;
  held.reserve(inputs.size());
  for (const Tensor* t : inputs) held.push_back(*t);
  if (!thread_state().autocast.enabled) return body(std::span<const Tensor>(held));
  std::vector<const Tensor*> pointers(inputs);
  std::vector<Tensor> storage(inputs.size());
  AutocastCall call{op, pointers, storage, nullptr};
  if (op_hooks().autocast) op_hooks().autocast(call);
  for (std::size_t i = 0; i < held.size(); ++i) held[i] = *pointers[i];
  AutocastOff off;
  return body(std::span<const Tensor>(held));
}

}  // namespace halfstep
