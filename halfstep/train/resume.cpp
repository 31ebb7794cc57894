// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/resume.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/runtime/log.h"
#include "halfstep/train/networks.h"

namespace halfstep::training {
namespace {

// Optimizer, schedule and data are made by the flags: one that says something else would be ignored, or change the run.
void check_recipe(const Checkpoint& c, const TrainConfig& config, const std::string& file) {
  const auto given = recipe(config);
  // What it was made by before what follows from that: a schedule that is another one has other epochs too.
  const auto check = [&](const std::string& flag, const std::string& value) {
    const auto saved = c.recipe.find(flag);
    if (saved == c.recipe.end() || saved->second == value) return;
    fail<IoError>("{}: the run had --{} {}, got {}; a run resumes with the flags it started with", file, flag,
                  saved->second, value);
  };
  for (const auto& [flag, value] : given) {
    if (flag != "epochs") check(flag, value);
  }
  const auto epochs = given.find("epochs"), saved = c.recipe.find("epochs");
  if (epochs == given.end() || saved == c.recipe.end() || epochs->second == saved->second) return;
  fail<IoError>(
      "{}: the run had --epochs {}, got {}; the rates of --lr-schedule {} depend on the number of epochs. A run of {} "
      "epochs continues from its weights with --pretrained {} --start-epoch {}",
      file, saved->second, epochs->second, config.lr_schedule, epochs->second, file, c.loader.epoch);
}

// As the optimizer's flags; the scale itself has moved since a dynamic one began.
void check_scaler(const Checkpoint& c, const TrainConfig& config, const amp::GradScaler& scaler,
                  const std::string& file) {
  if (c.amp != amp_text(config)) return;  // another precision, another scaler: warned of
  if (c.scaler.empty() != !scaler.is_enabled()) {
    fail<IoError>(
        "{}: the run was trained {} a loss scale, got --loss-scale {}; a run resumes with the flags it started "
        "with",
        file, c.scaler.empty() ? "without" : "with", config.loss_scale);
  }
  if (c.scaler.empty()) return;
  const auto refuse = [&](const std::string& name, double saved, double given) {
    fail<IoError>("{}: the run's loss scale had {} {}, got {}; pass the --loss-scale of the first run in place of {}",
                  file, name, saved, given, loss_scale_text(config));
  };
  auto given = loss_scale_rules(scaler.policy());
  // The scale itself doesn't move where it is fixed.
  if (const auto scale = given.find("init_scale"); scale != given.end()) {
    const auto saved = c.scaler.find("scale");
    if (saved != c.scaler.end() && saved->second != scale->second) refuse("scale", saved->second, scale->second);
  }
  // Files of before have what the scaler's state says only.
  for (const auto& [name, value] : given) {
    const auto& rules = c.scale_rules.empty() ? c.scaler : c.scale_rules;
    const auto saved = rules.find(name);
    if (saved != rules.end() && saved->second != value) refuse(name, saved->second, value);
  }
}

void check_data(const Checkpoint& c, const TrainConfig& config, const std::string& file) {
  for (const auto& [part, given] : config.data_checksums) {
    const auto saved = c.data_checksums.find(part);
    if (saved == c.data_checksums.end() || saved->second == given) continue;
    const std::string data = (config.data.empty() ? "" : "--data ") + data_label(config.model, config.data);
    fail<IoError>(
        "{}: the run had other data: its {} part had the checksum {}, that of {} has {}; pass the --data of "
        "the first run",
        file, part, saved->second, data, given);
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
  check_data(c, config, file);
  check_recipe(c, config, file);
  // As checkpoints keep them.
  const auto same = [](const std::string& kept, const std::string& name) { return kept == printable(name); };
  if (!c.classes.empty() && !config.classes.empty() &&
      !std::equal(c.classes.begin(), c.classes.end(), config.classes.begin(), config.classes.end(), same)) {
    fail<IoError>("{}: the run had {} classes, {} to {}, got {}, {} to {}; pass the --data of the first run", file,
                  c.classes.size(), c.classes.front(), c.classes.back(), config.classes.size(), config.classes.front(),
                  config.classes.back());
  }
  check_scaler(c, config, scaler, file);
  if (c.amp != amp_text(config)) {
    log(LogLevel::warning,
        fmt::format("{}: the run had --amp {}, it continues with {}", file, c.amp, amp_text(config)));
  }
}

void check_network(const Checkpoint& c, const Task& task, const TrainConfig& config, const std::string& file) {
  if (c.network.empty()) return;
  try {
    task.check_network(c.network);
  } catch (const Error& e) {
    fail<IoError>("{}: the run had another network than {}: {}", file, network_label(config), e.what());
  }
}

void check_state(const Checkpoint& c, const nn::ModuleBase& module, const optim::Optimizer& optimizer,
                 const std::string& file) {
  // Read as another dtype, a number that is none becomes some whole number.
  const auto check = [&](const NamedTensor& own, const NamedTensor& saved) {
    if (is_floating(own.tensor.dtype()) == is_floating(saved.tensor.dtype())) return;
    fail<IoError>("{}: damaged checkpoint: expected {} as {}, got {}", file, own.name, name(own.tensor.dtype()),
                  name(saved.tensor.dtype()));
  };
  const auto check_all = [&](const NamedTensors& own, const NamedTensors& saved) {
    std::map<std::string_view, const NamedTensor*> by_name;
    for (const NamedTensor& t : saved) by_name[t.name] = &t;
    for (const NamedTensor& t : own) {
      if (const auto it = by_name.find(t.name); it != by_name.end()) check(t, *it->second);
    }
  };
  check_all(module.state_dict(), c.weights);
  check_all((optimizer.sharding() ? optimizer.state_of_groups() : optimizer.state_dict()).tensors, c.optimizer.tensors);
  // Counters: batches that a normalisation saw, steps that a parameter made.
  const auto check_counts = [&](const NamedTensor& t, std::int64_t most) {
    if (is_floating(t.tensor.dtype())) return;
    for (const std::int64_t n : t.tensor.to_vector<std::int64_t>()) {
      if (n >= 0 && n <= most) continue;
      fail<IoError>("{}: damaged checkpoint: expected from 0 to {} for {}, got {}", file, most, t.name, n);
    }
  };
  for (const NamedTensor& t : c.weights) {
    if (t.name.ends_with("num_batches_tracked")) check_counts(t, std::int64_t{1} << 53);
  }
  for (const NamedTensor& t : c.optimizer.tensors) {
    if (t.name.starts_with("group") && t.name.ends_with(".steps")) check_counts(t, c.step);
    if (!t.name.ends_with(".steps") && !is_floating(t.tensor.dtype())) {
      fail<IoError>("{}: damaged checkpoint: expected {} of floating point, got {}", file, t.name,
                    name(t.tensor.dtype()));
    }
  }
}

}  // namespace halfstep::training
