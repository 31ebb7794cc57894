// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/resume.h"

#include <utility>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/runtime/log.h"

namespace halfstep::train {
namespace {

// Optimizer, schedule and data are made by the flags: one that says something else would be ignored, or change the run.
void check_recipe(const Checkpoint& c, const TrainConfig& config, const std::string& file) {
  const auto given = recipe(config);
  // What it was made by before what follows from that: a schedule that is another one has other epochs too.
  const auto check = [&](const std::string& flag, const std::string& value) {
    const auto saved = c.recipe.find(flag);
    if (saved == c.recipe.end() || saved->second == value) return;
    fail<IoError>("{}: the run had --{} {}, got {}; a run goes on with the flags that it began with", file, flag,
                  saved->second, value);
  };
  for (const auto& [flag, value] : given) {
    if (flag != "epochs") check(flag, value);
  }
  if (const auto epochs = given.find("epochs"); epochs != given.end()) check("epochs", epochs->second);
}

// As the optimizer's flags; the scale itself has moved since a dynamic one began.
void check_scaler(const Checkpoint& c, const TrainConfig& config, const amp::GradScaler& scaler,
                  const std::string& file) {
  if (c.amp != amp_text(config)) return;  // another precision, another scaler: warned of
  if (c.scaler.empty() != !scaler.is_enabled()) {
    fail<IoError>(
        "{}: the run was trained {} a loss scale, got --loss-scale {}; a run goes on with the flags that it began "
        "with",
        file, c.scaler.empty() ? "without" : "with", config.loss_scale);
  }
  if (c.scaler.empty()) return;
  const amp::GradScalerOptions& o = scaler.options();
  std::vector<std::pair<const char*, double>> flags;
  if (o.dynamic) {
    flags = {{"growth_factor", o.growth_factor},
             {"backoff_factor", o.backoff_factor},
             {"growth_interval", static_cast<double>(o.growth_interval)}};
  } else {
    flags = {{"scale", o.init_scale}};
  }
  for (const auto& [name, given] : flags) {
    const auto saved = c.scaler.find(name);
    if (saved == c.scaler.end() || saved->second == given) continue;
    fail<IoError>("{}: the run's loss scale had {} {}, got {}; pass the --loss-scale of the first run", file, name,
                  saved->second, given);
  }
}

}  // namespace

void check_resume(const Checkpoint& c, const TrainConfig& config, const optim::Optimizer& optimizer,
                  const amp::GradScaler& scaler, std::int64_t samples, const std::string& file) {
  if (c.model != config.model) {
    fail<IoError>("{}: expected a checkpoint of {}, got one of {}", file, config.model, c.model);
  }
  if (c.optimizer_kind != optimizer.kind()) {
    fail<IoError>("{}: expected the state of {}, got that of {}; pass the --optimizer of the first run", file,
                  optimizer.kind(), c.optimizer_kind);
  }
  if (c.batch_size != config.batch_size || c.loader_seed != config.seed) {
    fail<IoError>(
        "{}: the run had --batch-size {} --seed {}, got {} and {}; the order of the samples follows from both", file,
        c.batch_size, c.loader_seed, config.batch_size, config.seed);
  }
  if (c.samples != samples) {
    fail<IoError>("{}: the run had {} training samples, got {}; pass the --data and --limit of the first run", file,
                  c.samples, samples);
  }
  if (c.accumulate != config.accumulate && c.loader.batch != 0) {
    fail<IoError>("{}: the run had --accumulate {}, got {}; it can change at the end of an epoch only", file,
                  c.accumulate, config.accumulate);
  }
  check_recipe(c, config, file);
  if (!c.classes.empty() && !config.classes.empty() && c.classes != config.classes) {
    fail<IoError>("{}: the run had {} classes, {} to {}, got {}, {} to {}; pass the --data of the first run", file,
                  c.classes.size(), c.classes.front(), c.classes.back(), config.classes.size(), config.classes.front(),
                  config.classes.back());
  }
  check_scaler(c, config, scaler, file);
  if (c.amp != amp_text(config)) {
    log(LogLevel::warning, fmt::format("{}: the run had --amp {}, it goes on with {}", file, c.amp, amp_text(config)));
  }
}

}  // namespace halfstep::train
