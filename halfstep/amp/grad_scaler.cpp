// SPDX-License-Identifier: Apache-2.0
#include "halfstep/amp/grad_scaler.h"

#include <cmath>
#include <limits>
#include <unordered_map>
#include <unordered_set>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/runtime/log.h"

namespace halfstep::amp {
namespace {

const KernelTable& unscale_kernels() {
  static const KernelTable& table = kernel_table("amp_unscale");
  return table;
}
const KernelTable& check_kernels() {
  static const KernelTable& table = kernel_table("amp_check");
  return table;
}
const KernelTable& update_kernels() {
  static const KernelTable& table = kernel_table("amp_update_scale");
  return table;
}

enum class Stage { ready, unscaled, stepped };

// What the scaler knows of one optimizer since the last update.
struct OptimizerState {
  Stage stage = Stage::ready;
  Tensor found;          // f32 []: 0, or 1 once a gradient wasn't finite
  Tensor per_parameter;  // f32 [gradients]: the same for each
  Tensor norm;           // of the unscaled gradients, when it was asked for
  std::shared_ptr<const std::vector<std::string>> names;
};

std::string parameter_name(const NamedTensor& p, std::size_t index) {
  if (!p.name.empty()) return p.name;
  return fmt::format("parameter {} {}", index, p.tensor.sizes().str());
}

void check_factor(double growth, double backoff, int interval) {
  if (!(growth > 1) || !std::isfinite(growth))
    fail<AmpError>("grad_scaler: expected a growth factor above 1, got {}", growth);
  if (!(backoff > 0) || !(backoff < 1)) {
    fail<AmpError>("grad_scaler: expected a backoff factor between 0 and 1, got {}", backoff);
  }
  if (interval < 1) fail<AmpError>("grad_scaler: expected a growth interval of at least 1, got {}", interval);
}

void check_scale(double scale) {
  if (!(static_cast<float>(scale) > 0) || !(scale <= std::numeric_limits<float>::max())) {
    fail<AmpError>("grad_scaler: expected a scale above 0 that float32 can hold, got {}", scale);
  }
}

}  // namespace

struct GradScaler::Impl {
  Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    if (scale.defined()) want_magnitude_bounds(false);
  }

  GradScalerOptions options;
  Tensor scale;    // f32 [], on the device; made at the first use
  Tensor tracker;  // i32 []
  double first_scale;
  int first_tracker = 0;
  std::unordered_map<const Steppable*, OptimizerState> optimizers;
  std::vector<Tensor> last_found;              // what the last update's steps found, until somebody looks at it
  std::unordered_set<std::uint64_t> unscaled;  // storages of gradients that were, since the last update

  void start(Device device) {
    if (scale.defined()) return;
    want_magnitude_bounds(true);
    scale = full({}, first_scale, {.dtype = f32, .device = device});
    tracker = full({}, first_tracker, {.dtype = i32, .device = device});
  }
  // Says that the scale can't sink any more although gradients overflow: once for each update that found it so.
  void look_at_floor() {
    if (last_found.empty()) return;
    bool overflow = false;
    for (const Tensor& found : std::exchange(last_found, {})) overflow |= found.item<float>() != 0;
    if (!overflow || scale.item<float>() > static_cast<float>(options.floor)) return;
    log(LogLevel::warning,
        fmt::format(
            "grad_scaler: the loss scale is at its floor of {} and gradients still overflow; the loss or the model "
            "produces values that 16 bits can't hold",
            options.floor));
  }
  const Tensor& started(const char* call) const {
    if (!scale.defined()) {
      fail<AmpError>("{}: the scaler has not been used yet; expected scaler.scale(loss).backward() before", call);
    }
    return scale;
  }

  struct Gradients {
    std::vector<Tensor> dense;  // the gradients that there are, or copies of those that aren't dense
    std::vector<const NamedTensor*> owners;
  };
  /// The gradients of an optimizer, none of which was unscaled yet; makes the tensors of `state`, with 0 for found.
  Gradients gather(Steppable& optimizer, OptimizerState& state, const char* call);
  void unscale(Steppable& optimizer, OptimizerState& state, bool norm, const char* call);
  /// Finds out what isn't finite and leaves the gradients scaled.
  void check(Steppable& optimizer, OptimizerState& state, const char* call);
};

GradScaler::GradScaler(const GradScalerOptions& options) : impl_(std::make_unique<Impl>()) {
  check_factor(options.growth_factor, options.backoff_factor, options.growth_interval);
  check_scale(options.init_scale);
  if (!(options.floor >= 0) || !(options.cap >= 0) || (options.cap > 0 && options.cap < options.floor)) {
    fail<AmpError>("grad_scaler: expected 0 <= floor <= cap, got {} and {}", options.floor, options.cap);
  }
  impl_->options = options;
  impl_->first_scale = options.init_scale;
}
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
  return wide * impl_->scale;
}

std::vector<Tensor> GradScaler::scale(const std::vector<Tensor>& losses) {
  std::vector<Tensor> result;
  for (const Tensor& loss : losses) result.push_back(scale(loss));
  return result;
}

GradScaler::Impl::Gradients GradScaler::Impl::gather(Steppable& optimizer, OptimizerState& state, const char* call) {
  const NamedTensors& parameters = optimizer.named_parameters();
  Gradients result;
  result.dense.reserve(parameters.size());
  result.owners.reserve(parameters.size());
  auto names = std::make_shared<std::vector<std::string>>();
  names->reserve(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const NamedTensor& p = parameters[i];
    Tensor gradient = p.tensor.grad();
    if (!gradient.defined()) continue;
    names->push_back(parameter_name(p, i));
    check_floating(gradient, call);
    // Whatever was done to it since, such as clipping.
    if (unscaled.contains(gradient.storage()->id())) {
      fail<AmpError>(
          "{}: the gradient of {} was unscaled already since the last update: two optimizers share this parameter; let "
          "only one of them have it",
          call, names->back());
    }
    if (!gradient.is_contiguous(MemoryFormat::preserve)) gradient = gradient.contiguous();
    result.dense.push_back(std::move(gradient));
    result.owners.push_back(&p);
  }
  if (result.dense.empty()) {
    fail<AmpError>("{}: no parameter of the optimizer has a gradient; expected scaler.scale(loss).backward() before",
                   call);
  }
  const Device device = result.dense[0].device();
  state.found = zeros({}, {.dtype = f32, .device = device});
  state.per_parameter = zeros({static_cast<std::int64_t>(result.dense.size())}, {.dtype = f32, .device = device});
  state.norm = {};
  state.names = std::move(names);
  return result;
}

void GradScaler::Impl::unscale(Steppable& optimizer, OptimizerState& state, bool norm, const char* call) {
  const Tensor& scale_now = started(call);
  const NoGrad no_grad;
  const Gradients gradients = gather(optimizer, state, call);
  const Device device = gradients.dense[0].device();
  if (norm) state.norm = zeros({}, {.dtype = f32, .device = device});
  std::vector<Tensor> to;
  // An unscaled f16 gradient may underflow or, for scales under 1, overflow: float32 holds it.
  for (const Tensor& g : gradients.dense) to.push_back(g.dtype() == DType::f16 ? empty_like(g, DType::f32) : g);
  std::vector<const Tensor*> in{&scale_now}, out{&state.found, &state.per_parameter, &state.norm};
  for (const Tensor& t : gradients.dense) in.push_back(&t);
  for (const Tensor& t : to) out.push_back(&t);
  run_kernel(unscale_kernels(), "amp_unscale", device, DType::f32, in, out, nullptr);
  for (std::size_t i = 0; i < to.size(); ++i) {
    to[i].storage()->bump_version();
    const Tensor& owner = gradients.owners[i]->tensor;
    if (!owner.grad().is_same(to[i])) owner.set_grad(to[i]);
    unscaled.insert(to[i].storage()->id());
  }
  state.stage = Stage::unscaled;
}

void GradScaler::Impl::check(Steppable& optimizer, OptimizerState& state, const char* call) {
  const Tensor& scale_now = started(call);
  const NoGrad no_grad;
  const Gradients gradients = gather(optimizer, state, call);
  std::vector<const Tensor*> in{&scale_now}, out{&state.found, &state.per_parameter};
  std::vector<double> known;
  for (const Tensor& t : gradients.dense) {
    in.push_back(&t);
    known.push_back(static_cast<double>(t.storage()->magnitude_bound()));
  }
  const Tensor bounds = tensor(known, {static_cast<std::int64_t>(known.size())}, {.device = scale_now.device()});
  in.push_back(&bounds);
  run_kernel(check_kernels(), "amp_check", gradients.dense[0].device(), DType::f32, in, out, nullptr);
}

Tensor GradScaler::unscale_(Steppable& optimizer, const UnscaleOptions& options) {
  Impl& s = *impl_;
  if (!s.options.enabled) return {};
  s.started("unscale_");
  const auto known = s.optimizers.find(&optimizer);
  const Stage stage = known == s.optimizers.end() ? Stage::ready : known->second.stage;
  if (stage == Stage::unscaled) {
    fail<AmpError>(
        "unscale_: called already for this optimizer since the last update(); gradients would be divided twice");
  }
  if (stage == Stage::stepped) fail<AmpError>("unscale_: called after step() for this optimizer; call update() first");
  OptimizerState fresh;
  s.unscale(optimizer, fresh, options.norm, "unscale_");
  const Tensor norm = fresh.norm;
  s.optimizers[&optimizer] = std::move(fresh);
  return norm;
}

StepResult GradScaler::step(Steppable& optimizer) {
  Impl& s = *impl_;
  StepResult result;
  if (!s.options.enabled) {
    optimizer.step_unless({}, {});
    return result;
  }
  OptimizerState state;
  if (const auto known = s.optimizers.find(&optimizer); known != s.optimizers.end()) state = known->second;
  if (state.stage == Stage::stepped) {
    fail<AmpError>("step: called already for this optimizer since the last update(); call update() once a step");
  }
  if (state.stage == Stage::unscaled) {
    optimizer.step_unless(state.found, {});
  } else if (optimizer.unscales()) {
    // One pass that only reads, and the optimizer's own: gradients are not written in between. Nothing is remembered of
    // a step that fails here.
    s.check(optimizer, state, "step");
    optimizer.step_unless(state.found, s.scale);
    for (const NamedTensor& p : optimizer.named_parameters()) {
      if (const Tensor g = p.tensor.grad(); g.defined()) s.unscaled.insert(g.storage()->id());
    }
  } else {
    s.unscale(optimizer, state, false, "step");
    s.optimizers[&optimizer] = state;  // Unscaled once, whatever becomes of the step.
    optimizer.step_unless(state.found, {});
  }
  state.stage = Stage::stepped;
  result.found_ = state.found;
  result.per_parameter_ = state.per_parameter;
  result.names_ = state.names;
  s.optimizers[&optimizer] = std::move(state);
  return result;
}

StepResult GradScaler::step(Steppable& optimizer, const std::function<Tensor()>& closure) {
  Impl& s = *impl_;
  StepResult result;
  if (!s.options.enabled) {
    result.loss_ = optimizer.step_closure(closure);
    return result;
  }
  if (s.optimizers.contains(&optimizer)) {
    fail<AmpError>("step: with a closure, unscale_() and step() must not have been called since the last update()");
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
  s.optimizers[&optimizer] = std::move(state);
  return result;
}

void GradScaler::update() {
  Impl& s = *impl_;
  if (!s.options.enabled) return;
  s.started("update");
  if (s.optimizers.empty()) {
    fail<AmpError>("update: no step() or unscale_() since the last update()");
  }
  const NoGrad no_grad;
  if (s.options.dynamic) {
    std::vector<const Tensor*> in{&s.scale, &s.tracker};
    for (const auto& [optimizer, state] : s.optimizers) in.push_back(&state.found);
    const Tensor* out[] = {&s.scale, &s.tracker};
    const ScaleUpdateAttributes attributes{
        .growth_factor = s.options.growth_factor,
        .backoff_factor = s.options.backoff_factor,
        .growth_interval = s.options.growth_interval,
        .floor = static_cast<float>(s.options.floor),
        .cap = s.options.cap > 0 ? static_cast<float>(s.options.cap) : std::numeric_limits<float>::max(),
    };
    run_kernel(update_kernels(), "amp_update_scale", s.scale.device(), DType::f32, in, out, &attributes);
    if (s.options.floor > 0) {
      s.last_found.clear();
      for (const auto& [optimizer, state] : s.optimizers) s.last_found.push_back(state.found);
      // Reading a device would make the host wait for it: there it is done when somebody reads the scale.
      if (s.scale.device().is_cpu()) s.look_at_floor();
    }
  }
  s.optimizers.clear();
  s.unscaled.clear();
}

void GradScaler::update(double new_scale) {
  Impl& s = *impl_;
  if (!s.options.enabled) return;
  check_scale(new_scale);
  if (s.scale.defined()) {
    const NoGrad no_grad;
    s.scale.fill_(new_scale);
  } else {
    s.first_scale = new_scale;
  }
  s.optimizers.clear();
  s.unscaled.clear();
}

double GradScaler::get_scale() const {
  if (!impl_->options.enabled) return 1;
  impl_->look_at_floor();
  return impl_->scale.defined() ? static_cast<double>(impl_->scale.item<float>()) : impl_->first_scale;
}
Tensor GradScaler::scale_tensor() const { return impl_->scale; }
int GradScaler::growth_tracker() const {
  return impl_->tracker.defined() ? impl_->tracker.item<int>() : impl_->first_tracker;
}
bool GradScaler::is_enabled() const { return impl_->options.enabled; }
const GradScalerOptions& GradScaler::options() const { return impl_->options; }
void GradScaler::set_growth_factor(double value) {
  check_factor(value, impl_->options.backoff_factor, impl_->options.growth_interval);
  impl_->options.growth_factor = value;
}
void GradScaler::set_backoff_factor(double value) {
  check_factor(impl_->options.growth_factor, value, impl_->options.growth_interval);
  impl_->options.backoff_factor = value;
}
void GradScaler::set_growth_interval(int value) {
  check_factor(impl_->options.growth_factor, impl_->options.backoff_factor, value);
  impl_->options.growth_interval = value;
}

std::map<std::string, double> GradScaler::state_dict() const {
  const GradScalerOptions& o = impl_->options;
  if (!o.enabled) return {};
  return {{"scale", get_scale()},
          {"growth_factor", o.growth_factor},
          {"backoff_factor", o.backoff_factor},
          {"growth_interval", static_cast<double>(o.growth_interval)},
          {"growth_tracker", static_cast<double>(growth_tracker())}};
}

void GradScaler::load_state_dict(const std::map<std::string, double>& state) {
  Impl& s = *impl_;
  if (!s.options.enabled) return;
  if (state.empty()) {
    fail<AmpError>("grad_scaler: the state is empty; it was probably saved by a disabled scaler");
  }
  const auto get = [&](const char* key) {
    const auto it = state.find(key);
    if (it == state.end()) fail<AmpError>("grad_scaler: the state has no '{}'", key);
    return it->second;
  };
  const double scale = get("scale"), growth = get("growth_factor"), backoff = get("backoff_factor");
  const auto whole = [&](const char* key, int least) {
    const double value = get(key);
    if (!(value >= least && value <= std::numeric_limits<int>::max()) || value != std::floor(value)) {
      fail<AmpError>("grad_scaler: expected a whole number of at least {} for '{}' of the state, got {}", least, key,
                     value);
    }
    return static_cast<int>(value);
  };
  const int interval = whole("growth_interval", 1), tracker = whole("growth_tracker", 0);
  check_scale(scale);
  check_factor(growth, backoff, interval);
  s.options.growth_factor = growth;
  s.options.backoff_factor = backoff;
  s.options.growth_interval = interval;
  s.first_scale = scale;
  s.first_tracker = tracker;
  if (s.scale.defined()) {
    const NoGrad no_grad;
    s.scale.fill_(scale);
    s.tracker.fill_(tracker);
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
  const auto flags = per_parameter_.to_vector<float>();
  for (std::size_t i = 0; i < flags.size(); ++i) {
    if (flags[i] != 0) result.push_back((*names_)[i]);
  }
  return result;
}

}  // namespace halfstep::amp
