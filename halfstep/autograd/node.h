// SPDX-License-Identifier: Apache-2.0
// The recorded graph: a node for each recorded call, edges to the nodes that produced its inputs. For the library and
// for extensions.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/op.h"

namespace halfstep {

class Node;

/// Where a gradient goes: which of a node's incoming gradients.
struct Edge {
  Ref<Node> node;
  std::uint32_t index = 0;
};

/// Metadata of a forward output: the shape that an incoming gradient must have.
struct OutputMeta {
  Shape sizes;
  DType dtype;
  Device device;
};

/// One recorded call. apply() takes the gradients of its outputs and returns those of its inputs.
class HS_API Node {
 public:
  Node();
  virtual ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  /// Name of the op, for messages.
  virtual std::string name() const = 0;
  /// `grads`: one for each output of the forward call, undefined where none came; where `adds_gradients` there may be
  /// one more, to be added to the first. `results`: one for each edge.
  virtual void apply(std::span<Tensor> grads, std::span<Tensor> results, bool create_graph) = 0;
  /// For a call whose result is a slice of its only input: which. The engine may then put the gradient into the input's
  /// itself instead of calling apply().
  virtual std::optional<GradSlice> slice() const { return std::nullopt; }
  /// Releases saved tensors; a later apply() throws AutogradError.
  virtual void release_saved() {}

  std::vector<Edge> edges;          ///< one for each input; without a node where no gradient is needed
  std::vector<OutputMeta> outputs;  ///< one for each output
  std::uint64_t sequence;           ///< order of recording on all threads; later ones run first
  bool accepts_float32 =
      false;  ///< the output is a 16-bit cast of a float32 tensor: gradients may stay float32, and several add up in it

  bool adds_gradients = false;  ///< two gradients of the first output are taken as they come (Op::adds_gradients)

  /// The module whose forward created the node; set only while calls are observed, else null.
  std::shared_ptr<const std::string> module;

  /// A user's function called with the gradient of output `index` before it is used.
  struct Hook {
    std::uint64_t id;
    std::uint32_t index;
    std::function<Tensor(const Tensor&)> function;
  };
  /// A non-leaf output that retains its gradient.
  struct Retained {
    std::uint32_t index;
    TensorImpl* tensor;
  };
  std::mutex mutex;  ///< guards the lists below
  std::vector<Hook> hooks;
  std::vector<Retained> retained;  ///< tensors that retain their gradient

  void retain() { refs_.fetch_add(1, std::memory_order_relaxed); }
  void release() {
    if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) destroy();
  }

 private:
  void destroy();
  std::atomic<std::uint32_t> refs_{1};
};

/// Autocast's 16-bit copy of a parameter (amp/cast_cache.h has the rules).
struct CastSlot {
  std::mutex mutex;
  Tensor data;                   ///< the copy, without history
  std::uint64_t storage_id = 0;  ///< what it is a copy of, and of which contents (Storage::contents())
  std::uint64_t contents = 0;
  Tensor recorded;           ///< the same memory with its history, for the uses in one region
  std::uint64_t region = 0;  ///< that region
  bool kept = false;         ///< an optimizer rewrites the copy at each step, so that it outlives the region
};

/// A lazily created object that several threads may create at the same time: the first one is kept.
template <class T, class Deleter = std::default_delete<T>>
class OncePtr {
 public:
  OncePtr() = default;
  ~OncePtr() {
    if (T* p = get()) Deleter()(p);
  }
  OncePtr(const OncePtr&) = delete;
  OncePtr& operator=(const OncePtr&) = delete;
  T* get() const { return p_.load(std::memory_order_acquire); }
  explicit operator bool() const { return get() != nullptr; }
  T* operator->() const { return get(); }
  T& operator*() const { return *get(); }
  /// Takes ownership of `made`, or drops it if another thread was faster; returns the stored one.
  T* set(T* made) {
    T* expected = nullptr;
    if (p_.compare_exchange_strong(expected, made, std::memory_order_acq_rel)) return made;
    Deleter()(made);
    return expected;
  }

 private:
  std::atomic<T*> p_{nullptr};
};

/// Autograd's data for a tensor.
class HS_API AutogradMeta final : public GradSlot {
 public:
  explicit AutogradMeta(TensorImpl* self) : self(self) {}
  ~AutogradMeta() override;
  std::string made_by() const override { return grad_fn ? grad_fn->name() : std::string(); }
  /// From the thread's pool: every recorded result has one.
  static void* operator new(std::size_t bytes);
  static void operator delete(void* p);

  /// The tensor that this belongs to, and its accumulated gradient.
  TensorImpl* self;
  Tensor grad;
  Ref<Node> grad_fn;  ///< the call that made it; none for a leaf
  std::uint32_t output = 0;
  struct ReleaseNode {
    void operator()(Node* node) const { node->release(); }
  };
  OncePtr<Node, ReleaseNode> accumulator;  ///< for a leaf that needs a gradient
  std::uint32_t rebases = 0;  ///< for a base: how often an in-place write to a view gave it a new grad_fn; for a view:
                              ///< how many of those its own knows
  bool retains_grad = false;
  OncePtr<CastSlot> cast;  ///< made by amp
  /// A function called with the leaf when its gradient has been added up.
  struct PostAccumulateHook {
    std::uint64_t id;
    std::function<void(const Tensor&)> function;
    bool recorded = false;  ///< it tells the recorder of a captured step what a replay has to repeat (ops/recorder.h)
  };
  std::vector<PostAccumulateHook> post_accumulate_hooks;
};

/// The tensor's AutogradMeta, created if it has none.
HS_API AutogradMeta& autograd_meta(const Tensor& tensor);
/// The same without making one.
HS_API AutogradMeta* autograd_meta_or_null(const Tensor& tensor);
/// Tensor::register_post_accumulate_grad_hook() for a hook that captured steps may contain: it tells their recorder
/// what a replay has to repeat. Removed by Tensor::remove_hook().
HS_API std::uint64_t register_recorded_grad_hook(const Tensor& leaf, std::function<void(const Tensor&)> hook);
/// Where the tensor's gradient goes; without a node when it needs none.
HS_API Edge gradient_edge(const Tensor& tensor);
/// Makes `tensor` the output `index` of `node`.
HS_API void set_history(const Tensor& tensor, Ref<Node> node, std::uint32_t index);
/// As set_history after an in-place write; a view's base is given its history too.
HS_API void rebase_history(const Tensor& tensor, Ref<Node> node);
/// Converts a gradient to these sizes and this dtype (f32 is left where `keep_float32`): sums broadcast dimensions.
/// Throws AutogradError naming `node`.
HS_API Tensor fit_gradient(const Tensor& gradient, const Shape& sizes, DType dtype, bool keep_float32,
                           const std::string& node);

/// The source of a saved tensor that was not kept but is recomputed.
class HS_API SavedSlot {
 public:
  virtual ~SavedSlot() = default;
  /// The tensor, without history. `what` names it in errors.
  virtual Tensor get(const std::string& what) = 0;
  /// The history that it had when it was saved.
  Edge edge;
};

/// Intercepts what calls on a thread save while it is set there (autograd/checkpoint.cpp).
class HS_API SavingHook {
 public:
  virtual ~SavingHook() = default;
  /// A source to get the tensor from later, so that it need not be kept; or null to keep it.
  virtual std::shared_ptr<SavedSlot> save(const Tensor& tensor, bool is_output, std::uint32_t version) = 0;
  /// A recorded call reads these.
  virtual void read(std::span<const Tensor* const> inputs) = 0;
};
/// This thread's hook, or null.
HS_API SavingHook*& saving_hook();

/// A tensor kept for the backward pass, with the version it had.
class HS_API SavedTensor {
 public:
  SavedTensor() = default;
  /// `output_of`: the node whose output the tensor is: it is kept without its history, which would form a cycle.
  /// `version_lag`: the number of in-place writes since the intended value.
  SavedTensor(const Tensor& tensor, bool is_output, std::uint32_t version_lag = 0);
  /// The tensor again; throws AutogradError, naming `op` and which tensor it was, when it was changed in place since.
  Tensor unpack(const Ref<Node>& self, std::uint32_t output, const char* op, const char* role, int index) const;
  bool defined() const { return tensor_.defined() || slot_; }
  void reset() {
    tensor_ = Tensor();
    slot_.reset();
  }

 private:
  Tensor tensor_;
  std::shared_ptr<SavedSlot> slot_;  ///< in place of the tensor
  std::uint32_t version_ = 0;
  bool is_output_ = false;
};

}  // namespace halfstep
