// SPDX-License-Identifier: Apache-2.0
#include "halfstep/amp/grad_scaler.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <map>

#include "halfstep/amp/unscale_internal.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/recorder.h"

namespace halfstep::amp {
namespace {

const KernelTable& check_kernels() {
  static const KernelTable& table = kernel_table("amp_check");
  return table;
}
using Misuse = ScalerError::Kind;
enum class Stage { ready, unscaled, stepped };

template <class... Args>
[[noreturn, gnu::cold]] void misuse(Misuse kind, fmt::format_string<Args...> format, Args&&... args) {
  throw ScalerError(kind, fmt::vformat(format, fmt::make_format_args(args...)));
}

// What the scaler knows of one optimizer since the last update.
struct OptimizerState {
  Stage stage = Stage::ready;
  Tensor found;          // f32 []: 0, or 1 once a gradient wasn't finite
  Tensor per_parameter;  // f32 [gradients]: the same for each
  Tensor norm;           // of the unscaled gradients, when it was asked for
  std::shared_ptr<const std::vector<std::string>> names;
};

[[noreturn, gnu::cold]] void no_gradients(const char* call) {
  misuse(Misuse::no_gradients,
         "{}: no parameter of the optimizer has a gradient; expected scaler.scale(loss).backward() before", call);
}

std::string parameter_name(const NamedTensor& p, std::size_t index) {
  if (!p.name.empty()) return p.name;
  return fmt::format("parameter {} {}", index, p.tensor.sizes().str());
}

// The bytes of a storage that a gradient lies in, gaps between its elements included.
struct Extent {
  std::uint64_t storage;  // its number
  std::int64_t begin, end;

  explicit Extent(const Tensor& gradient) : storage(gradient.storage()->id()) {
    std::int64_t first = gradient.storage_offset(), last = first;
    for (int d = 0; d < gradient.dim(); ++d) {
      const std::int64_t reach = (gradient.size(d) - 1) * gradient.stride(d);
      (reach < 0 ? first : last) += reach;
    }
    const auto size = static_cast<std::int64_t>(gradient.item_size());
    begin = first * size;
    end = gradient.numel() == 0 ? begin : (last + 1) * size;
  }
};

// Memory of gradients, each with the parameter whose it was first.
class Extents {
 public:
  // The parameter that has a byte of this one, if any.
  const std::string* owner_of(const Extent& e) const {
    if (e.begin == e.end) return nullptr;
    auto after = places_.lower_bound({e.storage, e.end});
    if (after == places_.begin()) return nullptr;
    const auto& [place, known] = *--after;
    return place.first == e.storage && known.end > e.begin ? &known.owner : nullptr;
  }
  void add(Extent e, std::string owner) {
    if (e.begin == e.end) return;
    // Those that it touches become one with it, so that no two overlap and the last before a place tells.
    for (auto at = places_.lower_bound({e.storage, e.end}); at != places_.begin();) {
      const auto& [place, known] = *--at;
      if (place.first != e.storage || known.end <= e.begin) break;
      e.begin = std::min(e.begin, place.second);
      e.end = std::max(e.end, known.end);
      owner = known.owner;
      at = places_.erase(at);
    }
    places_.insert_or_assign({e.storage, e.begin}, Known{e.end, std::move(owner)});
  }
  void clear() { places_.clear(); }

 private:
  struct Known {
    std::int64_t end;
    std::string owner;
  };
  std::map<std::pair<std::uint64_t, std::int64_t>, Known> places_;  // by storage and first byte
};

// What overflowed in a step: names of parameters, to be read only when they are wanted.
struct Findings {
  Tensor per_parameter;
  std::shared_ptr<const std::vector<std::string>> names;

  std::vector<std::string> overflows() const {
    std::vector<std::string> result;
    const auto flags = per_parameter.to_vector<float>();
    for (std::size_t i = 0; i < flags.size(); ++i) {
      if (flags[i] != 0) result.push_back((*names)[i]);
    }
    return result;
  }
};

std::string describe(const std::vector<Findings>& all) {
  constexpr std::size_t kSaid = 3;
  std::vector<std::string> names;
  for (const Findings& f : all) {
    for (std::string& name : f.overflows()) names.push_back(std::move(name));
  }
  const std::size_t said = std::min(names.size(), kSaid), more = names.size() - said;
  names.resize(said);
  return fmt::format("{}{}", fmt::join(names, ", "), more ? fmt::format(" and {} more", more) : "");
}

std::uint64_t next_serial() {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

LossScaleRules rules_of(const GradScalerOptions& o) {
  return {.init_scale = o.init_scale,
          .dynamic = o.dynamic,
          .growth_factor = o.growth_factor,
          .backoff_factor = o.backoff_factor,
          .growth_interval = o.growth_interval,
          .floor = o.floor,
          .cap = o.cap};
}

GradScalerOptions options_of(const LossScaleRules& r) {
  return {.init_scale = r.init_scale,
          .growth_factor = r.growth_factor,
          .backoff_factor = r.backoff_factor,
          .growth_interval = r.growth_interval,
          .enabled = true,
          .dynamic = r.dynamic,
          .floor = r.floor,
          .cap = r.cap};
}

// What is known of the gradients' magnitudes, f32 [gradients].
Tensor magnitude_bounds(const std::vector<Tensor>& gradients, Device device) {
  const auto count = static_cast<std::int64_t>(gradients.size());
  if (KernelRecorder* recorder = kernel_recorder()) [[unlikely]] {
    // In a replay the kernels before say it.
    std::vector<const float*> known;
    for (const Tensor& t : gradients) known.push_back(recorder->bound_of(t));
    return host_numbers<float>(count, device, [known = std::move(known)](float* bounds) {
      for (const float* bound : known) *bounds++ = bound ? *bound : std::numeric_limits<float>::infinity();
    });
  }
  std::vector<double> known;
  for (const Tensor& t : gradients) {
    const Storage& s = *t.storage();
    known.push_back(
        static_cast<double>(s.address_held() ? std::numeric_limits<float>::infinity() : s.magnitude_bound()));
  }
  return tensor(known, {count}, {.device = device});
}

// A disabled scaler has no use for them, whatever they are.
LossScalePolicy scale_policy(const GradScalerOptions& o) {
  if (o.enabled) return LossScalePolicy(rules_of(o));
  try {
    return LossScalePolicy(rules_of(o));
  } catch (const AmpError&) {
    return LossScalePolicy::torch();
  }
}

}  // namespace

OptimizerBase::OptimizerBase() : serial_(next_serial()) {}
OptimizerBase& OptimizerBase::operator=(const OptimizerBase& other) {
  if (this != &other) serial_ = next_serial();
  return *this;
}
OptimizerBase& OptimizerBase::operator=(OptimizerBase&& other) noexcept {
  if (this != &other) serial_ = std::exchange(other.serial_, next_serial());
  return *this;
}

struct GradScaler::Impl {
  Impl(const GradScalerOptions& o, const LossScalePolicy& policy) : options(o), scale(policy) {}
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    if (scale.started()) want_magnitude_bounds(false);
  }

  GradScalerOptions options;
  LossScale scale;                                     // on the device, from the first use on
  std::map<std::uint64_t, OptimizerState> optimizers;  // by their serial numbers
  Extents unscaled;                                    // gradients that were, since the last update

  void start(Device device) {
    if (scale.started()) return;
    scale.start(device);
    want_magnitude_bounds(true);
  }
  const Tensor& started(const char* call) const {
    if (!scale.started()) {
      misuse(Misuse::not_started, "{}: the scaler has not been used yet; expected scaler.scale(loss).backward() before",
             call);
    }
    return scale.tensor();
  }
  // The options that may be changed later, when they make sense.
  void change(double growth_factor, double backoff_factor, int growth_interval) {
    if (options.enabled) {
      LossScaleRules rules = scale.policy().rules();
      rules.growth_factor = growth_factor;
      rules.backoff_factor = backoff_factor;
      rules.growth_interval = growth_interval;
      scale.set_policy(LossScalePolicy(rules));
    }
    options.growth_factor = growth_factor;
    options.backoff_factor = backoff_factor;
    options.growth_interval = growth_interval;
  }

  struct Gradients {
    std::vector<Tensor> dense;  // the gradients that there are, or copies of those that aren't dense
    std::vector<const NamedTensor*> owners;
    std::vector<bool> shares;  // whether it has memory in common with one before it
  };
  /// The gradients of an optimizer, none of which was unscaled yet; makes the tensors of `state`, with 0 for found.
  Gradients gather(OptimizerBase& optimizer, OptimizerState& state, const char* call);
  /// Of gradients that several processes have: what all of them found.
  static void share(OptimizerBase& optimizer, OptimizerState& state, const char* call);
  void unscale(OptimizerBase& optimizer, OptimizerState& state, bool norm, const char* call);
  /// Finds out what isn't finite and leaves the gradients scaled. False, and nothing was done, where gradients share
  /// memory: a pass that divides one after the other must not run on them.
  bool check(OptimizerBase& optimizer, OptimizerState& state, const char* call);
};

GradScaler::GradScaler(const GradScalerOptions& options)
    : impl_(std::make_unique<Impl>(options, scale_policy(options))) {}
GradScaler::GradScaler(const LossScalePolicy& policy)
    : impl_(std::make_unique<Impl>(options_of(policy.rules()), policy)) {}
GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;

Tensor GradScaler::scale(const Tensor& loss) {
  if (!impl_->options.enabled) return loss;
  check_defined(loss, "scale", "a loss");
  check_floating(loss, "scale");
  impl_->start(loss.device());
  // Type promotion would keep a 16-bit loss of one dimension in 16 bits, where the product overflows.
  const Tensor wide = is_low_precision(loss.dtype()) ? cast(loss, DType::f32) : loss;
  return wide * impl_->scale.tensor();
}

std::vector<Tensor> GradScaler::scale(const std::vector<Tensor>& losses) {
  std::vector<Tensor> result;
  for (const Tensor& loss : losses) result.push_back(scale(loss));
  return result;
}

GradScaler::Impl::Gradients GradScaler::Impl::gather(OptimizerBase& optimizer, OptimizerState& state,
                                                     const char* call) {
  const NamedTensors& parameters = optimizer.named_parameters();
  Gradients result;
  result.dense.reserve(parameters.size());
  result.owners.reserve(parameters.size());
  auto names = std::make_shared<std::vector<std::string>>();
  names->reserve(parameters.size());
  Extents own;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const NamedTensor& p = parameters[i];
    Tensor gradient = p.tensor.grad();
    if (!gradient.defined()) continue;
    names->push_back(parameter_name(p, i));
    check_floating(gradient, call);
    const Extent place(gradient);
    // Whatever was done to it since, such as clipping.
    if (const std::string* known = unscaled.owner_of(place)) {
      misuse(Misuse::shared_gradient,
             "{}: the gradient of {} lies in memory that was unscaled already since the last update, as the gradient "
             "of {}: two optimizers share this parameter or this memory; let only one of them have it",
             call, names->back(), *known);
    }
    result.shares.push_back(own.owner_of(place));
    own.add(place, {});
    if (!gradient.is_contiguous(MemoryFormat::preserve)) gradient = gradient.contiguous();
    result.dense.push_back(std::move(gradient));
    result.owners.push_back(&p);
  }
  const bool others = optimizer.shares_gradients() && !parameters.empty();
  if (result.dense.empty() && !others) no_gradients(call);
  const Device device = result.dense.empty() ? parameters[0].tensor.device() : result.dense[0].device();
  state.found = zeros({}, {.dtype = f32, .device = device});
  state.per_parameter = zeros({static_cast<std::int64_t>(result.dense.size())}, {.dtype = f32, .device = device});
  state.norm = {};
  state.names = std::move(names);
  return result;
}

void GradScaler::Impl::share(OptimizerBase& optimizer, OptimizerState& state, const char* call) {
  if (!optimizer.shares_gradients()) return;
  GradientFindings all{
      .found = state.found, .per_parameter = state.per_parameter, .norm = state.norm, .names = state.names};
  optimizer.share(all);
  if (all.names->empty()) no_gradients(call);
  state.found = all.found;
  state.per_parameter = all.per_parameter;
  state.norm = all.norm;
  state.names = std::move(all.names);
}

void GradScaler::Impl::unscale(OptimizerBase& optimizer, OptimizerState& state, bool norm, const char* call) {
  const Tensor& scale_now = started(call);
  const NoGrad no_grad;
  Gradients gradients = gather(optimizer, state, call);
  const Device device = state.found.device();
  if (norm) state.norm = zeros({}, {.dtype = f32, .device = device});
  std::vector<Tensor> to;
  for (std::size_t i = 0; i < gradients.dense.size(); ++i) {
    Tensor& g = gradients.dense[i];
    // What two gradients share would be divided twice.
    if (gradients.shares[i]) g = g.clone();
    // An unscaled f16 gradient may underflow or, for scales under 1, overflow: float32 holds it.
    to.push_back(g.dtype() == DType::f16 ? empty_like(g, DType::f32) : g);
  }
  std::vector<const Tensor*> in{&scale_now}, out{&state.found, &state.per_parameter, &state.norm};
  for (const Tensor& t : gradients.dense) in.push_back(&t);
  for (const Tensor& t : to) out.push_back(&t);
  if (!to.empty()) run_kernel(detail::unscale_kernels(), "amp_unscale", device, DType::f32, in, out);
  for (std::size_t i = 0; i < to.size(); ++i) {
    to[i].storage()->bump_version();
    const Tensor& owner = gradients.owners[i]->tensor;
    if (!owner.grad().is_same(to[i])) owner.set_grad(to[i]);
    unscaled.add(Extent(to[i]), (*state.names)[i]);
  }
  share(optimizer, state, call);
  state.stage = Stage::unscaled;
}

bool GradScaler::Impl::check(OptimizerBase& optimizer, OptimizerState& state, const char* call) {
  const Tensor& scale_now = started(call);
  const NoGrad no_grad;
  const Gradients gradients = gather(optimizer, state, call);
  // Of several processes' gradients none share memory: their reduction has put each in a place of its own.
  if (!optimizer.shares_gradients() &&
      std::find(gradients.shares.begin(), gradients.shares.end(), true) != gradients.shares.end()) {
    return false;
  }
  std::vector<const Tensor*> in{&scale_now}, out{&state.found, &state.per_parameter};
  for (const Tensor& t : gradients.dense) {
    in.push_back(&t);
  }
  const Tensor bounds = magnitude_bounds(gradients.dense, scale_now.device());
  in.push_back(&bounds);
  if (!gradients.dense.empty()) run_kernel(check_kernels(), "amp_check", state.found.device(), DType::f32, in, out);
  share(optimizer, state, call);
  return true;
}

Tensor GradScaler::unscale_(OptimizerBase& optimizer, const UnscaleOptions& options) {
  Impl& s = *impl_;
  if (!s.options.enabled) return {};
  s.started("unscale_");
  const auto known = s.optimizers.find(optimizer.serial());
  const Stage stage = known == s.optimizers.end() ? Stage::ready : known->second.stage;
  if (stage == Stage::unscaled) {
    misuse(Misuse::called_twice,
           "unscale_: called already for this optimizer since the last update(); gradients would be divided twice");
  }
  if (stage == Stage::stepped) {
    misuse(Misuse::called_after_step, "unscale_: called after step() for this optimizer; call update() first");
  }
  const NamedTensors& parameters = optimizer.named_parameters();
  if (!optimizer.shares_gradients() &&
      std::none_of(parameters.begin(), parameters.end(), [](const auto& p) { return p.tensor.grad().defined(); })) {
    // There is nothing to divide. A step of this optimizer would be a mistake; that this was called is none.
    return options.norm ? zeros({}, {.dtype = f32, .device = s.scale.tensor().device()}) : Tensor();
  }
  OptimizerState fresh;
  s.unscale(optimizer, fresh, options.norm, "unscale_");
  const Tensor norm = fresh.norm;
  s.optimizers[optimizer.serial()] = std::move(fresh);
  return norm;
}

StepResult GradScaler::step(OptimizerBase& optimizer) {
  Impl& s = *impl_;
  StepResult result;
  if (!s.options.enabled) {
    optimizer.step_unless({}, {});
    return result;
  }
  OptimizerState state;
  if (const auto known = s.optimizers.find(optimizer.serial()); known != s.optimizers.end()) state = known->second;
  if (state.stage == Stage::stepped) {
    misuse(Misuse::called_twice,
           "step: called already for this optimizer since the last update(); call update() once a step");
  }
  if (state.stage == Stage::unscaled) {
    optimizer.step_unless(state.found, {});
  } else if (optimizer.unscales() && s.check(optimizer, state, "step")) {
    // One pass that only reads, and the optimizer's own: gradients are not written in between. Nothing is remembered of
    // a step that fails here.
    optimizer.step_unless(state.found, s.scale.tensor());
    for (std::size_t i = 0; const NamedTensor& p : optimizer.named_parameters()) {
      if (const Tensor g = p.tensor.grad(); g.defined()) s.unscaled.add(Extent(g), parameter_name(p, i));
      ++i;
    }
  } else {
    s.unscale(optimizer, state, false, "step");
    s.optimizers[optimizer.serial()] = state;  // Unscaled once, whatever becomes of the step.
    optimizer.step_unless(state.found, {});
  }
  state.stage = Stage::stepped;
  result.found_ = state.found;
  result.per_parameter_ = state.per_parameter;
  result.names_ = state.names;
  s.optimizers[optimizer.serial()] = std::move(state);
  return result;
}

StepResult GradScaler::step(OptimizerBase& optimizer, const std::function<Tensor()>& closure) {
  Impl& s = *impl_;
  StepResult result;
  if (!s.options.enabled) {
    result.loss_ = optimizer.step_closure(closure);
    return result;
  }
  if (s.optimizers.contains(optimizer.serial())) {
    misuse(Misuse::called_twice,
           "step: with a closure, unscale_() and step() must not have been called since the last update()");
  }
  struct Overflow {};
  const NamedTensors& parameters = optimizer.named_parameters();
  std::vector<Tensor> before;
  {
    const NoGrad no_grad;
    for (const NamedTensor& p : parameters) before.push_back(p.tensor.detach().clone());
  }
  OptimizerState state;
  const auto others = s.unscaled;
  const auto evaluate = [&] {
    const EnableGrad on;
    const Tensor loss = closure();
    if (!result.loss_.defined()) result.loss_ = loss;
    s.unscaled = others;  // each evaluation has new gradients, though maybe in the same memory
    s.unscale(optimizer, state, false, "step");
    // The line search needs the number anyway, so the host may look here.
    if (state.found.item<float>() != 0) throw Overflow{};
    return loss;
  };
  try {
    result.loss_ = optimizer.step_closure(evaluate);
  } catch (const Overflow&) {
    const NoGrad no_grad;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      Tensor p = parameters[i].tensor;
      p.copy_(before[i]);
    }
  }
  state.stage = Stage::stepped;
  result.found_ = state.found;
  result.per_parameter_ = state.per_parameter;
  result.names_ = state.names;
  s.optimizers[optimizer.serial()] = std::move(state);
  return result;
}

void GradScaler::update() {
  Impl& s = *impl_;
  if (!s.options.enabled) return;
  s.started("update");
  if (s.optimizers.empty()) {
    misuse(Misuse::nothing_to_update, "update: no step() or unscale_() found gradients since the last update()");
  }
  std::vector<Tensor> found;
  std::vector<Findings> findings;
  for (const auto& [optimizer, state] : s.optimizers) {
    found.push_back(state.found);
    findings.push_back({state.per_parameter, state.names});
    if (KernelRecorder* recorder = kernel_recorder()) [[unlikely]]
      recorder->keep(state.per_parameter);
  }
  s.optimizers.clear();
  s.unscaled.clear();
  s.scale.update(found, [findings = std::move(findings)] { return describe(findings); });
}

void GradScaler::update(double new_scale) {
  Impl& s = *impl_;
  if (!s.options.enabled) return;
  s.scale.set(new_scale);
  s.optimizers.clear();
  s.unscaled.clear();
}

double GradScaler::get_scale() const { return impl_->options.enabled ? impl_->scale.value() : 1; }
Tensor GradScaler::scale_tensor() const { return impl_->scale.tensor(); }
Tensor GradScaler::found_inf(const OptimizerBase& optimizer) const {
  const auto known = impl_->optimizers.find(optimizer.serial());
  return known != impl_->optimizers.end() ? known->second.found : Tensor();
}
int GradScaler::growth_tracker() const { return impl_->scale.growth_tracker(); }
bool GradScaler::is_enabled() const { return impl_->options.enabled; }
const GradScalerOptions& GradScaler::options() const { return impl_->options; }
const LossScalePolicy& GradScaler::policy() const { return impl_->scale.policy(); }
void GradScaler::set_growth_factor(double value) {
  const GradScalerOptions& o = impl_->options;
  impl_->change(value, o.backoff_factor, o.growth_interval);
}
void GradScaler::set_backoff_factor(double value) {
  const GradScalerOptions& o = impl_->options;
  impl_->change(o.growth_factor, value, o.growth_interval);
}
void GradScaler::set_growth_interval(int value) {
  const GradScalerOptions& o = impl_->options;
  impl_->change(o.growth_factor, o.backoff_factor, value);
}

std::map<std::string, double> GradScaler::state_dict() const {
  const GradScalerOptions& o = impl_->options;
  if (!o.enabled) return {};
  std::map<std::string, double> state = impl_->scale.state_dict();
  state["growth_factor"] = o.growth_factor;
  state["backoff_factor"] = o.backoff_factor;
  state["growth_interval"] = static_cast<double>(o.growth_interval);
  return state;
}

void GradScaler::load_state_dict(const std::map<std::string, double>& state) {
  Impl& s = *impl_;
  if (!s.options.enabled) return;
  if (state.empty()) {
    misuse(Misuse::bad_state, "grad_scaler: the state is empty; it was probably saved by a disabled scaler");
  }
  const auto get = [&](const char* key) {
    const auto it = state.find(key);
    if (it == state.end()) misuse(Misuse::bad_state, "grad_scaler: the state has no '{}'", key);
    return it->second;
  };
  const double growth = get("growth_factor"), backoff = get("backoff_factor"), interval = get("growth_interval");
  if (!(interval >= 1 && interval <= std::numeric_limits<int>::max()) || interval != std::floor(interval)) {
    fail<AmpError>("grad_scaler: expected a whole number of at least 1 for 'growth_interval' of the state, got {}",
                   interval);
  }
  const GradScalerOptions before = s.options;
  s.change(growth, backoff, static_cast<int>(interval));
  try {
    s.scale.load_state_dict(state);
  } catch (...) {
    s.change(before.growth_factor, before.backoff_factor, before.growth_interval);
    throw;
  }
}

bool StepResult::ran() const { return !found_.defined() || found_.item<float>() == 0; }

std::string StepResult::first_overflow() const {
  const auto all = overflows();
  return all.empty() ? "" : all.front();
}

std::vector<std::string> StepResult::overflows() const {
  std::vector<std::string> result;
  if (!per_parameter_.defined() || ran()) return result;
  return Findings{per_parameter_, names_}.overflows();
}

}  // namespace halfstep::amp
