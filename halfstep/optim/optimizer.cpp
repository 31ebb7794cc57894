// SPDX-License-Identifier: Apache-2.0
#include "halfstep/optim/optimizer.h"

#include <algorithm>
#include <set>
#include <utility>

#include "halfstep/amp/cast_cache.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/recorder.h"
#include "halfstep/optim/flag_internal.h"
#include "halfstep/runtime/log.h"

namespace halfstep::optim {

Optimizer::~Optimizer() {
  ++capture_generation();
  for (const NamedTensor& p : all_) amp::keep_copy(p.tensor, false);
}

int Optimizer::add_group(const NamedTensors& parameters, double lr) {
  if (!(lr >= 0)) fail<Error>("{}: expected a learning rate of at least 0, got {}", kind(), lr);
  if (all_.empty() && parameters.empty()) {
    fail<Error>(
        "{}: expected parameters to train, got none; are the network's members registered with child() and "
        "parameter()?",
        kind());
  }
  ++capture_generation();
  std::set<const TensorImpl*> known;
  for (const NamedTensor& p : all_) known.insert(p.tensor.impl());
  for (const NamedTensor& p : parameters) {
    check_defined(p.tensor, kind().c_str(), "a parameter");
    check_floating(p.tensor, kind().c_str());
    if (!p.tensor.is_leaf()) {
      fail<Error>("{}: expected leaves, but {} {} is the result of an op", kind(), p.name, p.tensor.sizes().str());
    }
    if (!p.tensor.is_contiguous(MemoryFormat::preserve)) {
      fail<Error>("{}: expected dense parameters, got {} {} with strides {}", kind(), p.name, p.tensor.sizes().str(),
                  p.tensor.strides().str());
    }
    if (!known.insert(p.tensor.impl()).second) fail<Error>("{}: parameter {} is listed twice", kind(), p.name);
  }
  Group group{.parameters = {}, .lr = lr, .base_lr = {}, .steps = {}};
  for (const NamedTensor& p : parameters) {
    group.parameters.push_back(all_.size());
    all_.push_back(p);
    slots_.emplace_back();
    amp::keep_copy(p.tensor, true);
  }
  const Device device = parameters.empty() ? Device{} : parameters[0].tensor.device();
  group.steps = zeros({static_cast<std::int64_t>(parameters.size())}, {.dtype = i64, .device = device});
  groups_.push_back(std::move(group));
  return static_cast<int>(groups_.size()) - 1;
}

// State is made at a parameter's first gradient.
void Optimizer::prepare(Group&, std::size_t parameter, std::size_t count) {
  Slot& slot = slots_[parameter];
  const Tensor& p = all_[parameter].tensor;
  const DType state_dtype = accumulate_dtype(p.dtype());
  if (slot.tensors.size() != count) slot.tensors.resize(count);
  for (Tensor& t : slot.tensors) {
    if (!t.defined()) {
      t = empty_like(p, state_dtype);
      t.zero_();
    }
  }
  if (!is_low_precision(p.dtype())) return;
  if (low_precision_ == LowPrecision::master_weights && !slot.master.defined()) {
    slot.master = cast_unrecorded(p, DType::f32);
    slot.storage_id = p.storage()->id();
    slot.contents = p.storage()->contents();
  } else if (low_precision_ == LowPrecision::kahan && !slot.compensation.defined()) {
    slot.compensation = empty_like(p);
    slot.compensation.zero_();
  }
}

// A parameter that others wrote since the last step (weights that were loaded, or put back) is its own master weight
// from here on. A holder of its address may have written to it; that shows where it isn't the rounded master weight.
void Optimizer::follow(std::size_t parameter) {
  Slot& slot = slots_[parameter];
  const Tensor& p = all_[parameter].tensor;
  const Storage& s = *p.storage();
  if (!slot.master.defined() || (!s.address_held() && slot.storage_id == s.id() && slot.contents == s.contents())) {
    return;
  }
  const CapturePause pause;
  const NoGrad no_grad;
  const AutocastOff autocast_off;
  const Tensor now = p.detach();
  slot.master.copy_(
      where(eq(cast_unrecorded(slot.master, p.dtype()), now), slot.master, cast_unrecorded(now, DType::f32)));
}

// The kernel has rounded the master weights of these to them.
void Optimizer::rounded(const std::vector<std::size_t>& parameters) {
  for (std::size_t i : parameters) {
    const Storage& s = *all_[i].tensor.storage();
    slots_[i].storage_id = s.id();
    slots_[i].contents = s.contents();
  }
}

// Kernel of all optimizers. in: hyper (f64: lr, stochastic rounding or not), random state (i64: seed, offset), unless,
// scale of the gradients (absent: 1), then for each parameter its gradient (absent: left). out: steps, then for each
// parameter: itself, its master weight, its compensation, its 16-bit copy, its unscaled gradient (with scale), its
// state tensors.
void Optimizer::update_group(int g, const std::vector<Tensor>& gradients, const Tensor& unless, const Tensor& scale) {
  Group& group = groups_[static_cast<std::size_t>(g)];
  const std::size_t count = state_names(g).size();
  std::vector<Tensor> held;  // contiguous gradients and copies
  held.reserve(3 * group.parameters.size());
  static const Tensor none;
  const Device device = group.steps.device();
  const bool stochastic = low_precision_ == LowPrecision::stochastic_rounding;
  const Tensor hyper = host_numbers<double>(2, device, [this, g, stochastic](double* numbers) {
    numbers[0] = groups_[static_cast<std::size_t>(g)].lr;
    numbers[1] = stochastic ? 1 : 0;
  });
  std::uint64_t elements = 0;
  std::vector<const Tensor*> in{&hyper, &none, &unless, &scale}, out{&group.steps};
  std::vector<std::size_t> copied, with_master;
  std::vector<std::pair<std::size_t, const Tensor*>> unscaled;
  bool any = false;
  DType dtype = DType::f32;
  for (std::size_t i : group.parameters) {
    const Tensor& p = all_[i].tensor;
    const Tensor* gradient = &gradients[i];
    if (gradient->defined()) {
      if (gradient->sizes() != p.sizes()) {
        fail<ShapeError>("{}: expected a gradient of {} for {}, got {}", kind(), p.sizes().str(), all_[i].name,
                         gradient->sizes().str());
      }
      prepare(group, i, count);
      if (slots_[i].master.defined()) {
        follow(i);
        with_master.push_back(i);
      }
      if (gradient->strides() != p.strides()) {
        Tensor laid_out = empty_like(p, gradient->dtype());
        copy_unrecorded(laid_out, *gradient);
        held.push_back(laid_out);
        gradient = &held.back();
      }
      any = true;
      if (p.dtype() == DType::f64) dtype = DType::f64;
      elements += static_cast<std::uint64_t>(p.numel());
    }
    in.push_back(gradient);
    const Slot& slot = slots_[i];
    out.push_back(&p);
    out.push_back(&slot.master);
    out.push_back(&slot.compensation);
    held.push_back(gradient->defined() ? amp::kept_copy(p) : Tensor());
    if (held.back().defined()) copied.push_back(i);
    out.push_back(&held.back());
    if (scale.defined() && gradient->defined()) {
      // An unscaled f16 gradient may underflow or, for scales under 1, overflow: float32 holds it.
      held.push_back(gradient->dtype() == DType::f16 ? empty_like(*gradient, DType::f32) : *gradient);
      out.push_back(&held.back());
      unscaled.emplace_back(i, &held.back());
    } else {
      out.push_back(&none);
    }
    for (std::size_t k = 0; k < count; ++k) out.push_back(gradient->defined() ? &slot.tensors[k] : &none);
  }
  if (!any) return;
  Tensor random;
  if (stochastic) {
    // One block of four words for four elements.
    random = host_numbers<std::int64_t>(2, device,
                                        [blocks = elements / 4 + group.parameters.size() + 1](std::int64_t* numbers) {
                                          const PhiloxState state = default_generator().reserve(blocks);
                                          numbers[0] = static_cast<std::int64_t>(state.seed);
                                          numbers[1] = static_cast<std::int64_t>(state.offset);
                                        });
    in[1] = &random;
  }
  const std::span<const std::byte> rule = attributes(g);
  run_kernel(*kernel(), kernel_name(), device, dtype, in, out, rule.data(), rule.size(), true);
  for (std::size_t i : group.parameters) {
    if (gradients[i].defined()) all_[i].tensor.storage()->bump_version();
  }
  for (std::size_t i : copied) amp::copy_written(all_[i].tensor);
  rounded(with_master);
  if (KernelRecorder* recorder = kernel_recorder(); recorder && !(copied.empty() && with_master.empty())) [[unlikely]] {
    recorder->before([this, with_master] {
      for (std::size_t i : with_master) follow(i);
      return true;
    });
    recorder->host([this, copied, with_master] {
      for (std::size_t i : copied) amp::copy_written(all_[i].tensor);
      rounded(with_master);
    });
  }
  for (const auto& [i, gradient] : unscaled) {
    gradient->storage()->bump_version();
    if (!gradients[i].is_same(*gradient)) all_[i].tensor.set_grad(*gradient);
  }
}

void Optimizer::update(const std::vector<Tensor>& gradients, const Tensor& unless) {
  update_groups(gradients, unless, {});
}

void Optimizer::update_groups(const std::vector<Tensor>& gradients, const Tensor& unless, const Tensor& scale) {
  const NoGrad no_grad;
  if (!sharding_) {
    for (int g = 0; g < num_groups(); ++g) update_group(g, gradients, unless, scale);
    return;
  }
  std::vector<Tensor> own = gradients;
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (!sharding_->owns(all_[i].tensor)) own[i] = Tensor();
  }
  for (int g = 0; g < num_groups(); ++g) update_group(g, own, unless, scale);
  sharding_->updated(*this);
}

void Optimizer::share(amp::GradientFindings& found) {
  if (sharding_) sharding_->share(*this, found);
}

void Optimizer::shard(std::shared_ptr<StateSharding> sharding) {
  if (sharding_) fail<Error>("{}: its state is sharded already", kind());
  if (!can_be_sharded()) fail<Error>("{}: its steps need the whole state, which can't be sharded", kind());
  if (low_precision_ == LowPrecision::stochastic_rounding) {
    fail<Error>(
        "{}: stochastic rounding draws one sequence of random numbers for all parameters, so that its state "
        "can't be sharded; use master weights or kahan",
        kind());
  }
  sharding_ = std::move(sharding);
  ++capture_generation();
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (sharding_->owns(all_[i].tensor)) continue;
    slots_[i] = {};
    // Nobody here rewrites the 16-bit copy.
    amp::keep_copy(all_[i].tensor, false);
  }
}

void Optimizer::step_unless(const Tensor& found_inf, const Tensor& scale) {
  std::vector<Tensor> gradients;
  gradients.reserve(all_.size());
  bool any = false;
  for (const NamedTensor& p : all_) {
    gradients.push_back(p.tensor.grad());
    any |= gradients.back().defined() || p.tensor.requires_grad();
  }
  if (!any) [[unlikely]] {
    log_once(LogLevel::warning, "nothing to train " + kind() + " " + all_[0].name,
             fmt::format("{}: none of the {} parameters requires grad ({} {}, ...), so that step() changes none; call "
                         "requires_grad_() on those to train",
                         kind(), all_.size(), all_[0].name, all_[0].tensor.sizes().str()));
  }
  if (!scale.defined()) return update(gradients, found_inf);
  update_groups(gradients, found_inf, scale);
}

void Optimizer::step(const std::vector<Tensor>& gradients, const StepOptions& options) {
  if (gradients.size() != all_.size()) {
    fail<Error>("{}: expected {} gradients, one for each parameter, got {}", kind(), all_.size(), gradients.size());
  }
  if (all_.empty()) return;
  update(gradients, step_flag(options.unless, all_[0].tensor.device(), kind(), "unless"));
}

Tensor Optimizer::step_closure(const std::function<Tensor()>& closure) {
  const EnableGrad on;
  const Tensor loss = closure();
  step_unless({}, {});
  return loss;
}

void Optimizer::zero_grad(bool set_to_none) {
  const NoGrad no_grad;
  for (const NamedTensor& p : all_) {
    if (set_to_none) {
      p.tensor.set_grad({});
    } else if (Tensor g = p.tensor.grad(); g.defined()) {
      g.detach().zero_();
    }
  }
}

double Optimizer::lr(int group) const { return groups_.at(static_cast<std::size_t>(group)).lr; }
void Optimizer::set_lr(double lr) {
  for (int g = 0; g < num_groups(); ++g) set_lr(g, lr);
}
void Optimizer::set_lr(int group, double lr) {
  if (!(lr >= 0)) fail<Error>("{}: expected a learning rate of at least 0, got {}", kind(), lr);
  if (CaptureSink* sink = capture_sink()) [[unlikely]]
    sink->refuse("it sets a learning rate; do that between steps, or by a Schedule");
  groups_.at(static_cast<std::size_t>(group)).lr = lr;
}
double Optimizer::base_lr(int group) {
  Group& g = groups_.at(static_cast<std::size_t>(group));
  if (!g.base_lr) g.base_lr = g.lr;
  return *g.base_lr;
}
double Optimizer::momentum(int) const { fail<Error>("{}: has no momentum", kind()); }
void Optimizer::set_momentum(int, double) { fail<Error>("{}: has no momentum", kind()); }

NamedTensors Optimizer::state_of(std::size_t parameter) const {
  NamedTensors tensors;
  const Slot& slot = slots_.at(parameter);
  const std::string prefix = all_[parameter].name + ".";
  const auto add = [&](const std::string& name, const Tensor& t) {
    if (t.defined()) tensors.push_back({prefix + name, t.detach()});
  };
  for (int g = 0; g < num_groups() && !slot.tensors.empty(); ++g) {
    const auto& own = groups_[static_cast<std::size_t>(g)].parameters;
    if (std::find(own.begin(), own.end(), parameter) == own.end()) continue;
    const auto names = state_names(g);
    for (std::size_t k = 0; k < slot.tensors.size(); ++k) add(names[k], slot.tensors[k]);
  }
  add("master", slot.master);
  add("compensation", slot.compensation);
  return tensors;
}

OptimizerState Optimizer::state_of_groups() const {
  OptimizerState state;
  for (int g = 0; g < num_groups(); ++g) {
    const Group& group = groups_[static_cast<std::size_t>(g)];
    const std::string prefix = fmt::format("group{}.", g);
    state.numbers[prefix + "lr"] = group.lr;
    for (const auto& [key, value] : numbers(g)) state.numbers[prefix + key] = value;
    state.tensors.push_back({prefix + "steps", group.steps.detach()});
  }
  return state;
}

OptimizerState Optimizer::state_dict() const {
  if (sharding_) return sharding_->whole_state(*this);
  OptimizerState state = state_of_groups();
  const NamedTensors steps = std::exchange(state.tensors, {});
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    state.tensors.push_back(steps[g]);
    for (const std::size_t i : groups_[g].parameters) {
      for (NamedTensor& t : state_of(i)) state.tensors.push_back(std::move(t));
    }
  }
  return state;
}

void Optimizer::load_state_dict(const OptimizerState& state) {
  const NoGrad no_grad;
  std::map<std::string, Tensor> given;
  for (const NamedTensor& t : state.tensors) given.emplace(t.name, t.tensor);
  const auto take = [&](const std::string& name, const Shape& sizes, Device device) {
    const auto it = given.find(name);
    if (it == given.end()) return Tensor();
    if (it->second.sizes() != sizes) {
      fail<ShapeError>("{}: expected {} {}, got {}", kind(), name, sizes.str(), it->second.sizes().str());
    }
    Tensor t = it->second.to(device, {.copy = true});  // a file's tensors are on the CPU
    given.erase(it);
    return t;
  };
  // The options first: which tensors a parameter has follows from them. All is read before anything is changed, and
  // where something doesn't fit, the options go back.
  std::vector<std::map<std::string, double>> before, given_numbers;
  for (int g = 0; g < num_groups(); ++g) {
    const std::string prefix = fmt::format("group{}.", g);
    before.push_back(numbers(g));
    given_numbers.emplace_back();
    for (const auto& [key, value] : state.numbers) {
      if (key.starts_with(prefix)) given_numbers.back()[key.substr(prefix.size())] = value;
    }
    if (!given_numbers.back().contains("lr")) fail<Error>("{}: the state has no '{}lr'", kind(), prefix);
  }
  std::vector<Slot> slots(slots_.size());
  std::vector<Tensor> steps;
  try {
    for (int g = 0; g < num_groups(); ++g) {
      const Group& group = groups_[static_cast<std::size_t>(g)];
      const std::string prefix = fmt::format("group{}.", g);
      steps.push_back(take(prefix + "steps", group.steps.sizes(), group.steps.device()));
      if (!steps.back().defined()) {
        fail<Error>("{}: the state has no '{}steps'; is it of another optimizer?", kind(), prefix);
      }
      load_numbers(g, given_numbers[static_cast<std::size_t>(g)]);
      for (std::size_t i : group.parameters) {
        const Shape& sizes = all_[i].tensor.sizes();
        const Device device = all_[i].tensor.device();
        bool any = false;
        for (const std::string& name : state_names(g)) {
          slots[i].tensors.push_back(take(all_[i].name + "." + name, sizes, device));
          any |= slots[i].tensors.back().defined();
        }
        if (!any) slots[i].tensors.clear();
        slots[i].master = take(all_[i].name + ".master", sizes, device);
        slots[i].compensation = take(all_[i].name + ".compensation", sizes, device);
        if (sharding_ && !sharding_->owns(all_[i].tensor)) slots[i] = {};
      }
    }
    if (!given.empty()) {
      fail<Error>("{}: the state has '{}', which belongs to no parameter here", kind(), given.begin()->first);
    }
  } catch (...) {
    for (int g = 0; g < num_groups(); ++g) load_numbers(g, before[static_cast<std::size_t>(g)]);
    throw;
  }
  slots_ = std::move(slots);
  ++capture_generation();
  for (int g = 0; g < num_groups(); ++g) {
    Group& group = groups_[static_cast<std::size_t>(g)];
    group.steps = steps[static_cast<std::size_t>(g)];
    group.lr = given_numbers[static_cast<std::size_t>(g)].at("lr");
  }
  if (sharding_) sharding_->state_replaced();
}

}  // namespace halfstep::optim
