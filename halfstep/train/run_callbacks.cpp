// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <optional>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/core/text.h"
#include "halfstep/train/device_memory.h"
#include "halfstep/train/run_callbacks_internal.h"

namespace halfstep::training {
namespace {

// A forward pass that leaves float16's range gives such a loss once in a while; when lowering the scale doesn't end it,
// nothing will.
constexpr int kMaxBadLosses = 20;

constexpr const char* kLast = "last.safetensors";
constexpr const char* kBest = "best.safetensors";

double scale_of(const amp::GradScaler* scaler) { return scaler ? scaler->get_scale() : 1; }

void add_memory(JsonLog::Fields& fields, Device device) {
  fields.emplace_back("peak_rss_mb", peak_rss_mb());
  if (!device.is_cpu()) fields.emplace_back("device_peak_mb", device_peak_mb(device));
}

}  // namespace

// --------------------------------------------------------------------------------------------------------------- log

void LogCallback::on_train_begin(TrainContext& context) {
  log_.write("start", {{"model", config_.model},
                       {"epochs", std::int64_t{config_.epochs}},
                       {"batch_size", config_.batch_size},
                       {"accumulate", std::int64_t{config_.accumulate}},
                       {"samples", samples_},
                       {"best_by", best_by_},
                       {"lr", config_.lr},
                       {"optimizer", config_.optimizer},
                       {"amp", amp_text(config_)},
                       {"device", config_.device.str()},
                       {"ranks", std::int64_t{config_.group.size()}},
                       {"share", samples_of_ranks(config_)},
                       {"scale", scale_of(context.scaler)},
                       {"seed", config_.seed},
                       {"step", context.state().step}});
}

void LogCallback::on_values(TrainContext& /*context*/, std::span<const StepRecord> steps) {
  for (const StepRecord& r : steps) {
    JsonLog::Fields fields = {{"epoch", std::int64_t{r.epoch}}, {"step", r.step}, {"loss", r.loss}};
    for (const auto& [name, sum] : r.parts) fields.emplace_back(name, sum / static_cast<double>(r.samples));
    fields.insert(fields.end(),
                  {{"lr", r.lr}, {"scale", r.scale}, {"skipped", r.skipped_steps}, {"samples_per_s", r.samples_per_s}});
    add_memory(fields, config_.device);
    log_.write("step", fields);
  }
}

void LogCallback::on_eval_end(TrainContext& context) {
  JsonLog::Fields fields = {{"epoch", std::int64_t{context.epoch}}, {"step", context.state().step}};
  add_metrics(fields, context.metrics);
  fields.insert(fields.end(), {{"scale", scale_of(context.scaler)}, {"skipped", context.state().skipped}});
  add_memory(fields, config_.device);
  log_.write("eval", fields);
}

void log_end(JsonLog& log, const RunReport& report, const TrainStep& step) {
  const CaptureStats& c = report.captured;
  if (c.plain + c.recorded + c.replayed > 0) {
    JsonLog::Fields fields = {{"plain", static_cast<std::int64_t>(c.plain)},
                              {"recorded", static_cast<std::int64_t>(c.recorded)},
                              {"replayed", static_cast<std::int64_t>(c.replayed)}};
    if (c.graphs > 0) fields.emplace_back("graphs", static_cast<std::int64_t>(c.graphs));
    if (!report.why_not_captured.empty()) fields.emplace_back("why_not", report.why_not_captured);
    log.write("capture", fields);
  }
  for (const FallbackCount& f : report.fallbacks) {
    log.write("fallback", {{"op", f.op},
                           {"calls", static_cast<std::int64_t>(f.calls)},
                           {"bytes_to_host", static_cast<std::int64_t>(f.bytes_to_host)},
                           {"bytes_to_device", static_cast<std::int64_t>(f.bytes_to_device)},
                           {"seconds", f.seconds},
                           {"failures", static_cast<std::int64_t>(f.failures)}});
  }
  if (const auto& parallel = step.options().parallel; parallel && parallel->options().bucket_cap_mb == 0) {
    const dist::DataParallelStats stats = parallel->stats();
    log.write("buckets", {{"mb", stats.bucket_mb}, {"buckets", std::int64_t{stats.buckets}}, {"tuning", stats.tuning}});
  }
  JsonLog::Fields fields = {{"epochs", std::int64_t{report.epochs}},
                            {"step", report.steps},
                            {"seconds", report.seconds},
                            {"skipped", report.skipped},
                            {"scale", scale_of(step.scaler())}};
  // Compared by name with other runs: also where there was no evaluation.
  const Task& task = step.task();
  for (const std::string& name : {std::string("loss"), task.best_by()}) {
    if (!report.metrics.contains(name)) fields.emplace_back(name, double{NAN});
  }
  add_metrics(fields, report.metrics);
  fields.insert(fields.end(), {{"interrupted", report.interrupted}, {"peak_rss_mb", report.peak_rss_mb}});
  if (report.device_peak_mb > 0) fields.emplace_back("device_peak_mb", report.device_peak_mb);
  log.write("end", fields);
}

// ------------------------------------------------------------------------------------------------------------- saver

void RunSaver::resume(const Checkpoint& c) {
  state_.epoch = static_cast<int>(c.loader.epoch);
  finite = c.finite;
  if (c.best_by == step_.task().best_by()) {
    best_ = c.best;
    best_epoch_ = c.best_epoch;
  }
  last_file_ = config_.resume;
}

bool RunSaver::offer(double value) {
  const bool better = !best_ ? !std::isnan(value) : (step_.task().larger_is_better() ? value > *best_ : value < *best_);
  if (better) {
    best_ = value;
    best_epoch_ = state_.epoch + 1;  // which isn't over yet
  }
  return better;
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
  NamedTensors training_weights;
  if (average_) {
    training_weights = weights;
    std::map<std::string, Tensor> averages;
    for (const NamedTensor& t : average_->averages()) averages.emplace(t.name, t.tensor);
    for (NamedTensor& t : weights) {
      if (const auto it = averages.find(t.name); it != averages.end()) t.tensor = it->second;
    }
  }
  return {.model = config_.model,
          .network = step_.task().network_description(),
          .weights = std::move(weights),
          .optimizer_kind = step_.optimizer().kind(),
          .optimizer = std::move(optimizer),
          .scaler = scaler ? scaler->state_dict() : std::map<std::string, double>{},
          // Not where the loader stands: a batch that was taken may not have been trained on.
          .loader = {.epoch = state_.epoch, .batch = state_.batch},
          .loader_seed = loader_.options().seed,
          .batch_size = loader_.options().batch_size,
          .samples = loader_.dataset().size(),
          .shuffle = loader_.options().shuffle,
          .drop_last = loader_.options().drop_last,
          .repeat = loader_.options().repeat,
          .accumulate = config_.accumulate,
          .random = default_generator().state(),
          .step = state_.step,
          .skipped = state_.skipped,
          .loss_sum = state_.loss_sum,
          .loss_samples = state_.loss_samples,
          .best = best_,
          .best_by = step_.task().best_by(),
          .best_epoch = best_epoch_,
          .finite = finite,
          .amp = amp_text(config_),
          .parts = state_.parts,
          .part_samples = state_.samples,
          .classes = config_.classes,
          .recipe = recipe(config_),
          .scale_rules = scaler ? loss_scale_rules(scaler->policy()) : std::map<std::string, double>{},
          .data_checksums = config_.data_checksums,
          .training_weights = std::move(training_weights),
          .ema_updates = average_ ? average_->updates() : 0,
          .communication = communication_};
}

bool RunSaver::save(const std::vector<std::filesystem::path>& files) {
  if (!files.empty() && files.back().filename() == kLast) next_file_ = files.back();
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
    if (file.filename() == kLast && callbacks_.on_checkpoint) callbacks_.on_checkpoint(file);
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
  save({kLast}, context);
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
  best_ ? save({kBest, kLast}, context) : save({kLast}, context);
  if (saver_.out_of_patience()) context.request_stop("no better evaluation");
}

void SaveCallback::on_train_end(TrainContext& context) {
  saver_.set_state(context.state());
  if (context.state().epoch < saver_.epochs()) save({kLast}, context);
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

// --------------------------------------------------------------------------------------------------------- debugging

void DebugCallback::on_step_begin(TrainContext& context) {
  debugging_.before_step(context.step);
  if (debugging_.wants_twin(context.step)) twin(context.batches[0]);
}

// The batch in float32 and in the run's precision. Leaves weights and buffers as they were, and no gradients, which a
// step drops anyway.
void DebugCallback::twin(const data::Batch& batch) {
  const nn::ModuleBase& network = step_.network();
  std::vector<Tensor> buffers;
  for (const NamedTensor& b : network.buffers()) buffers.push_back(b.tensor.clone());
  const auto restore = [&] {
    const NoGrad no_grad;
    std::size_t i = 0;
    for (const NamedTensor& b : network.buffers()) Tensor(b.tensor).copy_(buffers[i++]);
    step_.optimizer().zero_grad();
  };
  // Passes that train nothing are this rank's own: a hook such as PowerSGD's would keep what they leave out.
  std::optional<dist::DataParallelBase::NoSync> alone;
  if (step_.options().parallel) alone.emplace(*step_.options().parallel);
  debugging_.twin(
      [&] {
        restore();
        const Tensor loss = step_.task().loss(batch).loss;
        (step_.scaler() ? step_.scaler()->scale(loss) : loss).backward();
      },
      *step_.options().autocast);
  restore();
}

}  // namespace halfstep::training
