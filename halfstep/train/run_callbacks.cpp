// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <optional>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/train/run_callbacks_internal.h"
#include "halfstep/train/state_internal.h"

namespace halfstep::training {
namespace {

// A forward pass that leaves float16's range gives such a loss once in a while; when lowering the scale doesn't end it,
// nothing will.
constexpr int kMaxBadLosses = 20;

double scale_of(const amp::GradScaler* scaler) { return scaler ? scaler->get_scale() : 1; }

}  // namespace

// ------------------------------------------------------------------------------------------------------------- saver

void RunSaver::resume(const Checkpoint& c) {
  state_.epoch = static_cast<int>(c.loader.epoch);
  finite = c.finite;
  if (c.best_by == best_.name()) {
    best_.reset(c.best, c.best_epoch);
  }
  last_file_ = config_.resume;
}

void RunSaver::gather_compression() {
  dist::ProcessGroup group = config_.group;
  if (compression_) communication_ = compression_->state_dict(group);
}

bool RunSaver::may_write(const std::filesystem::path& file) const {
  return bad_losses == 0 || !std::filesystem::exists(file);
}

void RunSaver::wait() {
  finish_shards();
  writer_.wait();
  if (!next_file_.empty()) last_file_ = std::exchange(next_file_, {});
}

Checkpoint RunSaver::checkpoint(NamedTensors weights, optim::OptimizerState optimizer) const {
  const amp::GradScaler* scaler = step_.scaler();
  const optim::Optimizer& trained = step_.optimizer();
  Checkpoint c = state_of(std::move(weights), trained.kind(), std::move(optimizer), scaler, state_);
  if (average_) {
    c.training_weights = c.weights;
    c.ema_updates = average_->updates();
    std::map<std::string, Tensor> averages;
    for (const NamedTensor& t : average_->averages()) averages.emplace(t.name, t.tensor);
    for (NamedTensor& t : c.weights) {
      if (const auto it = averages.find(t.name); it != averages.end()) t.tensor = it->second;
    }
  }
  c.model = config_.model;
  c.network = step_.task().network_description();
  // Not where the loader stands: a batch that was taken may not have been trained on.
  c.loader = {.epoch = state_.epoch, .batch = state_.batch};
  c.loader_seed = loader_.options().seed;
  c.batch_size = loader_.options().batch_size;
  c.samples = loader_.dataset().size();
  c.shuffle = loader_.options().shuffle;
  c.drop_last = loader_.options().drop_last;
  c.repeat = loader_.options().repeat;
  c.accumulate = config_.accumulate;
  c.best = best_.value();
  c.best_by = best_.name();
  c.best_epoch = best_.epoch();
  c.finite = finite;
  c.amp = amp_text(config_);
  c.classes = config_.classes;
  c.recipe = recipe(config_);
  if (scaler) c.scale_rules = loss_scale_rules(scaler->policy());
  c.data_checksums = config_.data_checksums;
  c.communication = communication_;
  return c;
}

bool RunSaver::save(const std::vector<std::filesystem::path>& files) {
  if (!files.empty() && files.back().filename() == kLastCheckpoint) next_file_ = files.back();
  if (sharded) return save_shards();
  writer_.write(files, checkpoint(step_.network().state_dict(), step_.optimizer().state_dict()));
  return true;
}

void FiniteLoss::on_values(TrainContext& /*context*/, std::span<const StepRecord> steps) {
  const amp::GradScaler* scaler = step_.scaler();
  const int most = scaler && scaler->policy().rules().dynamic ? kMaxBadLosses : 0;
  for (const StepRecord& r : steps) {
    for (const double loss : r.losses) {
      saver_.bad_losses = std::isfinite(loss) ? 0 : saver_.bad_losses + 1;
      if (saver_.bad_losses <= most) continue;
      saver_.wait();
      const std::string last = saver_.last_file().empty() ? "none was written" : shown_path(saver_.last_file());
      fail<Error>(
          "train: expected a finite loss, got {} in epoch {}, step {}; last checkpoint: {}; a smaller --lr may help",
          std::isnan(loss) ? std::string("nan") : fmt::format("{}", loss), r.epoch, r.step, last);
    }
  }
}

void SaveCallback::save(const std::vector<const char*>& names, const TrainContext& context) {
  saver_.gather_compression();
  settle();
  std::vector<std::filesystem::path> files;
  for (const char* name : names) {
    const std::filesystem::path file = saver_.folder() / name;
    if (!saver_.folder().empty() && saver_.may_write(file)) files.push_back(file);
  }
  files = saver_.agree_on(files);
  if (files.empty()) return;
  dist::ProcessGroup::working("writing a checkpoint");
  pending_epoch_ = context.epoch;
  pending_step_ = saver_.state().step;
  const bool beside = saver_.save(files);
  pending_ = std::move(files);
  if (!beside || saver_.saved()) settle();
}

void SaveCallback::settle() {
  if (pending_.empty()) return;
  if (!saver_.saved()) dist::ProcessGroup::working("writing a checkpoint");
  const std::vector<std::filesystem::path> files = std::exchange(pending_, {});
  saver_.wait();
  for (const std::filesystem::path& file : files) {
    log_.write("checkpoint", {{"epoch", pending_epoch_}, {"step", pending_step_}, {"file", file.string()}});
    // The caller is notified of the last one only: the best one is a copy of some last one.
    if (file.filename() == kLastCheckpoint && callbacks_.on_checkpoint) callbacks_.on_checkpoint(file);
  }
}

void SaveCallback::on_step_end(TrainContext& context) {
  if (!pending_.empty() && saver_.saved()) settle();
  saver_.set_state(context.state());
  const std::int64_t every = saver_.save_every();
  // An epoch's end is a place of its own to save at.
  if (every == 0 || context.step % every != 0 || context.step_in_epoch == context.steps_in_epoch) return;
  context.read_values();
  saver_.set_state(context.state());
  save({kLastCheckpoint}, context);
}

void SaveCallback::on_eval_end(TrainContext& context) {
  saver_.set_state(context.state());
  saver_.finite = !context.metrics.contains("loss") || std::isfinite(static_cast<double>(context.metrics["loss"]));
  const std::string by = reports_.task().best_by();
  best_ = context.metrics.contains(by) && saver_.offer(static_cast<double>(context.metrics[by]));
  evaluated_ = true;
  reports_.report(context, best_);
}

void SaveCallback::on_epoch_end(TrainContext& context) {
  saver_.set_state(context.state());
  if (!std::exchange(evaluated_, false)) return;  // it was stopped
  // In this order: killed between the two, the run that goes on makes this evaluation again.
  best_ ? save({kBestCheckpoint, kLastCheckpoint}, context) : save({kLastCheckpoint}, context);
  if (saver_.out_of_patience()) context.request_stop("no better evaluation");
}

void SaveCallback::on_train_end(TrainContext& context) {
  saver_.set_state(context.state());
  if (context.state().epoch < saver_.epochs()) save({kLastCheckpoint}, context);
  settle();
}

// ----------------------------------------------------------------------------------------------------------- reports

void ReportCallback::on_epoch_begin(TrainContext& /*context*/) { seconds_ = data_seconds_ = {}; }

void ReportCallback::on_values(TrainContext& context, std::span<const StepRecord> steps) {
  for (const StepRecord& r : steps) {
    seconds_.add(r.seconds);
    data_seconds_.add(r.data_seconds);
    if (!callbacks_.on_step) continue;
    StepReport report{r, context.steps_in_epoch, seconds_, data_seconds_};
    for (const auto& [name, sum] : r.parts) {
      report.part_means[name] = {.last = sum / static_cast<double>(r.samples),
                                 .sum = r.epoch_parts.at(name),
                                 .count = static_cast<double>(r.epoch_samples)};
    }
    callbacks_.on_step(report);
  }
}

void ReportCallback::on_eval_batch(TrainContext& /*context*/, const EvalProgress& progress) {
  if (callbacks_.on_eval_batch) callbacks_.on_eval_batch(progress);
}

void ReportCallback::report(TrainContext& context, bool best) {
  last_metrics_ = context.metrics;
  if (!callbacks_.on_eval) return;
  callbacks_.on_eval({.epoch = context.epoch,
                      .step = context.state().step,
                      .metrics = context.metrics,
                      .best = best,
                      .train_loss = context.state().mean_loss(),
                      .scale = scale_of(context.scaler),
                      .skipped = context.state().skipped});
}

}  // namespace halfstep::training
