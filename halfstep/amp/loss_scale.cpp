// SPDX-License-Identifier: Apache-2.0
#include "halfstep/amp/loss_scale.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/recorder.h"
#include "halfstep/runtime/log.h"

namespace halfstep::amp {
namespace {

// The smallest normal float. Below, a scale loses digits, and from 2^-128 on its inverse is infinite: 0 / 0 is NaN, so
// that no gradient is finite any more and no step would ever be made again.
constexpr float kLeastScale = std::numeric_limits<float>::min();
// Overflows in a row that a scale which is merely too large explains; with more, something else is wrong. From 65536 on
// the scale is then below 1.
constexpr int kManyInARow = 20;

constexpr const char* kGrowthKey = "_growth_tracker";    // PyTorch's
constexpr const char* kOldGrowthKey = "growth_tracker";  // of earlier versions' files

float floor_of(const LossScaleRules& r) { return std::max(static_cast<float>(r.floor), kLeastScale); }

const KernelTable& update_kernels() {
  static const KernelTable& table = kernel_table("amp_update_scale");
  return table;
}

void check_scale(double scale) {
  if (!(static_cast<float>(scale) > 0) || !(scale <= std::numeric_limits<float>::max())) {
    fail<AmpError>("loss_scale: expected a scale above 0 that float32 can hold, got {}", scale);
  }
}

void check(const LossScaleRules& r) {
  check_scale(r.init_scale);
  if (!(r.growth_factor > 1) || !std::isfinite(r.growth_factor)) {
    fail<AmpError>("loss_scale: expected a growth factor above 1, got {}", r.growth_factor);
  }
  if (!(r.backoff_factor > 0) || !(r.backoff_factor < 1)) {
    fail<AmpError>("loss_scale: expected a backoff factor between 0 and 1, got {}", r.backoff_factor);
  }
  if (r.growth_interval < 1) {
    fail<AmpError>("loss_scale: expected a growth interval of at least 1, got {}", r.growth_interval);
  }
  if (!(r.floor >= 0) || !(r.cap >= 0) || (r.cap > 0 && r.cap < r.floor)) {
    fail<AmpError>("loss_scale: expected 0 <= floor <= cap, got {} and {}", r.floor, r.cap);
  }
  if (r.init_scale < r.floor) {
    fail<AmpError>("loss_scale: expected a first scale of at least the floor, {}, got {}", r.floor, r.init_scale);
  }
  if (r.hysteresis < 1) fail<AmpError>("loss_scale: expected a hysteresis of at least 1, got {}", r.hysteresis);
  if (r.overflow_limit < 0) {
    fail<AmpError>("loss_scale: expected a limit of at least 0 overflows in a row, got {}", r.overflow_limit);
  }
  if (r.error_at_floor && r.floor == 0) {
    fail<AmpError>("loss_scale: expected a floor above 0 where an overflow at the floor is an error, got 0");
  }
}

// Systems that have one factor for both ways.
LossScaleRules both_ways(const char* who, double init, double factor, int window) {
  if (!(factor > 1) || !std::isfinite(factor)) {
    fail<AmpError>("{}: expected a scale factor above 1, got {}", who, factor);
  }
  return {.init_scale = init, .growth_factor = factor, .backoff_factor = 1 / factor, .growth_interval = window};
}

std::vector<int> fresh_counters(const LossScaleRules& rules) {
  std::vector<int> result(HALFSTEP_SCALE_COUNTERS);
  result[HALFSTEP_SCALE_GROWTH] = rules.late_growth ? -1 : 0;
  return result;
}

}  // namespace

LossScalePolicy::LossScalePolicy(const LossScaleRules& rules) : rules_(rules) { check(rules); }

LossScalePolicy LossScalePolicy::fixed(double scale) {
  return LossScalePolicy({.init_scale = scale, .dynamic = false});
}
LossScalePolicy LossScalePolicy::torch(const TorchScale& o) {
  return LossScalePolicy({.init_scale = o.init_scale,
                          .growth_factor = o.growth_factor,
                          .backoff_factor = o.backoff_factor,
                          .growth_interval = o.growth_interval});
}
LossScalePolicy LossScalePolicy::mindspore(double init_scale, double scale_factor, int scale_window) {
  if (!(init_scale >= 1)) fail<AmpError>("mindspore: expected a scale of at least 1, got {}", init_scale);
  LossScaleRules rules = both_ways("mindspore", init_scale, scale_factor, scale_window);
  rules.floor = 1;
  return LossScalePolicy(rules);
}
LossScalePolicy LossScalePolicy::apex(const ApexScale& o) {
  LossScaleRules rules = both_ways("apex", o.init_scale, o.scale_factor, o.scale_window);
  rules.floor = o.min_loss_scale;
  rules.cap = o.max_loss_scale;
  return LossScalePolicy(rules);
}
LossScalePolicy LossScalePolicy::keras(const KerasScale& o) {
  return LossScalePolicy({.init_scale = o.initial_scale, .growth_interval = o.dynamic_growth_steps});
}
LossScalePolicy LossScalePolicy::jmp(const JmpScale& o) {
  LossScaleRules rules = both_ways("jmp", o.loss_scale, o.factor, o.period);
  rules.floor = o.min_loss_scale;
  return LossScalePolicy(rules);
}
LossScalePolicy LossScalePolicy::deepspeed(const DeepSpeedScale& o) {
  LossScaleRules rules = both_ways("deepspeed", o.init_scale, o.scale_factor, o.scale_window);
  rules.floor = o.min_scale;
  rules.hysteresis = o.hysteresis;
  rules.refill_on_good_step = o.consecutive_hysteresis;
  rules.late_growth = true;
  rules.error_at_floor = o.raise_error_at_min_scale;
  return LossScalePolicy(rules);
}
LossScalePolicy LossScalePolicy::megatron(const MegatronScale& o) {
  return LossScalePolicy({.init_scale = o.initial_scale,
                          .growth_factor = o.growth_factor,
                          .backoff_factor = o.backoff_factor,
                          .growth_interval = o.growth_interval,
                          .floor = o.min_scale,
                          .hysteresis = o.hysteresis});
}

LossScale::LossScale(const LossScalePolicy& policy)
    : policy_(policy),
      first_scale_(policy.rules().init_scale),
      first_counters_(fresh_counters(policy.rules())),
      next_row_(kManyInARow) {}

void LossScale::start(Device device) {
  if (started()) return;
  const NoGrad no_grad;
  scale_ = full({}, first_scale_, {.dtype = f32, .device = device});
  counters_ = halfstep::tensor(std::vector<double>(first_counters_.begin(), first_counters_.end()),
                               {HALFSTEP_SCALE_COUNTERS}, {.dtype = i32, .device = device});
}

void LossScale::set_policy(const LossScalePolicy& policy) {
  policy_ = policy;
  ++capture_generation();
}

void LossScale::update(const std::vector<Tensor>& found, std::function<std::string()> culprits) {
  if (!started()) fail<AmpError>("loss_scale: update() before anything was scaled");
  for (const Tensor& t : found) {
    check_defined(t, "loss_scale", "what the step found");
    if (t.numel() != 1 || (t.dtype() != DType::f32 && t.dtype() != DType::boolean) || t.device() != scale_.device()) {
      fail<AmpError>("loss_scale: expected what a step found as one element of f32 or bool on {}, got {} {} on {}",
                     scale_.device().str(), name(t.dtype()), t.sizes().str(), t.device().str());
    }
  }
  const LossScaleRules& r = policy_.rules();
  if (!r.dynamic) return;
  std::vector<const Tensor*> in{&scale_, &counters_};
  for (const Tensor& t : found) in.push_back(&t);
  const Tensor* out[] = {&scale_, &counters_};
  const ScaleUpdateAttributes attributes{
      .growth_factor = r.growth_factor,
      .backoff_factor = r.backoff_factor,
      .growth_interval = r.growth_interval,
      .hysteresis = r.hysteresis,
      .restart = r.late_growth ? -1 : 0,
      .floor = floor_of(r),
      .cap = r.cap > 0 ? static_cast<float>(r.cap) : std::numeric_limits<float>::max(),
      .refill_on_good_step = r.refill_on_good_step,
  };
  run_kernel(update_kernels(), "amp_update_scale", scale_.device(), DType::f32, in, out, attributes);
  scale_.storage()->bump_version();
  counters_.storage()->bump_version();
  // On the CPU the counters lie here: no wait, and nothing of the step depends on them. Elsewhere looking would make
  // the host wait; it is done when somebody reads the scale.
  if (!scale_.device().is_cpu()) {
    if (KernelRecorder* recorder = kernel_recorder()) [[unlikely]]
      recorder->host([this, culprits] { culprits_ = culprits; });
    if (!scale_.device().is_meta()) culprits_ = std::move(culprits);  // there nobody can read the scale
    return;
  }
  const auto* counters = static_cast<const int*>(counters_.impl()->data());
  const auto* scale = static_cast<const float*>(scale_.impl()->data());
  if (KernelRecorder* recorder = kernel_recorder()) [[unlikely]]
    recorder->host([this, counters, scale, culprits] { look(counters, *scale, culprits); });
  const CapturePause pause;  // what overflowed is read only to be said
  look(counters, *scale, culprits);
}

// The log and the errors of a policy with limits.
void LossScale::look(const int* counters, float scale, const std::function<std::string()>& culprits) const {
  const LossScaleRules& r = policy_.rules();
  const auto what = [&] {
    const std::string names = culprits ? culprits() : std::string();
    return names.empty() ? names : ", last in " + names;
  };
  const int at_floor = counters[HALFSTEP_SCALE_AT_FLOOR], in_a_row = counters[HALFSTEP_SCALE_IN_A_ROW];
  if (in_a_row < kManyInARow) next_row_ = kManyInARow;
  // The first time, and again when it has happened twice as often: not a line a step.
  if (at_floor >= next_logged_) {
    next_logged_ = 2 * at_floor;
    log(LogLevel::warning,
        fmt::format("loss_scale: the loss scale is at its floor of {} and gradients still overflow ({} so far){}; the "
                    "loss or the model produces values that 16 bits can't hold",
                    floor_of(r), at_floor, what()));
  } else if (in_a_row >= next_row_) {
    next_row_ = 2 * in_a_row;
    log(LogLevel::warning,
        fmt::format(
            "loss_scale: gradients overflowed in {} steps in a row, and the loss scale is down to {}{}; is there "
            "an infinity or NaN in the data or the weights?",
            in_a_row, scale, what()));
  }
  if (r.error_at_floor && counters[HALFSTEP_SCALE_STUCK] > 0) {
    fail<OverflowError>(
        "loss_scale: gradients overflow although the loss scale is at its floor of {}{}; expected a loss and a model "
        "whose values 16 bits can hold",
        r.floor, what());
  }
  if (r.overflow_limit > 0 && in_a_row > r.overflow_limit) {
    fail<OverflowError>(
        "loss_scale: expected at most {} overflows in a row, got {}{}; is there an infinity or NaN in the data or the "
        "weights?",
        r.overflow_limit, in_a_row, what());
  }
}

std::vector<int> LossScale::counters() const {
  if (!started()) return first_counters_;
  const auto values = counters_.to_vector<double>();
  return {values.begin(), values.end()};
}

double LossScale::value() const {
  if (!started()) return first_scale_;
  const LossScaleRules& r = policy_.rules();
  const float now = scale_.item<float>();
  // The counters are a second wait: they matter where there are limits, or where the scale has fallen far.
  if (r.dynamic && (r.floor > 0 || r.overflow_limit > 0 || now < 1)) look(counters().data(), now, culprits_);
  return static_cast<double>(now);
}

void LossScale::set(double scale) {
  check_scale(scale);
  first_scale_ = scale;
  if (!started()) return;
  const NoGrad no_grad;
  scale_.fill_(scale);
}

int LossScale::growth_tracker() const { return counters()[HALFSTEP_SCALE_GROWTH]; }
int LossScale::overflows_in_a_row() const { return counters()[HALFSTEP_SCALE_IN_A_ROW]; }

std::map<std::string, double> LossScale::state_dict() const {
  const LossScaleRules& r = policy_.rules();
  const std::vector<int> now = counters();
  std::map<std::string, double> state{{"scale", value()}, {kGrowthKey, now[HALFSTEP_SCALE_GROWTH]}};
  if (r.hysteresis > 1) state["hysteresis_used"] = now[HALFSTEP_SCALE_USED];
  if (r.overflow_limit > 0) state["overflows_in_a_row"] = now[HALFSTEP_SCALE_IN_A_ROW];
  return state;
}

void LossScale::load_state_dict(const std::map<std::string, double>& state) {
  const auto get = [&](const char* key) {
    const auto it = state.find(key);
    if (it == state.end()) fail<AmpError>("loss_scale: the state has no '{}'", key);
    return it->second;
  };
  const auto whole = [](const char* key, double value, int least) {
    if (!(value >= least && value <= std::numeric_limits<int>::max()) || value != std::floor(value)) {
      fail<AmpError>("loss_scale: expected a whole number of at least {} for '{}' of the state, got {}", least, key,
                     value);
    }
    return static_cast<int>(value);
  };
  const double scale = get("scale");
  check_scale(scale);
  std::vector<int> counters(HALFSTEP_SCALE_COUNTERS);
  const char* const growth = state.contains(kOldGrowthKey) && !state.contains(kGrowthKey) ? kOldGrowthKey : kGrowthKey;
  counters[HALFSTEP_SCALE_GROWTH] = whole(growth, get(growth), policy_.rules().late_growth ? -1 : 0);
  // States of policies that don't count these have none.
  const auto optional = [&](const char* key) { return state.contains(key) ? whole(key, get(key), 0) : 0; };
  counters[HALFSTEP_SCALE_USED] = std::min(optional("hysteresis_used"), policy_.rules().hysteresis);
  counters[HALFSTEP_SCALE_IN_A_ROW] = optional("overflows_in_a_row");
  first_scale_ = scale;
  first_counters_ = counters;
  next_logged_ = 1;
  next_row_ = kManyInARow;
  if (!started()) return;
  const NoGrad no_grad;
  scale_.fill_(scale);
  counters_.copy_(halfstep::tensor(std::vector<double>(counters.begin(), counters.end()), {HALFSTEP_SCALE_COUNTERS},
                                   {.dtype = i32, .device = scale_.device()}));
}

}  // namespace halfstep::amp
