// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/module.h"

#include <cmath>
#include <map>
#include <new>
#include <ostream>
#include <set>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/autograd/node.h"
#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"
#include "halfstep/nn/members_internal.h"
#include "halfstep/nn/weight_only_internal.h"

namespace halfstep::nn {
namespace {

// What child() says just before it makes the member, for the member's base to find.
struct Announced {
  ModuleBase* parent = nullptr;
  std::string name;
};
Announced& announced() {
  thread_local Announced a;
  return a;
}

std::string joined(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

}  // namespace

// What was registered last outside of its parent: a temporary that is about to be assigned to a member. The parent
// itself may be gone, if another thread ended it.
struct ModuleBase::Registered {
  const ModuleBase* parent = nullptr;
  const void* member = nullptr;
  std::weak_ptr<std::vector<Entry>> entries = {};
};

ModuleBase::Registered& ModuleBase::registered() {
  thread_local Registered r;
  return r;
}

Parameter::Parameter(ModuleBase* owner, std::string_view name, Tensor tensor, bool buffer) : Tensor(std::move(tensor)) {
  ModuleBase::living().parameters.add(this);
  if (defined() && !buffer && is_leaf()) requires_grad_();
  owner->add(name, this, buffer ? ModuleBase::Kind::buffer : ModuleBase::Kind::parameter);
}

Parameter& Parameter::operator=(Parameter&& other) {
  ModuleBase::take_place(&other, this);
  return *this = static_cast<Tensor&&>(other);
}

ModuleBase::ModuleBase() : entries_(std::make_shared<std::vector<Entry>>()), state_(std::make_shared<State>()) {
  living().modules.add(this);
}

ModuleBase::ModuleBase(const ModuleBase& other) : entries_(other.entries_), state_(other.state_), name_(other.name_) {
  living().modules.add(this);
  if (ModuleBase* parent = std::exchange(announced().parent, nullptr)) {
    name_ = std::move(announced().name);
    parent->add(name_, this, Kind::child);
  }
}

ModuleBase& ModuleBase::operator=(const ModuleBase& other) {
  // The place in the parent, and so the name, stays.
  entries_ = other.entries_;
  state_ = other.state_;
  return *this;
}

ModuleBase& ModuleBase::operator=(ModuleBase&& other) {
  if (take_place(&other, this)) name_ = other.name_;
  return *this = static_cast<const ModuleBase&>(other);
}

ModuleBase::~ModuleBase() {
  living().modules.remove(this);
  if (Registered& last = registered(); last.parent == this || last.member == this) last = {};
}

void ModuleBase::announce(std::string name) { announced() = {this, std::move(name)}; }

void ModuleBase::add(std::string_view name, const void* member, Kind kind) {
  if (name.empty() || name.find('.') != std::string_view::npos) {
    fail<Error>("module: expected a name without dots, got '{}'", name);
  }
  for (const Entry& e : *entries_) {
    if (e.name == name) fail<Error>("module: there are two members called '{}'", name);
  }
  const std::ptrdiff_t offset = static_cast<const char*>(member) - reinterpret_cast<const char*>(this);
  entries_->push_back({std::string(name), offset, kind});
  if (is_outside(offset)) registered() = {this, member, entries_};
}

// Corrects the address of what was registered as a temporary; false for every other assignment.
bool ModuleBase::take_place(const void* temporary, const void* member) {
  if (registered().member != temporary) return false;
  const Registered last = std::exchange(registered(), {});
  const auto entries = last.entries.lock();
  if (!entries) return false;
  const auto offset = [&](const void* p) {
    return static_cast<const char*>(p) - reinterpret_cast<const char*>(last.parent);
  };
  for (Entry& e : *entries) {
    if (e.offset == offset(temporary)) e.offset = offset(member);
  }
  return true;
}

bool ModuleBase::is_outside(std::ptrdiff_t offset) const {
  const char* object = static_cast<const char*>(dynamic_cast<const void*>(this));
  const std::ptrdiff_t from_start = reinterpret_cast<const char*>(this) + offset - object;
  const std::size_t size = extent();
  return size == 0 || from_start < 0 || static_cast<std::size_t>(from_start) >= size;
}

char* ModuleBase::member_at(const Entry& entry) const {
  if (extent() != 0 && is_outside(entry.offset)) {
    fail<Error>("module: '{}' was registered but is no member of the {}: expected what {} returns to be a member{}",
                entry.name, kind(), entry.kind == Kind::child ? "child()" : "parameter() or buffer()",
                entry.kind == Kind::child ? "" : ", an nn::Parameter; did you declare it as a Tensor?");
  }
  return const_cast<char*>(reinterpret_cast<const char*>(this)) + entry.offset;
}
Parameter& ModuleBase::tensor_at(const Entry& entry) const { return *reinterpret_cast<Parameter*>(member_at(entry)); }
ModuleBase& ModuleBase::child_at(const Entry& entry) const { return *reinterpret_cast<ModuleBase*>(member_at(entry)); }

std::vector<std::pair<std::string, const ModuleBase*>> ModuleBase::children() const {
  std::vector<std::pair<std::string, const ModuleBase*>> result;
  for (const Entry& e : *entries_) {
    if (e.kind == Kind::child) result.emplace_back(e.name, &child_at(e));
  }
  for (const auto& [name, module] : held()) result.emplace_back(name, module);
  for (const auto& module : state_->attached) result.emplace_back(module->name(), module.get());
  return result;
}

// PyTorch's order: a module's own parameters, its buffers, then the modules inside.
void ModuleBase::collect(const std::string& prefix, bool parameters, bool buffers, NamedTensors& into) const {
  for (const Kind kind : {Kind::parameter, Kind::buffer}) {
    if (!(kind == Kind::parameter ? parameters : buffers)) continue;
    for (const Entry& e : *entries_) {
      if (e.kind != kind) continue;
      const Parameter& tensor = tensor_at(e);
      if (tensor.defined()) into.push_back({joined(prefix, e.name), tensor});
    }
  }
  for (const auto& [name, module] : children()) module->collect(joined(prefix, name), parameters, buffers, into);
}

NamedTensors ModuleBase::parameters() const {
  if (!state_->checked.load(std::memory_order_relaxed)) check_members();
  NamedTensors all, result;
  collect("", true, false, all);
  std::set<const TensorImpl*> seen;
  for (NamedTensor& p : all) {
    if (seen.insert(p.tensor.impl()).second) result.push_back(std::move(p));
  }
  return result;
}

NamedTensors ModuleBase::trainable_parameters() const {
  NamedTensors result;
  for (NamedTensor& p : parameters()) {
    if (p.tensor.requires_grad()) result.push_back(std::move(p));
  }
  return result;
}

NamedTensors ModuleBase::buffers() const {
  if (!state_->checked.load(std::memory_order_relaxed)) check_members();
  NamedTensors result;
  collect("", false, true, result);
  return result;
}

NamedTensors ModuleBase::state_dict() const {
  if (!state_->checked.load(std::memory_order_relaxed)) check_members();
  NamedTensors result;
  collect("", true, true, result);
  return result;
}

namespace {

// Counters and the like: cast, a NaN would become some whole number.
void check_whole(const Tensor& to, const NamedTensor& from) {
  if (is_floating(to.dtype()) || !is_floating(from.tensor.dtype())) return;
  for (const double value : from.tensor.to_vector<double>()) {
    if (value == std::floor(value) && std::fabs(value) <= 0x1p53) continue;
    fail<Error>("load_state_dict: expected whole numbers for {} ({}), got {}", from.name, name(to.dtype()), value);
  }
}

}  // namespace

LoadReport ModuleBase::load_state_dict(const NamedTensors& state, bool strict) const {
  std::map<std::string, Tensor> given;
  for (const NamedTensor& t : state) {
    if (!given.emplace(t.name, t.tensor).second) fail<Error>("load_state_dict: '{}' is there twice", t.name);
  }
  LoadReport report;
  std::vector<std::pair<Tensor, Tensor>> copies;
  for (const NamedTensor& own : state_dict()) {
    const auto it = given.find(own.name);
    if (it == given.end()) {
      report.missing.push_back(own.name);
      continue;
    }
    check_defined(it->second, "load_state_dict", own.name.c_str());
    if (it->second.sizes() != own.tensor.sizes()) {
      fail<ShapeError>("load_state_dict: expected {} {}, got {}", own.name, own.tensor.sizes().str(),
                       it->second.sizes().str());
    }
    check_whole(own.tensor, {own.name, it->second});
    copies.emplace_back(own.tensor, it->second);
    given.erase(it);
  }
  for (const auto& [name, tensor] : given) report.unexpected.push_back(name);
  if (strict && (!report.missing.empty() || !report.unexpected.empty())) {
    fail<Error>("load_state_dict: the state is of another network: missing [{}], unexpected [{}]",
                fmt::join(report.missing, ", "), fmt::join(report.unexpected, ", "));
  }
  const NoGrad no_grad;
  for (auto& [to, from] : copies) to.copy_(from);
  return report;
}

void ModuleBase::apply(const std::function<void(const std::string&, const ModuleBase&)>& function) const {
  const std::function<void(const std::string&, const ModuleBase&)> visit = [&](const std::string& path,
                                                                               const ModuleBase& module) {
    function(path, module);
    for (const auto& [name, inner] : module.children()) visit(joined(path, name), *inner);
  };
  visit("", *this);
}

const ModuleBase& ModuleBase::train(bool on) const {
  bool changed = false;
  apply([&](const std::string&, const ModuleBase& m) { changed |= std::exchange(m.state_->training, on) != on; });
  if (changed) ++capture_generation();
  return *this;
}
bool ModuleBase::is_training() const { return state_->training; }

void ModuleBase::requires_grad_(bool on) const {
  for (NamedTensor& p : parameters()) {
    if (p.tensor.is_floating()) p.tensor.requires_grad_(on);
  }
}

void ModuleBase::zero_grad() const {
  for (const NamedTensor& p : parameters()) p.tensor.set_grad({});
}

const ModuleBase& ModuleBase::to(DType dtype) const {
  if (!is_floating(dtype)) fail<DTypeError>("module.to: expected a floating dtype, got {}", halfstep::name(dtype));
  const NoGrad no_grad;
  // Running statistics would stall in 16 bits: a small step on a large value is rounded away.
  for (const NamedTensor& t : is_low_precision(dtype) || is_float8(dtype) ? parameters() : state_dict()) {
    if (t.tensor.is_floating() && t.tensor.dtype() != dtype) replace_contents(t.tensor, t.tensor.to(dtype));
  }
  return *this;
}

const ModuleBase& ModuleBase::to(Device device) const {
  const NoGrad no_grad;
  for (const NamedTensor& t : state_dict()) {
    if (t.tensor.device() != device) replace_contents(t.tensor, t.tensor.to(device));
  }
  return *this;
}

const ModuleBase& ModuleBase::to(MemoryFormat format) const {
  if (format == MemoryFormat::preserve) fail<Error>("module.to: expected contiguous or channels_last, got preserve");
  const NoGrad no_grad;
  for (const NamedTensor& t : state_dict()) {
    if (t.tensor.dim() == 4 && !t.tensor.is_contiguous(format)) {
      replace_contents(t.tensor, t.tensor.detach().contiguous(format));
    }
  }
  return *this;
}

Tensor ModuleBase::own_tensor(std::string_view name) const {
  for (const Entry& e : *entries_) {
    if (e.name == name && e.kind != Kind::child) return tensor_at(e);
  }
  return {};
}

void ModuleBase::set_forward_guard(ForwardGuard guard) const {
  state_->forward_guard = std::move(guard);
  ++capture_generation();
}

void ModuleBase::attach(std::string name, std::shared_ptr<ModuleBase> module) const {
  if (name.empty() || !module)
    fail<Error>("attach: expected a name and a module, got {}", name.empty() ? "no name" : "no module");
  if (module->contains(*this))
    fail<Error>("attach: expected another module as '{}', got one that this one is in", name);
  const auto inside = children();
  const auto taken = [&](const auto& child) { return child.first == name; };
  if (own_tensor(name).defined() || std::any_of(inside.begin(), inside.end(), taken)) {
    fail<Error>("attach: expected a name that is free, got '{}'", name);
  }
  module->name_ = std::move(name);
  module->train(state_->training);
  state_->attached.push_back(std::move(module));
  ++capture_generation();
}
std::shared_ptr<ModuleBase> ModuleBase::attached(std::string_view name) const {
  for (const auto& module : state_->attached) {
    if (module->name() == name) return module;
  }
  return nullptr;
}
bool ModuleBase::remove_attached(std::string_view name) const {
  const bool removed = std::erase_if(state_->attached, [&](const auto& module) { return module->name() == name; }) > 0;
  if (removed) ++capture_generation();
  return removed;
}

std::vector<Tensor> ModuleBase::own_parameters() const {
  std::vector<Tensor> result;
  for (const Entry& e : *entries_) {
    if (e.kind == Kind::parameter && tensor_at(e).defined()) result.push_back(tensor_at(e));
  }
  return result;
}

void ModuleBase::unshare() {
  state_ = std::make_shared<State>(*state_);
  for (auto& module : state_->attached) {
    std::string name = module->name();
    module = module->copy();
    module->name_ = std::move(name);
    module->unshare();
  }
  const NoGrad no_grad;
  for (const Entry& e : *entries_) {
    if (e.kind == Kind::child) {
      child_at(e).unshare();
      continue;
    }
    Parameter& tensor = tensor_at(e);
    if (!tensor.defined()) continue;
    Tensor fresh = tensor.detach().clone();
    if (tensor.requires_grad()) fresh.requires_grad_();
    tensor = fresh;
  }
}

std::vector<std::pair<std::string, const amp::Castable*>> ModuleBase::castables() const {
  std::vector<std::pair<std::string, const amp::Castable*>> result;
  for (const auto& [name, module] : children()) result.emplace_back(name, module);
  return result;
}
amp::PrecisionSlot& ModuleBase::precision() const { return state_->precision; }

std::string ModuleBase::str_under(const std::string& around) const {
  const auto inner = children();
  const amp::ModulePrecision* own = state_->precision.get();
  const std::string& precision = own ? own->label : around;
  const std::string end = precision.empty() ? ")" : ") [" + precision + "]";
  std::string text = kind() + "(" + describe();
  if (inner.empty()) return text + end;
  text += "\n";
  for (const auto& [name, module] : inner) {
    std::string lines = module->str_under(precision);
    for (std::size_t at = 0; (at = lines.find('\n', at)) != std::string::npos; at += 3) lines.replace(at, 1, "\n  ");
    text += "  (" + name + "): " + lines + "\n";
  }
  return text + end;
}

std::ostream& operator<<(std::ostream& out, const ModuleBase& module) { return out << module.str(); }

ModuleBase::Scope::Scope(const ModuleBase& module)
    : module_(module),
      outer_(innermost_scope()),
      precision_(module.state_->precision.get()),
      float32_output_(module.state_->precision.float32_output()) {
  if (!module.state_->checked.load(std::memory_order_relaxed)) [[unlikely]]
    module.check_members();
  if (outer_ && !module.state_->placed.load(std::memory_order_relaxed)) [[unlikely]]
    module.check_place(*outer_);
  static_assert(sizeof(amp::ModuleScope) <= sizeof(storage_) && alignof(amp::ModuleScope) <= 8);
  new (storage_) amp::ModuleScope(module.name(), precision_);
  innermost_scope() = this;
  if (module.state_->forward_guard || !module.state_->attached.empty()) [[unlikely]]
    enter_guards();
}
ModuleBase::Scope::~Scope() {
  while (!guards_.empty()) guards_.pop_back();
  leave_scope();
}
void ModuleBase::Scope::enter_guards() {
  try {
    if (module_.state_->forward_guard) guards_.push_back(module_.state_->forward_guard());
    for (const auto& attached : module_.state_->attached) guards_.push_back(attached->around_forward(module_));
  } catch (...) {
    while (!guards_.empty()) guards_.pop_back();
    leave_scope();
    throw;
  }
}
void ModuleBase::Scope::leave_scope() {
  innermost_scope() = outer_;
  std::launder(reinterpret_cast<amp::ModuleScope*>(storage_))->~ModuleScope();
}
const ModuleBase::Scope*& ModuleBase::Scope::innermost_scope() {
  thread_local const Scope* innermost = nullptr;
  return innermost;
}

EvalMode::EvalMode(const ModuleBase& module) {
  module.apply([&](const std::string&, const ModuleBase& m) {
    if (m.state_->training) training_.push_back(m.state_);
  });
  for (const auto& state : training_) state->training = false;
  if (!training_.empty()) ++capture_generation();
}

EvalMode::~EvalMode() {
  for (const auto& state : training_) state->training = true;
  if (!training_.empty()) ++capture_generation();
}

void replace_contents(const Tensor& tensor, const Tensor& contents) {
  check_defined(tensor, "replace_contents", "a tensor");
  check_defined(contents, "replace_contents", "contents");
  if (tensor.sizes() != contents.sizes()) {
    fail<ShapeError>("replace_contents: expected {}, got {}", tensor.sizes().str(), contents.sizes().str());
  }
  detail::replace_tensor(tensor, contents);
}

void detail::replace_tensor(const Tensor& tensor, const Tensor& contents) {
  TensorImpl& to = *tensor.impl();
  const TensorImpl& from = *contents.impl();
  const bool fits = to.dtype == from.dtype && to.storage->device() == from.storage->device() && to.sizes == from.sizes;
  to.storage = from.storage;
  to.offset = from.offset;
  to.sizes = from.sizes;
  to.numel = from.numel;
  to.strides = from.strides;
  to.dtype = from.dtype;
  to.contiguous = from.contiguous;
  if (AutogradMeta* meta = autograd_meta_or_null(tensor)) {
    if (!fits) meta->grad = Tensor();
    // Nodes made from now on see the new dtype; the hooks of the old one go with it.
    if (meta->accumulator && !fits) meta->accumulator->outputs[0] = {to.sizes, to.dtype, to.storage->device()};
  }
}

}  // namespace halfstep::nn
