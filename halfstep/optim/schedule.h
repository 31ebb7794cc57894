// SPDX-License-Identifier: Apache-2.0
// Learning-rate schedules, with PyTorch's names and values (torch.optim.lr_scheduler). They are computed in closed form
// from the number of steps made, so that nothing drifts and a saved count is the complete state.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/optim/optimizer.h"

namespace halfstep::optim {

/// A schedule: after each step() the optimizer's groups have the rate that the rule returns for the number of steps so
/// far. With a user-supplied rule it is PyTorch's LambdaLR (whose function returns a factor; this one returns the
/// rate). The optimizer must outlive it.
class HS_API Schedule {
 public:
  /// The rate after `step` steps, for a group whose rate was `base` when its first schedule was created.
  using Rule = std::function<double(double base, std::int64_t step)>;

  /// Sets the rates of step 0 immediately.
  Schedule(Optimizer& optimizer, Rule rule);
  virtual ~Schedule();
  Schedule(const Schedule&) = default;
  Schedule& operator=(const Schedule&) = default;

  /// Advances by one step; call it after the optimizer's.
  void step();
  /// Advances by one step if the optimizer's step ran. A step that a scaler skipped doesn't count, so that schedule and
  /// optimizer stay together. Waits for the device.
  void step(const amp::StepResult& result);
  /// Steps made.
  std::int64_t steps() const { return steps_; }
  /// Its class: `StepLR`; `Schedule` for a rule of the user's.
  virtual std::string kind() const { return "Schedule"; }
  /// The most recently set rates of all groups.
  std::vector<double> rates() const;

  /// `steps`, and `group0.base_lr` for each group.
  std::map<std::string, double> state_dict() const;
  /// Restores a saved state and sets its rates. Throws Error if it has a different number of groups.
  void load_state_dict(const std::map<std::string, double>& state);

 protected:
  /// For schedules that also change the momentum.
  Schedule(Optimizer& optimizer, Rule rule, std::function<double(std::int64_t step)> momentum);

 private:
  friend class SequentialLR;
  void apply();

  Optimizer* optimizer_;
  Rule rule_;
  std::function<double(std::int64_t step)> momentum_;
  std::vector<double> base_;
  std::int64_t steps_ = 0;
};

/// Options of StepLR.
struct StepLROptions {
  std::int64_t step_size;  ///< steps between two changes, at least 1
  double gamma = 0.1;      ///< factor of each change
};
/// base * gamma^(step / step_size), rounded down.
class HS_API StepLR : public Schedule {
 public:
  StepLR(Optimizer& optimizer, const StepLROptions& options);
  std::string kind() const override { return "StepLR"; }
};

/// Options of MultiStepLR.
struct MultiStepLROptions {
  std::vector<std::int64_t> milestones;  ///< steps at which the rate changes; one listed twice counts twice
  double gamma = 0.1;
};
/// base * gamma^(number of milestones passed).
class HS_API MultiStepLR : public Schedule {
 public:
  MultiStepLR(Optimizer& optimizer, const MultiStepLROptions& options);
  std::string kind() const override { return "MultiStepLR"; }
};

/// base * gamma^step.
class HS_API ExponentialLR : public Schedule {
 public:
  ExponentialLR(Optimizer& optimizer, double gamma);
  std::string kind() const override { return "ExponentialLR"; }
};

/// Options of CosineAnnealingLR.
struct CosineAnnealingLROptions {
  std::int64_t t_max;  ///< steps from the highest to the lowest rate, at least 1
  double eta_min = 0;  ///< the lowest rate
};
/// eta_min + (base - eta_min) (1 + cos(pi step / t_max)) / 2 (Loshchilov and Hutter, SGDR, 2017); past t_max it rises
/// again.
class HS_API CosineAnnealingLR : public Schedule {
 public:
  CosineAnnealingLR(Optimizer& optimizer, const CosineAnnealingLROptions& options);
  std::string kind() const override { return "CosineAnnealingLR"; }
};

/// Options of LinearLR.
struct LinearLROptions {
  double start_factor = 1.0 / 3;  ///< above 0, at most 1
  double end_factor = 1;          ///< 0 to 1
  std::int64_t total_iters = 5;   ///< steps from the first factor to the second, at least 1
};
/// A factor that moves in a straight line, then stays: warm-up when it rises.
class HS_API LinearLR : public Schedule {
 public:
  LinearLR(Optimizer& optimizer, const LinearLROptions& options = {});
  std::string kind() const override { return "LinearLR"; }
};

/// Schedules one after the other: schedule i + 1 starts from its step 0 at milestone i.
class HS_API SequentialLR : public Schedule {
 public:
  /// Throws Error unless there is one milestone less than schedules, in rising order.
  SequentialLR(Optimizer& optimizer, const std::vector<Schedule>& schedules,
               const std::vector<std::int64_t>& milestones);
  std::string kind() const override { return "SequentialLR"; }
};

/// Options of WarmupCosineLR.
struct WarmupCosineLROptions {
  std::int64_t warmup_steps;   ///< of a linear rise to the base rate; 0 for none
  std::int64_t total_steps;    ///< warm-up included
  double start_factor = 1e-3;  ///< first rate, as a part of the base rate
  double eta_min = 0;          ///< last rate
};
/// Linear warm-up, then half a cosine down to eta_min, where it stays.
class HS_API WarmupCosineLR : public Schedule {
 public:
  WarmupCosineLR(Optimizer& optimizer, const WarmupCosineLROptions& options);
  std::string kind() const override { return "WarmupCosineLR"; }
};

/// How OneCycleLR goes from one value to the next.
enum class Anneal : std::uint8_t { cosine, linear };

/// Options of OneCycleLR; the defaults are PyTorch's.
struct OneCycleLROptions {
  double max_lr;
  std::int64_t total_steps;  ///< at least 2; the rates of steps 0 to total_steps - 1 are defined
  double pct_start = 0.3;    ///< part of the cycle that rises
  Anneal anneal = Anneal::cosine;
  bool cycle_momentum = true;  ///< momentum (first beta of Adam) varies inversely with the rate
  double base_momentum = 0.85;
  double max_momentum = 0.95;
  double div_factor = 25;         ///< first rate: max_lr / div_factor
  double final_div_factor = 1e4;  ///< last rate: first rate / final_div_factor
  bool three_phase = false;       ///< up, down as long, then to the last rate; otherwise up and down to the last rate
};
/// One cycle of rate and momentum (Smith and Topin, Super-Convergence, 2018). step() throws Error past the last step.
class HS_API OneCycleLR : public Schedule {
 public:
  OneCycleLR(Optimizer& optimizer, const OneCycleLROptions& options);
  std::string kind() const override { return "OneCycleLR"; }
};

/// Whether a metric is better when it is smaller or larger.
enum class PlateauMode : std::uint8_t { min, max };
/// Whether the threshold of ReduceLROnPlateau is a part of the best value, or a difference.
enum class ThresholdMode : std::uint8_t { relative, absolute };

/// Options of ReduceLROnPlateau; the defaults are PyTorch's.
struct ReduceLROnPlateauOptions {
  PlateauMode mode = PlateauMode::min;
  double factor = 0.1;         ///< under 1
  std::int64_t patience = 10;  ///< number of steps without improvement that are tolerated
  double threshold = 1e-4;     ///< what counts as an improvement
  ThresholdMode threshold_mode = ThresholdMode::relative;
  std::int64_t cooldown = 0;  ///< steps after a reduction that don't count
  double min_lr = 0;
  double eps = 1e-8;  ///< smaller changes aren't made
};
/// Lowers the rates when a metric has stopped improving. A NaN is no improvement.
class HS_API ReduceLROnPlateau {
 public:
  ReduceLROnPlateau(Optimizer& optimizer, const ReduceLROnPlateauOptions& options = {});
  /// Advances by one step with the metric's new value.
  void step(double metric);
  /// Best value so far.
  double best() const { return best_; }
  std::map<std::string, double> state_dict() const;
  /// Throws Error for an incomplete state. The rates themselves are in the optimizer's state.
  void load_state_dict(const std::map<std::string, double>& state);

 private:
  bool improves(double metric) const;

  Optimizer* optimizer_;
  ReduceLROnPlateauOptions options_;
  double best_;
  std::int64_t bad_steps_ = 0;
  std::int64_t cooldown_left_ = 0;
};

}  // namespace halfstep::optim
