// SPDX-License-Identifier: Apache-2.0
// Checkpointing by the order in which tensors are saved: the first run counts them and keeps none, the second run fills
// the places of those that are still wanted. The graph itself is that of the first run, so hooks, parameters that the
// function captured and second derivatives need nothing of their own.
#include "halfstep/autograd/checkpoint.h"

#include <memory>
#include <mutex>
#include <unordered_set>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/autograd/node.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/observer.h"
#include "halfstep/ops/recomputing.h"
#include "halfstep/ops/recorder.h"

namespace halfstep {
namespace {

class Frame;

Tensor without_history(const Tensor& t) {
  const TensorImpl* p = t.impl();
  return Tensor(TensorImpl::make(p->storage, p->offset, p->sizes, p->strides, p->dtype));
}

// One saved tensor of a checkpoint.
class Slot final : public SavedSlot {
 public:
  Slot(std::shared_ptr<Frame> frame, const Tensor& tensor)
      : frame_(std::move(frame)), sizes_(tensor.sizes()), dtype_(tensor.dtype()) {}

  Tensor get(const std::string& what) override;

  void fill(const Tensor& tensor, std::uint32_t version) {
    if (tensor.sizes() != sizes_ || tensor.dtype() != dtype_) {
      fail<AutogradError>(
          "checkpoint: the function did something else when it was run again: expected to save {} {}, got {} {}",
          name(dtype_), sizes_.str(), name(tensor.dtype()), tensor.sizes().str());
    }
    tensor_ = without_history(tensor);
    version_ = version;
  }
  bool filled() const { return tensor_.defined(); }

 private:
  std::shared_ptr<Frame> frame_;
  Shape sizes_;
  DType dtype_;
  Tensor tensor_;
  std::uint32_t version_ = 0;
};

// The history of an input in the second run, which isn't a leaf there: captured steps would keep it, and it couldn't be
// changed in place. Nobody asks for its gradient.
class InputNode final : public Node {
 public:
  explicit InputNode(const Tensor& input) { outputs.push_back({input.sizes(), input.dtype(), input.device()}); }
  std::string name() const override { return "checkpoint"; }
  void apply(std::span<Tensor>, std::span<Tensor>, bool) override {}
};

class HookScope {
 public:
  explicit HookScope(SavingHook* hook) : was_(std::exchange(saving_hook(), hook)) {}
  ~HookScope() { saving_hook() = was_; }
  HookScope(const HookScope&) = delete;
  HookScope& operator=(const HookScope&) = delete;

 private:
  SavingHook* was_;
};

class RandomScope {
 public:
  explicit RandomScope(bool on, const std::shared_ptr<PhiloxState>& state) : on_(on) {
    if (on_) swap(state);
  }
  ~RandomScope() {
    if (!on_) return;
    const auto restore = [was = was_] { default_generator().set_state(*was); };
    if (KernelRecorder* recorder = kernel_recorder()) [[unlikely]]
      recorder->host(restore);
    const CapturePause pause;
    restore();
  }
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

 private:
  // In a replay too, with the state that the generator has then.
  void swap(const std::shared_ptr<PhiloxState>& state) {
    const auto rewind = [state, was = was_] {
      *was = default_generator().state();
      default_generator().set_state(*state);
    };
    if (KernelRecorder* recorder = kernel_recorder()) [[unlikely]]
      recorder->host(rewind);
    const CapturePause pause;
    rewind();
  }

  bool on_;
  std::shared_ptr<PhiloxState> was_ = std::make_shared<PhiloxState>();
};

// The modes of the first run, and the module that it ran in: what a region says of modules by path holds again.
class StateScope {
 public:
  StateScope(const ThreadState& state, const std::string& module)
      : was_(thread_state()), module_(std::exchange(call_origin().module_path, module)) {
    thread_state() = state;
  }
  ~StateScope() {
    thread_state() = std::move(was_);
    call_origin().module_path = std::move(module_);
  }
  StateScope(const StateScope&) = delete;
  StateScope& operator=(const StateScope&) = delete;

 private:
  ThreadState was_;
  std::string module_;
};

class AgainScope {
 public:
  AgainScope() : was_(std::exchange(detail::recomputing(), true)) {}
  ~AgainScope() { detail::recomputing() = was_; }
  AgainScope(const AgainScope&) = delete;
  AgainScope& operator=(const AgainScope&) = delete;

 private:
  bool was_;
};

// One call of checkpoint().
class Frame final : public SavingHook, public std::enable_shared_from_this<Frame> {
 public:
  // Made while the hook of an outer checkpoint is still set: the inputs may be among what that one doesn't keep.
  Frame(const TensorFunction& function, const std::vector<Tensor>& inputs, const CheckpointOptions& options)
      : function_(function),
        state_(thread_state()),
        interceptor_(state_.interceptor ? state_.interceptor->again() : nullptr),
        module_(call_origin().module_path),
        random_(std::make_shared<PhiloxState>(default_generator().state())),
        options_(options),
        first_storage_(Storage::wrap(nullptr, 0, {}, {})->id()) {
    if (KernelRecorder* recorder = kernel_recorder()) [[unlikely]]
      recorder->host([random = random_] { *random = default_generator().state(); });
    for (const Tensor& t : inputs) {
      inputs_.emplace_back(t, false);
      needs_grad_.push_back(t.defined() && t.requires_grad());
    }
  }

  std::vector<Tensor> first_run(const std::vector<Tensor>& inputs) {
    outer_ = saving_hook();
    std::vector<Tensor> outputs;
    {
      const HookScope scope(this);
      outputs = function_(inputs);
    }
    again_ = true;
    return outputs;
  }

  std::shared_ptr<SavedSlot> save(const Tensor& tensor, bool is_output, std::uint32_t version) override {
    if (again_) {
      const std::size_t i = cursor_++;
      if (i >= slots_.size()) return nullptr;
      if (const auto slot = slots_[i].lock(); slot && !slot->filled()) slot->fill(tensor, version);
      return nullptr;
    }
    // What was there before, and leaves, take no memory of the checkpoint's.
    const bool leaf = !is_output && tensor.requires_grad() && tensor.is_leaf();
    // An outer checkpoint may have made it. It counts everything: what was there before this run, such as 16-bit copies
    // of weights, may be made in another one.
    const auto outer = outer_ ? outer_->save(tensor, is_output, version) : nullptr;
    if (leaf || tensor.storage()->id() < first_storage_) {
      slots_.emplace_back();
      return leaf ? nullptr : outer;
    }
    auto slot = std::make_shared<Slot>(shared_from_this(), tensor);
    if (!is_output) slot->edge = gradient_edge(tensor);
    slots_.push_back(slot);
    return slot;
  }

  void read(std::span<const Tensor* const> inputs) override {
    if (again_) return;
    if (outer_) outer_->read(inputs);
    for (const Tensor* t : inputs) {
      if (!t->defined() || !t->requires_grad() || !t->is_leaf()) continue;
      if (!seen_.insert(t->storage()->id()).second) continue;
      parameters_.emplace_back(without_history(*t), t->version());
    }
  }

  void run_again(const std::string& what) {
    if (!again_) {
      fail<AutogradError>("{} is computed by a checkpointed function that has not returned; take gradients outside",
                          what);
    }
    std::lock_guard lock(mutex_);
    std::vector<Tensor> inputs;
    {
      const NoGrad no_grad;
      for (std::size_t i = 0; i < inputs_.size(); ++i) {
        Tensor t = inputs_[i].unpack({}, 0, "checkpoint", "input", static_cast<int>(i));
        if (t.defined()) t = without_history(t);
        if (needs_grad_[i]) set_history(t, Ref<Node>::adopt(new InputNode(t)), 0);
        inputs.push_back(std::move(t));
      }
    }
    for (const auto& [parameter, version] : parameters_) {
      if (parameter.version() == version) continue;
      fail<AutogradError>(
          "{} can't be computed again: a {} leaf {} that the checkpointed function reads was changed in place since "
          "(version {}, now {})",
          what, name(parameter.dtype()), parameter.sizes().str(), version, parameter.version());
    }
    const std::shared_ptr<CallInterceptor> interceptor = interceptor_ ? interceptor_->again() : nullptr;
    ThreadState modes = state_;
    modes.interceptor = interceptor.get();
    const StateScope state(modes, module_);
    const AgainScope again;
    const RandomScope random(options_.preserve_random_state, random_);
    const HookScope scope(this);
    cursor_ = 0;
    function_(inputs);
    if (cursor_ != slots_.size()) {
      fail<AutogradError>(
          "checkpoint: the function did something else when it was run again: it saved {} tensors, then {}",
          slots_.size(), cursor_);
    }
  }

 private:
  TensorFunction function_;
  ThreadState state_;  // but for the interceptor, which may be gone by then
  std::shared_ptr<const CallInterceptor> interceptor_;
  std::string module_;
  std::shared_ptr<PhiloxState> random_;
  CheckpointOptions options_;
  std::uint64_t first_storage_;  // storages with lower numbers were there before
  std::vector<SavedTensor> inputs_;
  std::vector<bool> needs_grad_;
  std::vector<std::weak_ptr<Slot>> slots_;  // in the order of saving; none where the tensor was kept
  std::vector<std::pair<Tensor, std::uint32_t>> parameters_;
  std::unordered_set<std::uint64_t> seen_;
  SavingHook* outer_ = nullptr;  // during the first run
  bool again_ = false;
  std::size_t cursor_ = 0;
  std::mutex mutex_;
};

Tensor Slot::get(const std::string& what) {
  if (!filled()) frame_->run_again(what);
  if (!filled()) {
    fail<AutogradError>("{} was not computed when the checkpointed function was run again", what);
  }
  if (tensor_.version() != version_) {
    fail<AutogradError>("{}, a {} tensor {}, was changed in place after it was saved; clone it before the change", what,
                        name(dtype_), sizes_.str());
  }
  return without_history(tensor_);
}

}  // namespace

std::vector<Tensor> checkpoint(const TensorFunction& function, const std::vector<Tensor>& inputs,
                               const CheckpointOptions& options) {
  if (!GradMode::is_enabled()) return function(inputs);
  return std::make_shared<Frame>(function, inputs, options)->first_run(inputs);
}

bool is_recomputing() { return detail::recomputing(); }

}  // namespace halfstep
