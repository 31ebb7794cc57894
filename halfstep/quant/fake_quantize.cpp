// SPDX-License-Identifier: Apache-2.0
#include "halfstep/quant/fake_quantize.h"

#include <cmath>
#include <set>
#include <utility>

#include "halfstep/autograd/engine_internal.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/quant/pending_internal.h"

namespace halfstep::quant {
namespace {

struct IntegerRange {
  std::int64_t least, most;
};

IntegerRange integers(const FakeQuantizeOptions& o) {
  if (!((o.bits >= 2 && o.bits <= 8) || o.bits == 16)) {
    fail<Error>("FakeQuantize: expected 2 to 8 bits, or 16, got {}", o.bits);
  }
  const int bits = o.reduce_range ? o.bits - 1 : o.bits;
  if (bits < 2) fail<Error>("FakeQuantize: reduce_range leaves {} bit of {}", bits, o.bits);
  if (o.narrow_range && !o.is_signed) fail<Error>("FakeQuantize: narrow_range is for signed integers");
  const std::int64_t values = std::int64_t{1} << bits;
  if (!o.is_signed) return {0, values - 1};
  return {-values / 2 + (o.narrow_range ? 1 : 0), values / 2 - 1};
}

FakeQuantizeOptions checked(const FakeQuantizeOptions& o) {
  integers(o);
  if (o.source == ScaleSource::clipped && (o.is_signed || o.axis)) {
    fail<Error>("FakeQuantize: a clipped source is for activations from 0 on: unsigned, and without an axis");
  }
  if (!(o.alpha > 0)) fail<Error>("FakeQuantize: expected an alpha above 0, got {}", o.alpha);
  if (o.gradient_elements < 0) {
    fail<Error>("FakeQuantize: expected gradient_elements of at least 0, got {}", o.gradient_elements);
  }
  return o;
}

ObserverOptions observer_options(const FakeQuantizeOptions& o) {
  const IntegerRange range = integers(o);
  return {.kind = o.observer,
          .quant_min = range.least,
          .quant_max = range.most,
          .symmetric = o.symmetric,
          .axis = o.axis,
          .channels = o.channels,
          .averaging_constant = o.averaging_constant,
          .eps = o.eps,
          .bins = o.bins,
          .percentile = o.percentile};
}

Tensor flag(bool on) { return full({1}, on ? 1 : 0, {.dtype = u8}); }

// A switch on the host, and the buffer that carries it in files. The buffer is read when others have written it.
class Switch {
 public:
  explicit Switch(bool on) : on_(on) {}
  bool get(const Tensor& buffer) {
    if (buffer.storage().get() != seen_ || buffer.version() != version_) {
      if (seen_) {
        const bool was = std::exchange(on_, buffer.item<double>() != 0);
        if (was != on_) ++capture_generation();
      }
      remember(buffer);
    }
    return on_;
  }
  void set(const Tensor& buffer, bool on) {
    Tensor destination = buffer;
    const NoGrad no_grad;
    destination.fill_(on ? 1 : 0);
    if (std::exchange(on_, on) != on) ++capture_generation();
    remember(buffer);
  }
  void remember(const Tensor& buffer) {
    seen_ = buffer.storage().get();
    version_ = buffer.version();
  }

 private:
  bool on_;
  const Storage* seen_ = nullptr;
  std::uint32_t version_ = 0;
};

// The observer has bins to be searched.
bool searches(const Observer& observer) { return observer.histogram.defined(); }

}  // namespace

struct FakeQuantize::State {
  explicit State(bool observes) : observer(observes) {}
  Switch fake_quant{true}, observer;
  Pending pending = {};
  bool started = false;  // a learned scale has its first value
};

const char* name(ScaleSource source) {
  constexpr const char* kNames[] = {"observed", "learned", "clipped"};
  return kNames[static_cast<int>(source)];
}

FakeQuantizeOptions weight_options(std::int64_t channels, int bits) {
  FakeQuantizeOptions o;
  o.bits = bits;
  o.is_signed = o.symmetric = true;
  o.axis = 0;
  o.channels = channels;
  o.averaging_constant = 1;
  return o;
}

FakeQuantizeOptions activation_options(int bits) {
  FakeQuantizeOptions o;
  o.bits = bits;
  return o;
}

FakeQuantize::FakeQuantize(const FakeQuantizeOptions& o)
    : options(checked(o)),
      fake_quant_enabled(buffer("fake_quant_enabled", flag(true))),
      observer_enabled(buffer("observer_enabled", flag(o.source == ScaleSource::observed))),
      activation_post_process(child("activation_post_process", Observer(observer_options(o)))) {
  const Shape sizes{o.axis ? o.channels : 1};
  const bool learned = o.source == ScaleSource::learned;
  if (learned) {
    scale = parameter("scale", ones(sizes).requires_grad_());
  } else {
    scale = buffer("scale", ones(sizes));
  }
  if (has_zero_point_parameter()) {
    zero_point = parameter("zero_point", zeros(sizes).requires_grad_());
  } else {
    zero_point = buffer("zero_point", zeros(sizes, {.dtype = i32}));
  }
  alpha = parameter("alpha", o.source == ScaleSource::clipped ? full({1}, o.alpha).requires_grad_() : Tensor());
  const IntegerRange range = integers(o);
  quant_min_ = range.least;
  quant_max_ = range.most;
  state_ = std::make_shared<State>(o.source == ScaleSource::observed);
}

bool FakeQuantize::has_zero_point_parameter() const {
  return options.source == ScaleSource::learned && !options.symmetric && options.is_signed;
}

bool FakeQuantize::is_fake_quant_enabled() const { return state_->fake_quant.get(fake_quant_enabled); }
bool FakeQuantize::is_observer_enabled() const { return state_->observer.get(observer_enabled); }
void FakeQuantize::enable_fake_quant(bool on) const { state_->fake_quant.set(fake_quant_enabled, on); }

void FakeQuantize::enable_observer(bool on) const {
  if (!on && is_observer_enabled()) {
    if (searches(activation_post_process)) follow_observer();
    commit();
  }
  state_->observer.set(observer_enabled, on);
}

void FakeQuantize::follow_observer() const {
  const NoGrad no_grad;
  const auto [s, z] = activation_post_process.calculate_qparams();
  Tensor to_scale = scale, to_zero = zero_point;
  to_scale.copy_(s.reshape(scale.sizes()));
  to_zero.copy_(z.reshape(zero_point.sizes()));
  state_->started = true;
}

// LSQ: 2 mean|x| / sqrt(quant_max), where nothing was loaded: the value that the constructor gives is still there.
void FakeQuantize::start_scale(const Tensor& input) const {
  if (state_->started || input.numel() == 0) return;
  const NoGrad no_grad;
  const AutocastOff in_its_own_dtype;
  const Tensor size = abs(input.detach().to(input.dtype() == f64 ? f64 : f32));
  Shape dims;
  for (int i = 0; i < size.dim(); ++i) {
    if (options.axis && i == (*options.axis < 0 ? *options.axis + size.dim() : *options.axis)) continue;
    dims.push_back(i);
  }
  const Tensor first = (dims.empty() ? size : mean(size, dims)) * (2 / std::sqrt(static_cast<double>(quant_max_)));
  Tensor destination = scale;
  const Tensor given = destination.detach();
  destination.copy_(where(eq(given, 1), clamp_min(first, options.eps).reshape(scale.sizes()).to(given.dtype()), given));
  state_->started = true;
}

// The scale as the grid takes it: f32 (f64 with an f64 input) and at least eps, which training may leave; the gradient
// passes all the same, so that it finds its way back.
Tensor FakeQuantize::grid_scale(const Tensor& input) const {
  const AutocastOff in_its_own_dtype;
  const DType dtype = scale.dtype() == f64 && input.dtype() == f64 ? f64 : f32;
  const Tensor s = scale.to(dtype);
  const Tensor least = clamp_min(s.detach(), options.eps);
  return s + (least - s.detach());
}

Tensor FakeQuantize::forward(const Tensor& input) const {
  check_defined(input, "FakeQuantize", "a tensor");
  const bool quantizes = is_fake_quant_enabled(), clips = options.source == ScaleSource::clipped;
  // A forward pass that a checkpoint repeats has to see the scale that the first one used.
  const bool again = halfstep::detail::backward_depth() != 0;
  const bool observes = is_observer_enabled() && (is_training() || options.observe_in_eval) && !again;
  if (observes) {
    const NoGrad no_grad;
    if (options.source != ScaleSource::learned) state_->pending.hold({&scale, &zero_point});
    activation_post_process(input.detach());
    if (!clips && (quantizes || !searches(activation_post_process))) follow_observer();
  }
  if (!quantizes) return input;
  const FakeQuantizeFuncOptions grid{quant_min_, quant_max_, options.axis};
  if (clips) {
    // The bound as the clipped values have it, so that in 16 bits too they are quantized to quant_max.
    const Tensor bound = alpha.to(input.dtype()).to(alpha.dtype() == f64 && input.dtype() == f64 ? f64 : f32);
    const Tensor clipped = pact(input, bound);
    Tensor to_scale = scale;
    to_scale.copy_(clamp_min(bound.detach() / static_cast<double>(quant_max_), options.eps));
    return fake_quantize(clipped, scale, zero_point, grid);
  }
  if (options.source == ScaleSource::observed) return fake_quantize(input, scale, zero_point, grid);
  if (!observes && !again) start_scale(input);
  const std::int64_t n = options.gradient_elements > 0 ? options.gradient_elements : input.numel();
  const double factor = options.scale_gradient && n > 0 ? lsq_grad_factor(n, quant_max_) : 1;
  Tensor zero = zero_point.is_floating() && zero_point.dtype() != f64 ? zero_point.to(f32) : Tensor(zero_point);
  if (observes) zero = zero.clone();  // the next pass of this step writes it, and the backward pass reads it
  return fake_quantize_learnable(input, grid_scale(input), zero, {quant_min_, quant_max_, options.axis, factor});
}

void FakeQuantize::commit(const Tensor& found_inf) const {
  const NoGrad no_grad;
  activation_post_process.commit(found_inf);
  if (options.source != ScaleSource::learned) state_->pending.settle(found_inf, {&scale, &zero_point});
}

std::string FakeQuantize::describe() const {
  std::string text = fmt::format("{} bits, {} to {}", options.bits, quant_min_, quant_max_);
  if (options.symmetric) text += ", symmetric";
  if (options.axis) text += fmt::format(", axis {}", *options.axis);
  text += options.source == ScaleSource::observed ? fmt::format(", {}", quant::name(options.observer))
                                                  : fmt::format(", {}", quant::name(options.source));
  return text;
}

void FakeQuantize::unshare() {
  ModuleBase::unshare();
  state_ = std::make_shared<State>(*state_);
  state_->pending = {};
  state_->fake_quant.remember(fake_quant_enabled);
  state_->observer.remember(observer_enabled);
}

namespace {

template <class F>
void for_fake_quantizations(const nn::ModuleBase& module, F&& f) {
  module.apply([&](const std::string&, const nn::ModuleBase& m) {
    if (const auto* fake = dynamic_cast<const FakeQuantize*>(&m)) f(*fake);
  });
}

}  // namespace

void enable_fake_quant(const nn::ModuleBase& module, bool on) {
  for_fake_quantizations(module, [on](const FakeQuantize& f) { f.enable_fake_quant(on); });
}

void enable_observer(const nn::ModuleBase& module, bool on) {
  for_fake_quantizations(module, [on](const FakeQuantize& f) { f.enable_observer(on); });
}

void commit(const nn::ModuleBase& module, const Tensor& found_inf) {
  std::set<const nn::ModuleBase*> done;  // the observers of fake quantizations, which come before them
  module.apply([&](const std::string&, const nn::ModuleBase& m) {
    if (const auto* fake = dynamic_cast<const FakeQuantize*>(&m)) {
      fake->commit(found_inf);
      done.insert(&fake->activation_post_process);
    } else if (const auto* observer = dynamic_cast<const Observer*>(&m); observer && !done.contains(observer)) {
      observer->commit(found_inf);
    }
  });
}

}  // namespace halfstep::quant
