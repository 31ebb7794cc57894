// SPDX-License-Identifier: Apache-2.0
#include "halfstep/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/ops/recorder.h"

namespace halfstep::optim {
namespace {

double half_cosine(double from, double to, double part) {
  return to + (from - to) * (1 + std::cos(std::numbers::pi * part)) / 2;
}

void check_at_least(const char* schedule, const char* what, std::int64_t value, std::int64_t least) {
  if (value < least) fail<Error>("{}: expected {} of at least {}, got {}", schedule, what, least, value);
}

double number(const std::map<std::string, double>& state, const std::string& key) {
  const auto it = state.find(key);
  if (it == state.end()) fail<Error>("schedule: the state has no '{}'; is it of another schedule?", key);
  return it->second;
}

Schedule::Rule step_rule(const StepLROptions& o) {
  check_at_least("StepLR", "step_size", o.step_size, 1);
  return
      [o](double base, std::int64_t step) { return base * std::pow(o.gamma, static_cast<double>(step / o.step_size)); };
}

Schedule::Rule multi_step_rule(MultiStepLROptions o) {
  std::sort(o.milestones.begin(), o.milestones.end());
  return [o](double base, std::int64_t step) {
    const auto passed = std::upper_bound(o.milestones.begin(), o.milestones.end(), step) - o.milestones.begin();
    return base * std::pow(o.gamma, static_cast<double>(passed));
  };
}

Schedule::Rule cosine_rule(const CosineAnnealingLROptions& o) {
  check_at_least("CosineAnnealingLR", "t_max", o.t_max, 1);
  return [o](double base, std::int64_t step) {
    return half_cosine(base, o.eta_min, static_cast<double>(step) / static_cast<double>(o.t_max));
  };
}

Schedule::Rule linear_rule(const LinearLROptions& o) {
  check_at_least("LinearLR", "total_iters", o.total_iters, 1);
  if (!(o.start_factor > 0 && o.start_factor <= 1) || !(o.end_factor >= 0 && o.end_factor <= 1)) {
    fail<Error>("LinearLR: expected factors from 0 (start: above 0) to 1, got {} and {}", o.start_factor, o.end_factor);
  }
  return [o](double base, std::int64_t step) {
    const double part = static_cast<double>(std::min(step, o.total_iters)) / static_cast<double>(o.total_iters);
    return base * (o.start_factor + (o.end_factor - o.start_factor) * part);
  };
}

Schedule::Rule warmup_cosine_rule(const WarmupCosineLROptions& o) {
  check_at_least("WarmupCosineLR", "warmup_steps", o.warmup_steps, 0);
  check_at_least("WarmupCosineLR", "total_steps", o.total_steps, o.warmup_steps + 1);
  return [o](double base, std::int64_t step) {
    if (step < o.warmup_steps) {
      const double part = static_cast<double>(step) / static_cast<double>(o.warmup_steps);
      return base * (o.start_factor + (1 - o.start_factor) * part);
    }
    const double part =
        static_cast<double>(step - o.warmup_steps) / static_cast<double>(o.total_steps - o.warmup_steps);
    return half_cosine(base, o.eta_min, std::min(part, 1.0));
  };
}

// A value that goes through stages, each ending at a step that need not be whole.
struct Stages {
  struct Stage {
    double end, from, to;
  };
  std::vector<Stage> stages;
  Anneal anneal;
  double at(std::int64_t step) const {
    double begin = 0;
    for (std::size_t i = 0; i < stages.size(); ++i) {
      const Stage& s = stages[i];
      if (static_cast<double>(step) <= s.end || i + 1 == stages.size()) {
        const double part = (static_cast<double>(step) - begin) / (s.end - begin);
        return anneal == Anneal::cosine ? half_cosine(s.from, s.to, part) : s.from + (s.to - s.from) * part;
      }
      begin = s.end;
    }
    return 0;
  }
};

Stages one_cycle_stages(const OneCycleLROptions& o, bool momentum) {
  const double last = static_cast<double>(o.total_steps - 1);
  const double rise = o.pct_start * static_cast<double>(o.total_steps) - 1;
  const double first = momentum ? o.max_momentum : o.max_lr / o.div_factor;
  const double peak = momentum ? o.base_momentum : o.max_lr;
  const double end = momentum ? o.max_momentum : first / o.final_div_factor;
  if (o.three_phase) {
    const double fall = 2 * o.pct_start * static_cast<double>(o.total_steps) - 2;
    return {{{rise, first, peak}, {fall, peak, first}, {last, first, end}}, o.anneal};
  }
  return {{{rise, first, peak}, {last, peak, end}}, o.anneal};
}

Schedule::Rule one_cycle_rule(const OneCycleLROptions& o) {
  check_at_least("OneCycleLR", "total_steps", o.total_steps, 2);
  if (!(o.pct_start > 0 && o.pct_start < 1)) {
    fail<Error>("OneCycleLR: expected pct_start between 0 and 1, got {}", o.pct_start);
  }
  if (!(o.max_lr > 0) || !(o.div_factor > 0) || !(o.final_div_factor > 0)) {
    fail<Error>("OneCycleLR: expected max_lr, div_factor and final_div_factor above 0, got {}, {}, {}", o.max_lr,
                o.div_factor, o.final_div_factor);
  }
  return [o, stages = one_cycle_stages(o, false)](double, std::int64_t step) {
    if (step >= o.total_steps) {
      fail<Error>("OneCycleLR: expected at most {} steps (total_steps - 1), this is step {}", o.total_steps - 1, step);
    }
    return stages.at(step);
  };
}

std::function<double(std::int64_t)> one_cycle_momentum(const OneCycleLROptions& o) {
  if (!o.cycle_momentum) return {};
  return [stages = one_cycle_stages(o, true)](std::int64_t step) { return stages.at(step); };
}

}  // namespace

Schedule::Schedule(Optimizer& optimizer, Rule rule) : Schedule(optimizer, std::move(rule), {}) {}

Schedule::Schedule(Optimizer& optimizer, Rule rule, std::function<double(std::int64_t)> momentum)
    : optimizer_(&optimizer), rule_(std::move(rule)), momentum_(std::move(momentum)) {
  if (!rule_) fail<Error>("schedule: expected a rule, got an empty function");
  for (int g = 0; g < optimizer.num_groups(); ++g) base_.push_back(optimizer.base_lr(g));
  apply();
}

Schedule::~Schedule() = default;

void Schedule::apply() {
  if (optimizer_->num_groups() != static_cast<int>(base_.size())) {
    fail<Error>("schedule: the optimizer had {} groups when the schedule was made and has {} now", base_.size(),
                optimizer_->num_groups());
  }
  for (int g = 0; g < optimizer_->num_groups(); ++g) {
    optimizer_->set_lr(g, rule_(base_[static_cast<std::size_t>(g)], steps_));
    if (momentum_) optimizer_->set_momentum(g, momentum_(steps_));
  }
}

void Schedule::step() {
  if (KernelRecorder* recorder = kernel_recorder()) [[unlikely]]
    recorder->host([this] { step(); });
  const CapturePause pause;
  ++steps_;
  try {
    apply();
  } catch (...) {
    --steps_;
    throw;
  }
}

void Schedule::step(const amp::StepResult& result) {
  if (result.ran()) step();
}

std::vector<double> Schedule::rates() const {
  std::vector<double> result;
  for (int g = 0; g < optimizer_->num_groups(); ++g) result.push_back(optimizer_->lr(g));
  return result;
}

std::map<std::string, double> Schedule::state_dict() const {
  std::map<std::string, double> state{{"steps", static_cast<double>(steps_)}};
  for (std::size_t g = 0; g < base_.size(); ++g) state[fmt::format("group{}.base_lr", g)] = base_[g];
  return state;
}

void Schedule::load_state_dict(const std::map<std::string, double>& state) {
  const auto steps = static_cast<std::int64_t>(number(state, "steps"));
  std::vector<double> base;
  for (std::size_t g = 0; g < base_.size(); ++g) base.push_back(number(state, fmt::format("group{}.base_lr", g)));
  if (state.size() != base.size() + 1) {
    fail<Error>("schedule: expected a state of {} groups, got {}", base.size(), state.size() - 1);
  }
  steps_ = steps;
  base_ = std::move(base);
  apply();
}

StepLR::StepLR(Optimizer& optimizer, const StepLROptions& options) : Schedule(optimizer, step_rule(options)) {}
MultiStepLR::MultiStepLR(Optimizer& optimizer, const MultiStepLROptions& options)
    : Schedule(optimizer, multi_step_rule(options)) {}
ExponentialLR::ExponentialLR(Optimizer& optimizer, double gamma)
    : Schedule(optimizer,
               [gamma](double base, std::int64_t step) { return base * std::pow(gamma, static_cast<double>(step)); }) {}
CosineAnnealingLR::CosineAnnealingLR(Optimizer& optimizer, const CosineAnnealingLROptions& options)
    : Schedule(optimizer, cosine_rule(options)) {}
LinearLR::LinearLR(Optimizer& optimizer, const LinearLROptions& options) : Schedule(optimizer, linear_rule(options)) {}
WarmupCosineLR::WarmupCosineLR(Optimizer& optimizer, const WarmupCosineLROptions& options)
    : Schedule(optimizer, warmup_cosine_rule(options)) {}
OneCycleLR::OneCycleLR(Optimizer& optimizer, const OneCycleLROptions& options)
    : Schedule(optimizer, one_cycle_rule(options), one_cycle_momentum(options)) {}

SequentialLR::SequentialLR(Optimizer& optimizer, const std::vector<Schedule>& schedules,
                           const std::vector<std::int64_t>& milestones)
    : Schedule(optimizer, [&]() -> Rule {
        if (schedules.empty() || milestones.size() + 1 != schedules.size() ||
            !std::is_sorted(milestones.begin(), milestones.end())) {
          fail<Error>(
              "SequentialLR: expected one milestone less than schedules, in rising order; got {} schedules and "
              "[{}]",
              schedules.size(), fmt::join(milestones, ", "));
        }
        std::vector<Rule> rules;
        for (const Schedule& s : schedules) {
          if (s.momentum_) fail<Error>("SequentialLR: a schedule that moves the momentum can't be one of several");
          rules.push_back(s.rule_);
        }
        return [rules, milestones](double base, std::int64_t step) {
          const auto i = std::upper_bound(milestones.begin(), milestones.end(), step) - milestones.begin();
          const auto k = static_cast<std::size_t>(i);
          return rules[k](base, k == 0 ? step : step - milestones[k - 1]);
        };
      }()) {}

ReduceLROnPlateau::ReduceLROnPlateau(Optimizer& optimizer, const ReduceLROnPlateauOptions& options)
    : optimizer_(&optimizer),
      options_(options),
      best_(options.mode == PlateauMode::min ? std::numeric_limits<double>::infinity()
                                             : -std::numeric_limits<double>::infinity()) {
  if (!(options.factor >= 0 && options.factor < 1)) {
    fail<Error>("ReduceLROnPlateau: expected a factor from 0 to under 1, got {}", options.factor);
  }
  check_at_least("ReduceLROnPlateau", "patience", options.patience, 0);
  check_at_least("ReduceLROnPlateau", "cooldown", options.cooldown, 0);
}

bool ReduceLROnPlateau::improves(double metric) const {
  const bool smaller = options_.mode == PlateauMode::min;
  double bar = best_;
  if (options_.threshold_mode == ThresholdMode::relative) {
    bar *= smaller ? 1 - options_.threshold : 1 + options_.threshold;
  } else {
    bar += smaller ? -options_.threshold : options_.threshold;
  }
  return smaller ? metric < bar : metric > bar;
}

void ReduceLROnPlateau::step(double metric) {
  if (improves(metric)) {
    best_ = metric;
    bad_steps_ = 0;
  } else {
    ++bad_steps_;
  }
  if (cooldown_left_ > 0) {
    --cooldown_left_;
    bad_steps_ = 0;
  }
  if (bad_steps_ <= options_.patience) return;
  for (int g = 0; g < optimizer_->num_groups(); ++g) {
    const double old = optimizer_->lr(g), reduced = std::max(old * options_.factor, options_.min_lr);
    if (old - reduced > options_.eps) optimizer_->set_lr(g, reduced);
  }
  cooldown_left_ = options_.cooldown;
  bad_steps_ = 0;
}

std::map<std::string, double> ReduceLROnPlateau::state_dict() const {
  return {{"best", best_},
          {"bad_steps", static_cast<double>(bad_steps_)},
          {"cooldown_left", static_cast<double>(cooldown_left_)}};
}

void ReduceLROnPlateau::load_state_dict(const std::map<std::string, double>& state) {
  const double best = number(state, "best"), bad = number(state, "bad_steps"), left = number(state, "cooldown_left");
  best_ = best;
  bad_steps_ = static_cast<std::int64_t>(bad);
  cooldown_left_ = static_cast<std::int64_t>(left);
}

}  // namespace halfstep::optim
