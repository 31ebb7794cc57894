// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <concepts>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "halfstep/amp/module_precision.h"
#include "halfstep/autograd/parameter.h"
#include "halfstep/core/capture.h"
#include "halfstep/core/tensor.h"
#include "halfstep/nn/recompute.h"

namespace halfstep::nn {

class ModuleBase;

/// The value of a required module option that was not set; the module's constructor then throws Error.
inline constexpr std::int64_t kNotGiven = std::numeric_limits<std::int64_t>::min();

/// A tensor that belongs to a module, otherwise a plain Tensor; a tensor assigned to it appears in the module's
/// parameters() and state_dict().
class HS_API Parameter : public Tensor {
 public:
  Parameter();
  Parameter(const Parameter& other);
  Parameter(Parameter&& other) noexcept;
  ~Parameter();
  Parameter& operator=(const Parameter& other) { return *this = static_cast<const Tensor&>(other); }
  /// A result of parameter() or buffer() becomes this member, so that a constructor may assign it.
  Parameter& operator=(Parameter&& other);
  /// Replaces the tensor.
  Parameter& operator=(Tensor tensor) {
    static_cast<Tensor&>(*this) = std::move(tensor);
    ++capture_generation();
    return *this;
  }

 private:
  friend class ModuleBase;
  Parameter(ModuleBase* owner, std::string_view name, Tensor tensor, bool buffer);
};

/// A tensor that belongs to a module's state but isn't trained, such as running statistics.
using Buffer = Parameter;

/// The mismatches found by load_state_dict.
struct LoadReport {
  std::vector<std::string> missing;     ///< in the module, not in the state
  std::vector<std::string> unexpected;  ///< in the state, not in the module
};

/// The common base of all modules. Derive from Module<T>.
///
/// A module is a handle, as a tensor is: copies share parameters, buffers and mode; moving copies; clone() makes an
/// independent one.
class HS_API ModuleBase : public amp::Castable {
 public:
  ModuleBase();
  ModuleBase(const ModuleBase& other);
  ModuleBase(ModuleBase&& other) : ModuleBase(static_cast<const ModuleBase&>(other)) {}
  ModuleBase& operator=(const ModuleBase& other);
  /// A result of child() becomes this member, so that a constructor may assign it.
  ModuleBase& operator=(ModuleBase&& other);
  ~ModuleBase() override;

  /// All parameters, including those of submodules, with names such as `fc1.weight`; one that appears twice is listed
  /// once. Throws Error if a member with tensors was never registered by child(), parameter() or buffer(), here or in a
  /// submodule: it would not be trained, moved or saved. So do state_dict(), buffers() and the module's first call.
  NamedTensors parameters() const;
  /// Those that require grad.
  NamedTensors trainable_parameters() const;
  /// All buffers, with their names.
  NamedTensors buffers() const;
  /// Parameters and buffers under PyTorch's names and in its order. The tensors are the module's own, not copies.
  NamedTensors state_dict() const;
  /// Copies values into the parameters and buffers of the same names, converting dtypes. Strict: throws Error naming
  /// missing, unexpected and differently shaped tensors, before anything is changed. Not strict: loads matching names
  /// and reports the rest; different shapes are still an error.
  LoadReport load_state_dict(const NamedTensors& state, bool strict = true) const;

  /// Turns training mode on or off, for this module and all submodules. train(), eval() and to() return the module:
  /// `net.to(device).eval()`.
  const ModuleBase& train(bool on = true) const;
  const ModuleBase& eval() const { return train(false); }
  bool is_training() const;
  /// Whether calls of this module, in training and with gradients, keep their inputs only: what else the backward pass
  /// needs is computed again by a second forward pass there, with the same bits (checkpoint() has the rules). Running
  /// statistics and observers are updated once. Saves the memory of all between the module's inputs and its results,
  /// for the time of its forward pass: for blocks that follow each other, such as those of residual networks. Arguments
  /// of forward() have to be copyable and no views of memory, or the call throws Error. Copies of the module share
  /// this; it isn't part of state_dict(). Returns the module.
  const ModuleBase& recompute(bool on = true) const;
  bool is_recomputed() const;
  /// Freezes (false) or unfreezes all parameters.
  void requires_grad_(bool on = true) const;
  /// Drops all gradients.
  void zero_grad() const;
  /// Converts floating parameters and buffers in place; buffers stay as they are when the dtype has 16 bits or fewer,
  /// since running statistics need more.
  const ModuleBase& to(DType dtype) const;
  const ModuleBase& to(Device device) const;
  /// Converts image weights (4-d parameters and buffers) to this layout in place: channels-last saves convolutions a
  /// reorder. The values don't change. Call it before creating the optimizer, whose state takes the layout that it
  /// finds. Throws Error for MemoryFormat::preserve.
  const ModuleBase& to(MemoryFormat format) const;
  /// Calls `function` for this module and all submodules, with their paths (empty for this one).
  void apply(const std::function<void(const std::string& path, const ModuleBase& module)>& function) const;
  /// The direct submodules, with their names.
  std::vector<std::pair<std::string, const ModuleBase*>> children() const;
  /// What a module calls as its forward() begins; the result lives until that forward() ends.
  using ForwardGuard = std::function<std::shared_ptr<void>()>;
  /// Gives this module, without its submodules, a guard in the place of the one that it has; an empty one: none. Copies
  /// of the module share it, clones have none.
  void set_forward_guard(ForwardGuard guard) const;
  /// Adds a module inside of this one that its class knows nothing of; it is trained, moved and saved with it, under
  /// `name`. Copies of this module share it, clones have a clone of it. Throws Error where the name is taken.
  void attach(std::string name, std::shared_ptr<ModuleBase> module) const;
  /// The attached module of that name; null: there is none.
  std::shared_ptr<ModuleBase> attached(std::string_view name) const;
  /// Takes an attached module away; false where there is none of that name.
  bool remove_attached(std::string_view name) const;
  /// What an attached module does around each forward() of `owner`, the module that it is attached to: called as that
  /// begins; the result lives until it ends.
  virtual std::shared_ptr<void> around_forward(const ModuleBase& owner) const {
    (void)owner;
    return nullptr;
  }
  /// This module's own parameters, without those of submodules; undefined ones are left out.
  std::vector<Tensor> own_parameters() const;
  /// This module's own parameter or buffer of that name; undefined when there is none. Unlike parameters(), it doesn't
  /// look inside.
  Tensor own_tensor(std::string_view name) const;

  /// The text in brackets after the kind when it is printed: `784, 512`.
  virtual std::string describe() const { return ""; }
  /// Whether it behaves differently in training and evaluation although it has no tensors, like Dropout: then it must
  /// be registered too, or eval() doesn't reach it.
  virtual bool depends_on_mode() const { return false; }
  /// The tree of modules as text; modules with a precision of their own or inherited from an enclosing module show it:
  /// `Linear(784, 512) [f16]`.
  std::string str() const { return str_under(""); }
  /// Name under which it was given to its parent.
  const std::string& name() const { return name_; }

  // amp::Castable
  std::vector<std::pair<std::string, const amp::Castable*>> castables() const override;
  amp::PrecisionSlot& precision() const override;

  /// A new handle on the same parameters; for containers.
  virtual std::shared_ptr<ModuleBase> copy() const = 0;
  /// Gives this handle independent parameters, buffers and mode; clone() applies it to a copy.
  virtual void unshare();

 protected:
  /// Registers a submodule: used to initialise a member, or assigned to one in the constructor.
  template <class M>
  M child(std::string name, M module) {
    static_assert(std::derived_from<M, ModuleBase>, "child() takes a module");
    announce(std::move(name));
    // Constructed in the member itself, so that its base can determine the address.
    return M(std::as_const(module));
  }
  /// Registers a trainable tensor: used to initialise a Parameter member, or assigned to one in the constructor. An
  /// undefined tensor stands for an absent one.
  Parameter parameter(std::string_view name, Tensor tensor) { return Parameter(this, name, std::move(tensor), false); }
  /// Registers a tensor that isn't trained.
  Buffer buffer(std::string_view name, Tensor tensor) { return Parameter(this, name, std::move(tensor), true); }

  /// Modules that a container holds in addition to the registered ones.
  virtual std::vector<std::pair<std::string, ModuleBase*>> held() const { return {}; }
  /// Whether a call that is made now keeps its inputs only.
  bool recomputes() const { return state_->recomputed && recomputes_now(); }
  /// Gives a held module its name in the path.
  static void set_name(ModuleBase& module, std::string name) { module.name_ = std::move(name); }

  /// Opens the module's scope on this thread: its name in the path, and the precision that is set for it.
  class HS_API Scope {
   public:
    explicit Scope(const ModuleBase& module);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

    /// An argument of the call, converted for forward(): a tensor in the module's dtype if it has one, owned by `held`.
    template <class A>
    A&& entered(A&& argument, Tensor& held) const {
      if constexpr (std::is_same_v<std::remove_cvref_t<A>, Tensor>) {
        if (precision_ && precision_->cast_inputs) [[unlikely]] {
          held = amp::cast_input(argument, precision_->dtype);
          return static_cast<A&&>(held);
        }
      }
      return std::forward<A>(argument);
    }
    /// Converts the result of forward() to float32 if a level requires it: a tensor, or those in a vector, array,
    /// optional, pair or tuple. Custom types are left unchanged.
    template <class R>
    void leave(R& result) const {
      if (float32_output_) [[unlikely]]
        widen(result);
    }

   private:
    friend class ModuleBase;
    static void widen(Tensor& result) { result = amp::cast_input(result, f32); }
    template <class T>
    static void widen(std::vector<T>& results) {
      for (T& t : results) widen(t);
    }
    template <class T, std::size_t N>
    static void widen(std::array<T, N>& results) {
      for (T& t : results) widen(t);
    }
    template <class T>
    static void widen(std::optional<T>& result) {
      if (result) widen(*result);
    }
    template <class... T>
    static void widen(std::tuple<T...>& results) {
      std::apply([](auto&... t) { (widen(t), ...); }, results);
    }
    template <class A, class B>
    static void widen(std::pair<A, B>& results) {
      widen(results.first);
      widen(results.second);
    }
    template <class T>
    static void widen(T&) {}  // a custom type

    static const Scope*& innermost_scope();
    void enter_guards();
    void leave_scope();

    const ModuleBase& module_;
    const Scope* outer_;  // of the module whose forward() calls this one, on this thread
    const amp::ModulePrecision* precision_;
    bool float32_output_;
    alignas(8) unsigned char storage_[128];
    std::vector<std::shared_ptr<void>> guards_;
  };

 private:
  friend class Parameter;
  friend class EvalMode;
  enum class Kind : std::uint8_t { child, parameter, buffer };
  // A member, by its distance from this object: the same in every copy.
  struct Entry {
    std::string name;
    std::ptrdiff_t offset;
    Kind kind;
  };
  struct State {
    State() = default;
    State(const State& other)
        : training(other.training),
          recomputed(other.recomputed),
          precision(other.precision),
          attached(other.attached) {}
    bool training = true;
    bool recomputed = false;
    amp::PrecisionSlot precision = {};
    ForwardGuard forward_guard = {};
    std::vector<std::shared_ptr<ModuleBase>> attached = {};
    std::atomic<bool> checked = false;  // its members have been checked
    std::atomic<bool> placed = false;   // it belongs to the calling module, or a warning has been given
  };

  /// Size in bytes of the object that has this base; 0 when it isn't known.
  virtual std::size_t extent() const { return 0; }
  bool recomputes_now() const;
  void announce(std::string name);
  std::string str_under(const std::string& precision) const;
  void add(std::string_view name, const void* member, Kind kind);
  static bool take_place(const void* temporary, const void* member);
  struct Registered;
  static Registered& registered();
  bool is_outside(std::ptrdiff_t offset) const;
  struct Members;
  static Members& living();
  void check_members() const;
  void check_own_members() const;
  bool matters() const;
  bool contains(const ModuleBase& module) const;
  void check_place(const Scope& caller) const;
  char* member_at(const Entry& entry) const;
  Parameter& tensor_at(const Entry& entry) const;
  ModuleBase& child_at(const Entry& entry) const;
  void collect(const std::string& prefix, bool parameters, bool buffers, NamedTensors& into) const;

  std::shared_ptr<std::vector<Entry>> entries_;
  std::shared_ptr<State> state_;
  std::string name_;
};

/// Base of a module of type T, which has a `forward`. Users call the module itself: `net(x)`.
///
///     struct Net : nn::Module<Net> {
///       nn::Linear fc1 = child("fc1", nn::Linear{{.in = 784, .out = 512}});
///       Tensor forward(const Tensor& x) const { return relu(fc1(x)); }
///     };
///
/// Related modules may share a `Base`, itself derived from ModuleBase.
template <class T, class Base = ModuleBase>
class Module : public Base {
 public:
  using Base::Base;
  Module() = default;
  /// Runs forward() inside the module's scope.
  template <class... Args>
  decltype(auto) operator()(Args&&... args) const {
    using Result = decltype(std::declval<const T&>().forward(std::forward<Args>(args)...));
    if constexpr (std::is_object_v<Result>) {
      if (ModuleBase::recomputes()) [[unlikely]] {
        const auto call = [](const T& module, auto&&... a) -> Result {
          return once(module, std::forward<decltype(a)>(a)...);
        };
        return detail::recomputed(static_cast<const T&>(*this), call, std::forward<Args>(args)...);
      }
    }
    return once(static_cast<const T&>(*this), std::forward<Args>(args)...);
  }
  /// As those of ModuleBase, with the module's own type.
  const T& train(bool on = true) const { return own(Base::train(on)); }
  const T& eval() const { return own(Base::eval()); }  ///< see train()
  /// As ModuleBase's, with the module's own type.
  const T& recompute(bool on = true) const { return own(Base::recompute(on)); }
  const T& to(DType dtype) const { return own(Base::to(dtype)); }           ///< see train()
  const T& to(Device device) const { return own(Base::to(device)); }        ///< see train()
  const T& to(MemoryFormat format) const { return own(Base::to(format)); }  ///< see train()
  /// Sets the precision of this module and of submodules without one of their own: it computes in `dtype` (f16, bf16 or
  /// f32) whatever surrounds it; see amp::set_precision. Returns a handle on it, for use in member initialisers:
  /// `nn::Linear fc = child("fc", nn::Linear{{.in = 784, .out = 10}}.to_float(f16));`. Throws AmpError.
  T to_float(DType dtype) const {
    amp::set_precision(*this, dtype);
    return T(static_cast<const T&>(*this));
  }
  std::string kind() const override { return "Module"; }
  std::shared_ptr<ModuleBase> copy() const override { return std::make_shared<T>(static_cast<const T&>(*this)); }

 private:
  const T& own(const ModuleBase& /*this module*/) const { return static_cast<const T&>(*this); }
  std::size_t extent() const override { return typeid(*this) == typeid(T) ? sizeof(T) : 0; }
  template <class... Args>
  static decltype(auto) once(const Module& module, Args&&... args) {
    const ModuleBase::Scope scope(module);
    return module.run(scope, std::index_sequence_for<Args...>(), std::forward<Args>(args)...);
  }
  template <std::size_t... I, class... Args>
  decltype(auto) run(const ModuleBase::Scope& scope, std::index_sequence<I...>, Args&&... args) const {
    const T& self = static_cast<const T&>(*this);
    [[maybe_unused]] Tensor held[sizeof...(Args) + 1];
    using Result = decltype(self.forward(std::forward<Args>(args)...));
    if constexpr (std::is_object_v<Result>) {
      Result result = self.forward(scope.entered(std::forward<Args>(args), held[I])...);
      scope.leave(result);
      return result;
    } else {
      return self.forward(scope.entered(std::forward<Args>(args), held[I])...);
    }
  }
};

/// A module that maps one tensor to another.
template <class M>
concept TensorModule = std::derived_from<M, ModuleBase> && requires(const M& m, const Tensor& x) {
  { m.forward(x) } -> std::convertible_to<Tensor>;
};

/// Puts a module and all submodules into evaluation mode for the guard's lifetime, then restores each one's mode.
class HS_API EvalMode {
 public:
  explicit EvalMode(const ModuleBase& module);
  ~EvalMode();
  EvalMode(const EvalMode&) = delete;
  EvalMode& operator=(const EvalMode&) = delete;

 private:
  std::vector<std::shared_ptr<ModuleBase::State>> training_;  // of those that were training
};

/// An independent copy, with its own parameters, buffers and mode.
template <class M>
M clone(const M& module) {
  M result(module);
  result.unshare();
  return result;
}

/// Replaces the contents (dtype, device, values) of a tensor shared with other handles; its gradient is dropped if it
/// no longer fits.
HS_API void replace_contents(const Tensor& tensor, const Tensor& contents);

HS_API std::ostream& operator<<(std::ostream& out, const ModuleBase& module);

}  // namespace halfstep::nn
