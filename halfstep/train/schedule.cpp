// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/train/flag_numbers_internal.h"

namespace halfstep::training {
namespace {

constexpr const char* kForms =
    "expected constant, step[:EPOCHS[,FACTOR]], cosine[:LAST], linear[:LAST] or onecycle[:PART]";
constexpr double kPi = std::numbers::pi;
constexpr double kFirstFactor = 1e-3;  // a warm-up begins with this part of the rate

std::vector<double> numbers(const std::string& list, const std::string& whole) {
  return flag_numbers("--lr-schedule", kForms, list, whole);
}

// Of a run of `total` steps, `warmup` of them with a rising rate.
optim::Schedule make_schedule(const RateRule& rule, optim::Optimizer& optimizer, std::int64_t steps_per_epoch,
                              std::int64_t total, std::int64_t warmup) {
  if (rule.kind == RateRule::Kind::one_cycle) {
    // A run of a single step has no cycle: it makes the first of two.
    return optim::OneCycleLR(optimizer, {.max_lr = optimizer.base_lr(),
                                         .total_steps = std::max<std::int64_t>(total, 2),
                                         .pct_start = rule.pct_start,
                                         .cycle_momentum = false});
  }
  if (rule.kind == RateRule::Kind::cosine && rule.factor == 0) {
    return optim::WarmupCosineLR(
        optimizer, {.warmup_steps = std::min(warmup, total - 1), .total_steps = total, .start_factor = kFirstFactor});
  }
  return {optimizer, [rule, warmup, steps_per_epoch, total](double base, std::int64_t step) {
            if (step < warmup) {
              const double part = static_cast<double>(step) / static_cast<double>(warmup);
              return base * (kFirstFactor + (1 - kFirstFactor) * part);
            }
            if (rule.kind == RateRule::Kind::constant) return base;
            if (rule.kind == RateRule::Kind::step) {
              const std::int64_t changes = step / steps_per_epoch / rule.step_epochs;
              return base * std::pow(rule.factor, static_cast<double>(changes));
            }
            const double all = static_cast<double>(std::max<std::int64_t>(total - warmup, 1));
            const double part = std::min(static_cast<double>(step - warmup) / all, 1.0);
            const double left = rule.kind == RateRule::Kind::linear ? 1 - part : (1 + std::cos(kPi * part)) / 2;
            return base * (rule.factor + (1 - rule.factor) * left);
          }};
}

}  // namespace

RateRule parse_rate_rule(const std::string& text, double warmup_epochs) {
  const std::size_t colon = text.find(':');
  const std::string kind = text.substr(0, colon);
  const auto list = colon == std::string::npos ? std::vector<double>{} : numbers(text.substr(colon + 1), text);
  if (!(warmup_epochs >= 0) || !std::isfinite(warmup_epochs)) {
    fail<Error>("--warmup-epochs: expected a number of at least 0, got {}", warmup_epochs);
  }
  RateRule rule;
  std::size_t most = 0;
  if (kind == "constant") {
    rule.kind = RateRule::Kind::constant;
  } else if (kind == "step") {
    rule.kind = RateRule::Kind::step;
    most = 2;
  } else if (kind == "cosine" || kind == "linear") {
    rule.kind = kind == "cosine" ? RateRule::Kind::cosine : RateRule::Kind::linear;
    rule.factor = list.empty() ? 0 : list[0];
    if (!(rule.factor >= 0) || rule.factor > 1) {
      fail<Error>("--lr-schedule: expected a last part of the rate from 0 to 1 in '{}', got {}", text, rule.factor);
    }
    most = 1;
  } else if (kind == "onecycle") {
    rule.kind = RateRule::Kind::one_cycle;
    most = 1;
  } else {
    fail<Error>("--lr-schedule: {}, got '{}'", kForms, text);
  }
  if (list.size() > most) fail<Error>("--lr-schedule: {}, got '{}'", kForms, text);
  if (rule.kind == RateRule::Kind::step && !list.empty()) {
    if (list[0] < 1 || list[0] > 1e9 || list[0] != std::floor(list[0])) {
      fail<Error>("--lr-schedule: expected a whole number of epochs of at least 1 in '{}', got {}", text, list[0]);
    }
    rule.step_epochs = static_cast<std::int64_t>(list[0]);
    if (list.size() == 2) rule.factor = list[1];
    if (!(rule.factor > 0) || rule.factor > 1) {
      fail<Error>("--lr-schedule: expected a factor above 0 and at most 1 in '{}', got {}", text, rule.factor);
    }
  }
  if (rule.kind == RateRule::Kind::one_cycle) {
    if (!list.empty()) rule.pct_start = list[0];
    if (!(rule.pct_start > 0) || rule.pct_start >= 1) {
      fail<Error>("--lr-schedule: expected a part between 0 and 1 in '{}', got {}", text, rule.pct_start);
    }
    if (warmup_epochs != 0) fail<Error>("--warmup-epochs: onecycle has a rise of its own; write onecycle:PART instead");
  }
  rule.warmup_epochs = warmup_epochs;
  return rule;
}

RateSchedule::RateSchedule(const RateRule& rule, optim::Optimizer& optimizer, std::int64_t steps_per_epoch, int epochs,
                           const WarmupOptions& warmup)
    : optimizer_(optimizer), options_(warmup), last_(std::max<std::int64_t>(steps_per_epoch * epochs, 1) - 1) {
  if (rule.warmup_epochs > 0) {
    warmup_ = std::max<std::int64_t>(std::llround(rule.warmup_epochs * static_cast<double>(steps_per_epoch)),
                                     warmup.least_steps);
  }
  if (warmup_ > 0 && warmup.momentum) {
    for (int g = 0; g < optimizer.num_groups(); ++g) momentum_.push_back(optimizer.momentum(g));
  }
  if (rule.kind == RateRule::Kind::constant && warmup_ == 0) return;
  schedule_.emplace(make_schedule(rule, optimizer, std::max<std::int64_t>(steps_per_epoch, 1), last_ + 1, warmup_));
  // A step rule, and a constant one after its warm-up, know no end.
  if (rule.kind == RateRule::Kind::step || rule.kind == RateRule::Kind::constant) last_ = INT64_MAX;
}

void RateSchedule::set(std::int64_t position) {
  if (!schedule_) return;
  const std::int64_t step = std::min(position, last_);
  auto state = schedule_->state_dict();
  state["steps"] = static_cast<double>(step);
  schedule_->load_state_dict(state);
  if (warmup_ == 0) return;
  const double part = std::min(static_cast<double>(step) / static_cast<double>(warmup_), 1.0);
  if (options_.bias_lr && part < 1) {
    const int biases = optimizer_.num_groups() - 1;
    optimizer_.set_lr(biases, *options_.bias_lr + (optimizer_.base_lr(biases) - *options_.bias_lr) * part);
  }
  for (std::size_t g = 0; g < momentum_.size(); ++g) {
    optimizer_.set_momentum(static_cast<int>(g), *options_.momentum + (momentum_[g] - *options_.momentum) * part);
  }
}

}  // namespace halfstep::training
