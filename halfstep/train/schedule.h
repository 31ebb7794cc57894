// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "halfstep/optim/schedule.h"

namespace halfstep::training {

/// The course of the learning rate over a run; epochs count from 0.
struct RateRule {
  /// What it follows after the warm-up.
  enum class Kind : std::uint8_t { constant, step, cosine, linear, one_cycle };
  Kind kind = Kind::constant;
  std::int64_t step_epochs = 30;  ///< step: epochs between two changes
  double factor = 0.1;            ///< step: of each change; cosine and linear: last rate, as a part of the highest
  double pct_start = 0.3;         ///< one_cycle: part of the run in which the rate rises
  double warmup_epochs = 0;       ///< of a linear rise from a thousandth of the rate; not for one_cycle
};

/// How a warm-up goes beside the rate's rise.
struct WarmupOptions {
  std::int64_t least_steps = 0;         ///< a warm-up is at least so long, where there is one
  std::optional<double> momentum = {};  ///< of its first step, from where it rises to the optimizer's; none: no change
  std::optional<double> bias_lr = {};   ///< rate of the optimizer's last group in its first step, whence it falls
};

/// `constant`; `step`, `step:N` or `step:N,FACTOR` (times FACTOR every N epochs: 30 and 0.1, as the ImageNet recipe);
/// `cosine` or `cosine:LAST` (half a cosine to LAST times the rate at the end, 0); `linear` or `linear:LAST` (a
/// straight line to there); `onecycle` or `onecycle:PART` (from 1/25 of the rate up to it in the first PART of the run,
/// 0.3, then down to 1/250,000: PyTorch's OneCycleLR, with the momentum left alone). Throws Error naming what was
/// expected.
HS_API RateRule parse_rate_rule(const std::string& text, double warmup_epochs = 0);

/// Sets an optimizer's rates for each step of a run. Its state is the number of steps made: see optim/schedule.h.
class HS_API RateSchedule {
 public:
  /// A run of `epochs` epochs of `steps_per_epoch` steps each. The optimizer must outlive it.
  RateSchedule(const RateRule& rule, optim::Optimizer& optimizer, std::int64_t steps_per_epoch, int epochs,
               const WarmupOptions& warmup = {});
  /// Sets the rates of the step that has `position` steps before it. Past the end of the run they stay.
  void set(std::int64_t position);

 private:
  optim::Optimizer& optimizer_;
  WarmupOptions options_;
  std::int64_t warmup_ = 0;                  // steps
  std::vector<double> momentum_ = {};        // of each group, behind the warm-up
  std::optional<optim::Schedule> schedule_;  // none for a constant rate
  std::int64_t last_;
};

}  // namespace halfstep::training
