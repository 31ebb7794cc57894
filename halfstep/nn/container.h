// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>

#include "halfstep/nn/module.h"

namespace halfstep::nn {

/// A module that maps one tensor to another, with its name in a Sequential.
struct HS_API NamedModule {
  template <TensorModule M>
  NamedModule(std::string given_name, const M& m)
      : name(std::move(given_name)),
        module(std::make_shared<M>(m)),
        call([](const ModuleBase& base, const Tensor& x) { return Tensor(static_cast<const M&>(base)(x)); }) {}

  std::string name;                    ///< its part of the parameters' names: unique in the container, without dots
  std::shared_ptr<ModuleBase> module;  ///< a handle on the module given, whose parameters it shares
  /// Calls `module` with its concrete type, which is known only here.
  Tensor (*call)(const ModuleBase& module, const Tensor& input);
};

/// Modules one after the other, called "0", "1", ... or as given:
///
///     nn::Sequential net{nn::Linear{{.in = 784, .out = 512}}, nn::ReLU{}, nn::Linear{{.in = 512, .out = 10}}};
///     nn::Sequential named{{"fc", nn::Linear{{.in = 784, .out = 10}}}, {"act", nn::ReLU{}}};
class HS_API Sequential : public Module<Sequential> {
 public:
  Sequential() = default;
  /// Any modules that map one tensor to another; a single Sequential is shared, not wrapped.
  template <TensorModule... Ms>
  requires(sizeof...(Ms) > 1 || (... && !std::derived_from<Ms, Sequential>)) explicit Sequential(const Ms&... modules) {
    (push_back(modules), ...);
  }
  Sequential(std::initializer_list<NamedModule> modules);

  /// Appends a module. Throws Error for a name that contains dots or is taken.
  template <TensorModule M>
  void push_back(const M& module) {
    push_back(NamedModule(std::to_string(size()), module));
  }
  void push_back(NamedModule module);

  /// Applies the modules in order; without modules, returns the input.
  Tensor forward(const Tensor& input) const;
  std::size_t size() const { return modules_.size(); }
  /// Module number `i`; throws Error when there are fewer.
  const ModuleBase& operator[](std::size_t i) const;
  /// The same with its concrete type: `net.at<nn::Linear>(0).weight`. Throws Error if the type is different.
  template <class M>
  const M& at(std::size_t i) const {
    const auto* module = dynamic_cast<const M*>(&(*this)[i]);
    if (!module) wrong_kind(i);
    return *module;
  }
  std::string kind() const override { return "Sequential"; }
  void unshare() override;

 protected:
  std::vector<std::pair<std::string, ModuleBase*>> held() const override;

 private:
  [[noreturn]] void wrong_kind(std::size_t i) const;
  std::vector<NamedModule> modules_;
};

/// Modules of one type, called "0", "1", ..., that the owner's forward() uses as it likes:
///
///     nn::ModuleList<Block> blocks = child("blocks", nn::ModuleList<Block>{Block{}, Block{}});
///     for (const Block& block : blocks) x = block(x);
template <class M>
class ModuleList : public Module<ModuleList<M>> {
 public:
  ModuleList() = default;
  ModuleList(std::initializer_list<M> modules) {
    for (const M& m : modules) push_back(m);
  }
  void push_back(const M& module) {
    modules_.push_back(std::make_shared<M>(module));
    this->set_name(*modules_.back(), std::to_string(modules_.size() - 1));
  }
  std::size_t size() const { return modules_.size(); }
  /// Module number `i`, which must be there.
  const M& operator[](std::size_t i) const { return *modules_.at(i); }

  /// Iterates over the modules.
  class Iterator {
   public:
    explicit Iterator(const std::shared_ptr<M>* at) : at_(at) {}
    const M& operator*() const { return **at_; }
    Iterator& operator++() {
      ++at_;
      return *this;
    }
    bool operator!=(const Iterator& other) const { return at_ != other.at_; }

   private:
    const std::shared_ptr<M>* at_;
  };
  Iterator begin() const { return Iterator(modules_.data()); }
  Iterator end() const { return Iterator(modules_.data() + modules_.size()); }

  std::string kind() const override { return "ModuleList"; }
  void unshare() override {
    ModuleBase::unshare();
    for (auto& module : modules_) {
      module = std::make_shared<M>(std::as_const(*module));
      module->unshare();
    }
  }

 protected:
  std::vector<std::pair<std::string, ModuleBase*>> held() const override {
    std::vector<std::pair<std::string, ModuleBase*>> result;
    for (const auto& module : modules_) result.emplace_back(module->name(), module.get());
    return result;
  }

 private:
  std::vector<std::shared_ptr<M>> modules_;
};

}  // namespace halfstep::nn
