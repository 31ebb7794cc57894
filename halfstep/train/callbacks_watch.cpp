// SPDX-License-Identifier: Apache-2.0
// The callbacks that act on what they see, and those that write files.
#include <cmath>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/train/callbacks.h"
#include "halfstep/train/state_internal.h"

namespace halfstep::training {

namespace fs = std::filesystem;

namespace {

// Weights that came with such a loss are worth no file.
bool lost(const TrainContext& c) { return c.loss.defined() && !std::isfinite(c.loss.item<double>()); }

// "acc" is in accuracy and top_5_accuracy, "top" in what a ClassificationTask counts, and a DetectionTask has mAP50 and
// fitness.
bool larger_is_better(const std::string& name, Better better) {
  if (better != Better::automatic) return better == Better::larger;
  for (const char* part : {"acc", "precision", "recall", "f1", "F1", "top", "mAP", "COCO_AP", "IoU", "fitness"}) {
    if (name.find(part) != std::string::npos) return true;
  }
  return false;
}

}  // namespace

detail::Best::Best(std::string name, Better better)
    : name_(std::move(name)), larger_(larger_is_better(name_, better)) {}

void detail::Best::reset(std::optional<double> value, std::int64_t epoch) {
  value_ = value;
  epoch_ = epoch;
}

bool detail::Best::improves(double value, double than, double by) const {
  return larger_ ? value - by > than : value + by < than;
}

bool detail::Best::offer(double value, std::int64_t epoch, double by) {
  if (value_ ? !improves(value, *value_, by) : std::isnan(value)) return false;
  reset(value, epoch);
  return true;
}

EarlyStopping::EarlyStopping(const EarlyStoppingOptions& options)
    : options_(options), best_(options.monitor, options.better) {
  if (options.patience < 0) fail<Error>("EarlyStopping: expected a patience of at least 0, got {}", options.patience);
  if (!(options.min_delta >= 0)) {
    fail<Error>("EarlyStopping: expected min_delta of at least 0, got {}", options.min_delta);
  }
}

void EarlyStopping::on_train_begin(TrainContext& context) {
  context.check_watchable("EarlyStopping", options_.monitor);
  best_.reset();
  waited_ = 0;
  best_weights_.clear();
}

void EarlyStopping::on_epoch_end(TrainContext& context) {
  const std::optional<double> now = context.watched(options_.monitor);
  if (!now) return;
  ++waited_;
  if (best_.offer(*now, context.epoch, options_.min_delta)) {
    if (options_.restore_best_weights) {
      const NoGrad no_grad;
      best_weights_.clear();
      for (const NamedTensor& t : context.network->state_dict()) best_weights_.push_back({t.name, t.tensor.clone()});
    }
    if (!options_.baseline || best_.improves(*now, *options_.baseline)) {
      waited_ = 0;
      return;
    }
  }
  if (waited_ < options_.patience) return;
  context.request_stop(fmt::format("EarlyStopping: {} has not improved for {} epoch{}; its best was {:.6g} in epoch {}",
                                   options_.monitor, waited_, waited_ == 1 ? "" : "s",
                                   best_.value().value_or(std::nan("")), best_.epoch()));
  if (!best_weights_.empty()) context.network->load_state_dict(best_weights_);
}

ReduceLROnPlateau::ReduceLROnPlateau(const PlateauOptions& options)
    : options_(options), best_(options.monitor, options.better) {
  if (!(options.factor > 0 && options.factor < 1)) {
    fail<Error>("ReduceLROnPlateau: expected a factor above 0 and under 1, got {}", options.factor);
  }
  if (options.patience < 0 || options.cooldown < 0) {
    fail<Error>("ReduceLROnPlateau: expected patience and cooldown of at least 0, got {} and {}", options.patience,
                options.cooldown);
  }
  if (!(options.min_delta >= 0 && options.min_lr >= 0)) {
    fail<Error>("ReduceLROnPlateau: expected min_delta and min_lr of at least 0, got {} and {}", options.min_delta,
                options.min_lr);
  }
}

void ReduceLROnPlateau::on_train_begin(TrainContext& context) {
  context.check_watchable("ReduceLROnPlateau", options_.monitor);
  best_.reset();
  waited_ = cooldown_left_ = 0;
}

void ReduceLROnPlateau::on_epoch_end(TrainContext& context) {
  const std::optional<double> now = context.watched(options_.monitor);
  if (!now || !context.optimizer) return;
  if (cooldown_left_ > 0) {
    --cooldown_left_;
    waited_ = 0;
  }
  if (best_.offer(*now, context.epoch, options_.min_delta)) {
    waited_ = 0;
    return;
  }
  if (cooldown_left_ > 0) return;
  if (++waited_ < options_.patience) return;
  optim::Optimizer& optimizer = *context.optimizer;
  for (int group = 0; group < optimizer.num_groups(); ++group) {
    const double lr = optimizer.lr(group);
    if (lr > options_.min_lr) optimizer.set_lr(group, std::max(lr * options_.factor, options_.min_lr));
  }
  cooldown_left_ = options_.cooldown;
  waited_ = 0;
}

ModelCheckpoint::ModelCheckpoint(const ModelCheckpointOptions& options)
    : options_(options), best_(options.monitor, options.better) {
  if (options.steps < 0) fail<Error>("ModelCheckpoint: expected steps of at least 0, got {}", options.steps);
  if (options.keep < 0) fail<Error>("ModelCheckpoint: expected keep of at least 0, got {}", options.keep);
  if (options.prefix.empty() || options.prefix.find('/') != std::string::npos) {
    fail<Error>("ModelCheckpoint: expected a prefix that is the begin of a file's name, got \"{}\"", options.prefix);
  }
}

void ModelCheckpoint::on_train_begin(TrainContext& context) {
  if (!options_.monitor.empty()) context.check_watchable("ModelCheckpoint", options_.monitor);
  std::error_code error;
  fs::create_directories(options_.directory, error);
  if (error) fail<IoError>("{}: can't be made: {}", shown_path(options_.directory), error.message());
  best_.reset();
  written_.clear();
  saved_step_ = 0;
}

void ModelCheckpoint::save(const TrainContext& c, const std::string& name) const {
  const bool ended = c.step_in_epoch == c.steps_in_epoch;
  const RunState& state = c.state();
  Checkpoint saved = state_of(c.network->state_dict(), c.optimizer ? c.optimizer->kind() : "",
                              c.optimizer ? c.optimizer->state_dict() : optim::OptimizerState{}, c.scaler, state);
  saved.loader = {.epoch = ended ? c.epoch : c.epoch - 1, .batch = ended ? 0 : c.step_in_epoch * c.accumulate};
  saved.batch_size = std::max<std::int64_t>(c.batch_size, 1);
  saved.accumulate = c.accumulate;
  saved.step = c.step;
  saved.skipped = std::max(state.skipped, c.skipped);
  save_checkpoint(options_.directory / name, saved);
}

void ModelCheckpoint::save_and_clean(TrainContext& c) {
  if (saved_step_ == c.step || lost(c)) return;
  c.read_values();
  const std::string name = fmt::format("{}-{}_{}.safetensors", options_.prefix, c.epoch, c.step_in_epoch);
  save(c, name);
  saved_step_ = c.step;
  written_.push_back(options_.directory / name);
  if (options_.keep == 0) return;
  while (written_.size() > static_cast<std::size_t>(options_.keep)) {
    std::error_code ignored;  // whoever moved it away wants it elsewhere
    fs::remove(written_.front(), ignored);
    written_.erase(written_.begin());
  }
}

void ModelCheckpoint::on_step_end(TrainContext& context) {
  if (options_.steps > 0 && context.step % options_.steps == 0) save_and_clean(context);
}

void ModelCheckpoint::on_epoch_end(TrainContext& context) {
  if (options_.steps == 0) save_and_clean(context);
  if (options_.monitor.empty()) return;
  const std::optional<double> now = context.watched(options_.monitor);
  if (now && !lost(context) && best_.offer(*now, context.epoch)) save(context, options_.prefix + "-best.safetensors");
}

void ModelCheckpoint::on_train_end(TrainContext& context) {
  if (options_.steps > 0 && context.step > 0) save_and_clean(context);
}

TensorBoard::TensorBoard(fs::path folder, const TensorBoardCallbackOptions& options)
    : folder_(std::move(folder)), options_(options) {
  if (options.steps < 1) fail<Error>("TensorBoard: expected steps of at least 1, got {}", options.steps);
  if (options.histograms < 0) {
    fail<Error>("TensorBoard: expected histograms of at least 0 epochs, got {}", options.histograms);
  }
}

void TensorBoard::on_train_begin(TrainContext& context) {
  writer_.reset();
  from_ = context.state().step;
}

// With the first values: a run that fails in its first step leaves no file.
io::TensorBoardWriter& TensorBoard::writer() {
  if (!writer_) {
    io::TensorBoardOptions options;
    if (from_ > 0) options.purge_step = from_ + 1;
    writer_ = std::make_shared<io::TensorBoardWriter>(folder_, options);
  }
  return *writer_;
}

// What was read anyway: the device isn't waited for.
void TensorBoard::on_values(TrainContext& /*context*/, std::span<const StepRecord> steps) {
  bool any = false;
  for (const StepRecord& r : steps) {
    if (r.step % options_.steps != 0) continue;
    any = true;
    writer().scalar("train/loss", r.loss, r.step);
    writer().scalar("train/lr", r.lr, r.step);
    writer().scalar("train/scale", r.scale, r.step);
  }
  // Who saves a checkpoint reads the values first. A process that is killed behind it must not lose them: the run that
  // resumes from it doesn't make these steps again.
  if (any) writer().flush();
}

void TensorBoard::on_epoch_end(TrainContext& context) {
  // It was stopped: the run that resumes ends it.
  if (context.state().epoch != context.epoch) return;
  writer().scalar("epoch/loss", context.epoch_loss, context.step);
  writer().scalar("epoch/skipped", static_cast<double>(context.skipped), context.step);
  for (const auto& [name, value] : context.metrics) {
    if (value.is_number()) writer().scalar("eval/" + name, value, context.step);
  }
  if (options_.histograms > 0 && context.epoch % options_.histograms == 0) {
    for (const NamedTensor& p : context.network->parameters()) {
      if (p.tensor.numel() == 0) continue;
      writer().histogram("weights/" + p.name, p.tensor, context.step);
      if (p.tensor.grad().defined()) writer().histogram("gradients/" + p.name, p.tensor.grad(), context.step);
    }
  }
  writer().flush();
}

void TensorBoard::on_train_end(TrainContext&) { writer_.reset(); }

}  // namespace halfstep::training
