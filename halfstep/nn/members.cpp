// SPDX-License-Identifier: Apache-2.0
// Finds what a network's author forgot to register: it would compute, but never be trained, moved or saved.
#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/nn/members_internal.h"
#include "halfstep/runtime/log.h"

namespace halfstep::nn {
namespace {

// The type of a module as its author wrote it.
std::string type_of(const ModuleBase& module) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(typeid(module).name(), nullptr, nullptr, &status), &std::free);
  std::string text = status == 0 ? name.get() : module.kind();
  for (const std::string_view part : {"(anonymous namespace)::", "halfstep::"}) {
    for (std::size_t at; (at = text.find(part)) != std::string::npos;) text.erase(at, part.size());
  }
  return text;
}
std::string named(const ModuleBase& module) {
  const std::string type = type_of(module), inside = module.describe();
  return inside.empty() ? type : type + "(" + inside + ")";
}

}  // namespace

ModuleBase::Members& ModuleBase::living() {
  static Members& members = *new Members;  // modules of static storage may outlive it
  return members;
}

Parameter::Parameter() { ModuleBase::living().parameters.add(this); }
Parameter::Parameter(const Parameter& other) : Tensor(other) { ModuleBase::living().parameters.add(this); }
Parameter::Parameter(Parameter&& other) noexcept : Tensor(std::move(other)) {
  ModuleBase::living().parameters.add(this);
}
Parameter::~Parameter() { ModuleBase::living().parameters.remove(this); }

// Whether it makes a difference that train(), to(), parameters() and state_dict() reach it.
bool ModuleBase::matters() const {
  if (depends_on_mode() || state_->precision.get() != nullptr) return true;
  NamedTensors tensors;
  collect("", true, true, tensors);
  if (!tensors.empty()) return true;
  for (const auto& [name, module] : children()) {
    if (module->matters()) return true;
  }
  return false;
}

bool ModuleBase::contains(const ModuleBase& module) const {
  if (state_ == module.state_) return true;
  for (const auto& [name, inner] : children()) {
    if (inner->contains(module)) return true;
  }
  return false;
}

// Inner modules first: the error then names the one whose author has to mend it.
void ModuleBase::check_members() const {
  for (const auto& [name, module] : children()) {
    if (!module->state_->checked.load(std::memory_order_relaxed)) module->check_members();
  }
  check_own_members();
  state_->checked.store(true, std::memory_order_relaxed);
}

void ModuleBase::check_own_members() const {
  const std::size_t size = extent();
  if (size == 0) return;
  const void* object = dynamic_cast<const void*>(this);
  // What is registered lies here too, and so do its own members.
  std::vector<const void*> known;
  NamedTensors listed;
  const std::function<void(const ModuleBase&)> note = [&](const ModuleBase& module) {
    known.push_back(&module);
    for (const Entry& e : *module.entries_) {
      if (e.kind != Kind::child) known.push_back(&module.tensor_at(e));
    }
    for (const auto& [name, inner] : module.children()) note(*inner);
  };
  note(*this);
  std::sort(known.begin(), known.end(), std::less<>());
  const auto is_known = [&](const void* place) {
    return std::binary_search(known.begin(), known.end(), place, std::less<>());
  };
  // The members are not known by name, but those beside them are.
  const auto beside = [&](const void* place) {
    const Entry* last = nullptr;
    for (const Entry& e : *entries_) {
      const void* own = member_at(e);
      if (own < place && (!last || own > member_at(*last))) last = &e;
    }
    return last ? fmt::format("after '{}'", last->name) : std::string("before all that are registered");
  };
  for (const ModuleBase* module : living().modules.within(object, size)) {
    // Another handle on something registered is no mistake.
    if (is_known(module) || !module->matters() || contains(*module)) continue;
    fail<Error>(
        "module: {} has a member {} ({}) that was never registered, so it is not trained, moved or saved; write `= "
        "child(\"name\", ...)` where it is made, or keep it behind a std::shared_ptr if it isn't part of the network",
        type_of(*this), named(*module), beside(module));
  }
  collect("", true, true, listed);
  for (const Parameter* parameter : living().parameters.within(object, size)) {
    if (is_known(parameter) || !parameter->defined()) continue;
    const bool inside_a_module = std::any_of(
        listed.begin(), listed.end(), [&](const NamedTensor& t) { return t.tensor.impl() == parameter->impl(); });
    if (inside_a_module) continue;
    fail<Error>(
        "module: {} has a Parameter or Buffer {} {} ({}) that was never registered, so it is not trained, moved or "
        "saved; write `= parameter(\"name\", tensor)` or `= buffer(\"name\", tensor)` where it is made",
        type_of(*this), halfstep::name(parameter->dtype()), parameter->sizes().str(), beside(parameter));
  }
}

// A module that is called by another one's forward(), but isn't in it: behind a pointer or in a std::vector, say.
void ModuleBase::check_place(const Scope& caller) const {
  if (!GradMode::is_enabled()) return;
  const Scope* outermost = &caller;
  bool found = false;
  for (const Scope* scope = &caller; scope && !found; scope = scope->outer_) {
    outermost = scope;
    found = scope->module_.contains(*this);
  }
  state_->placed.store(true, std::memory_order_relaxed);
  // A wrapper without weights of its own leaves the choice of parameters to the program.
  if (found || trainable_parameters().empty() || outermost->module_.trainable_parameters().empty()) return;
  const std::string root = type_of(outermost->module_), self = named(*this);
  log_once(LogLevel::warning, "unregistered module " + root + "/" + self,
           fmt::format("{0} is called inside of {1} but isn't registered in it, so {1}'s parameters() don't list its "
                       "weights and an optimizer over them doesn't train it; register it with child(), or hold several "
                       "in nn::ModuleList or nn::Sequential",
                       self, root));
}

}  // namespace halfstep::nn
