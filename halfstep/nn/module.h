// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "halfstep/autograd/parameter.h"
#include "halfstep/core/tensor.h"

namespace halfstep::nn {

class ModuleBase;

/// A tensor that belongs to a module. A plain Tensor in all else; what is assigned to it is what the module's
/// parameters() and state_dict() show.
class HS_API Parameter : public Tensor {
 public:
  Parameter() = default;
  Parameter(const Parameter&) = default;
  Parameter(Parameter&&) = default;
  Parameter& operator=(const Parameter&) = default;
  Parameter& operator=(Parameter&&) = default;
  /// Another tensor in its place.
  Parameter& operator=(Tensor tensor) {
    static_cast<Tensor&>(*this) = std::move(tensor);
    return *this;
  }

 private:
  friend class ModuleBase;
  Parameter(ModuleBase* owner, std::string_view name, Tensor tensor, bool buffer);
};

/// A tensor that belongs to a module's state but isn't trained, such as running statistics.
using Buffer = Parameter;

/// What load_state_dict did not find or did not know.
struct LoadReport {
  std::vector<std::string> missing;     ///< in the module, not in the state
  std::vector<std::string> unexpected;  ///< in the state, not in the module
};

/// What all modules have. Derive from Module<T>.
///
/// A module is a handle, as a tensor is: copies share parameters, buffers and mode; moving copies; clone() makes an
/// independent one.
class HS_API ModuleBase {
 public:
  ModuleBase();
  ModuleBase(const ModuleBase& other);
  ModuleBase(ModuleBase&& other) : ModuleBase(static_cast<const ModuleBase&>(other)) {}
  ModuleBase& operator=(const ModuleBase& other);
  ModuleBase& operator=(ModuleBase&& other) { return *this = static_cast<const ModuleBase&>(other); }
  virtual ~ModuleBase();

  /// All parameters, also of the modules inside, with names such as `fc1.weight`; one that appears twice is listed
  /// once.
  NamedTensors parameters() const;
  /// Those that require grad.
  NamedTensors trainable_parameters() const;
  /// All buffers, with their names.
  NamedTensors buffers() const;
  /// Parameters and buffers under PyTorch's names and in its order. The tensors are the module's own, not copies.
  NamedTensors state_dict() const;
  /// Copies values into the parameters and buffers of the same names, converting dtypes. Strict: throws Error naming
  /// what is missing, unexpected or of another shape, before anything is changed. Not strict: loads what fits the names
  /// and reports the rest; other shapes are still an error.
  LoadReport load_state_dict(const NamedTensors& state, bool strict = true) const;

  /// Training mode on or off, for this module and all inside.
  void train(bool on = true) const;
  void eval() const { train(false); }
  bool is_training() const;
  /// Freezes (false) or unfreezes all parameters.
  void requires_grad_(bool on = true) const;
  /// Drops all gradients.
  void zero_grad() const;
  /// Converts floating parameters and buffers in place; buffers stay as they are when the dtype has 16 bits or fewer,
  /// since running statistics need more.
  void to(DType dtype) const;
  void to(Device device) const;
  /// Puts images' weights, parameters and buffers of 4 dimensions, in this layout in place: channels-last saves
  /// convolutions a reordering. The values stay. Before the optimizer is made, whose state takes the layout that it
  /// finds. Throws Error for MemoryFormat::preserve.
  void to(MemoryFormat format) const;
  /// Calls `function` for this module and all inside, with their paths (empty for this one).
  void apply(const std::function<void(const std::string& path, const ModuleBase& module)>& function) const;
  /// The modules directly inside, with their names.
  std::vector<std::pair<std::string, const ModuleBase*>> children() const;
  /// This module's own parameter or buffer of that name; undefined when there is none. Unlike parameters(), it doesn't
  /// look inside.
  Tensor own_tensor(std::string_view name) const;

  /// Name of its kind, such as `Linear`.
  virtual std::string kind() const = 0;
  /// What stands in brackets behind the kind when it is printed: `784, 512`.
  virtual std::string describe() const { return ""; }
  /// The tree of modules as text.
  std::string str() const;
  /// Name under which it was given to its parent.
  const std::string& name() const { return name_; }

  /// A new handle on the same parameters; for containers.
  virtual std::shared_ptr<ModuleBase> copy() const = 0;
  /// Gives this handle parameters, buffers and mode of its own; clone() does it to a copy.
  virtual void unshare();

 protected:
  /// Registers a module inside: the initialiser of a member.
  template <class M>
  M child(std::string name, M module) {
    static_assert(std::derived_from<M, ModuleBase>, "child() takes a module");
    announce(std::move(name));
    // Made in place of the member, whose address its base then finds out.
    return M(std::as_const(module));
  }
  /// Registers a trainable tensor: the initialiser of a Parameter member. An undefined tensor stands for an absent one.
  Parameter parameter(std::string_view name, Tensor tensor) { return Parameter(this, name, std::move(tensor), false); }
  /// Registers a tensor that isn't trained.
  Buffer buffer(std::string_view name, Tensor tensor) { return Parameter(this, name, std::move(tensor), true); }

  /// Modules that a container holds beside the registered ones.
  virtual std::vector<std::pair<std::string, ModuleBase*>> held() const { return {}; }
  /// Gives a held module its name in the path.
  static void set_name(ModuleBase& module, std::string name) { module.name_ = std::move(name); }

  /// Opens the module's scope on this thread: its name in the path, and the precision that is set for it.
  class HS_API Scope {
   public:
    explicit Scope(const ModuleBase& module);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    alignas(8) unsigned char storage_[128];
  };

 private:
  friend class Parameter;
  enum class Kind : std::uint8_t { child, parameter, buffer };
  // A member, by its distance from this object: the same in every copy.
  struct Entry {
    std::string name;
    std::ptrdiff_t offset;
    Kind kind;
  };
  struct State {
    bool training = true;
  };

  void announce(std::string name);
  void add(std::string_view name, const void* member, Kind kind);
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
template <class T>
class Module : public ModuleBase {
 public:
  /// Runs forward() inside the module's scope.
  template <class... Args>
  decltype(auto) operator()(Args&&... args) const {
    const Scope scope(*this);
    return static_cast<const T&>(*this).forward(std::forward<Args>(args)...);
  }
  std::string kind() const override { return "Module"; }
  std::shared_ptr<ModuleBase> copy() const override { return std::make_shared<T>(static_cast<const T&>(*this)); }
};

/// A module that takes one tensor and gives one.
template <class M>
concept TensorModule = std::derived_from<M, ModuleBase> && requires(const M& m, const Tensor& x) {
  { m.forward(x) } -> std::convertible_to<Tensor>;
};

/// An independent copy: parameters, buffers and mode of its own.
template <class M>
M clone(const M& module) {
  M result(module);
  result.unshare();
  return result;
}

/// Puts other contents (dtype, device, values) into a tensor that others hold too; its gradient is dropped when it no
/// longer fits.
HS_API void replace_contents(const Tensor& tensor, const Tensor& contents);

HS_API std::ostream& operator<<(std::ostream& out, const ModuleBase& module);

}  // namespace halfstep::nn
