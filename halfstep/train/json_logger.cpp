// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/json_logger.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/train/device_memory.h"
#include "halfstep/train/evaluate.h"
#include "halfstep/train/train_step.h"
#include "halfstep/train/trainer.h"

namespace halfstep::training {
namespace {

double scale_of(const amp::GradScaler* scaler) { return scaler ? scaler->get_scale() : 1; }

void add_memory(JsonLog::Fields& fields, Device device) {
  fields.emplace_back("peak_rss_mb", peak_rss_mb());
  if (!device.is_cpu()) fields.emplace_back("device_peak_mb", device_peak_mb(device));
}

}  // namespace

JsonLogger::JsonLogger(const std::filesystem::path& file, const JsonLoggerOptions& options)
    : JsonLogger(std::make_shared<JsonLog>(file, options.append, options.stop), options) {}

JsonLogger::JsonLogger(std::shared_ptr<JsonLog> log, const JsonLoggerOptions& options)
    : log_(std::move(log)), options_(options) {
  if (!log_) fail<Error>("JsonLogger: expected a log, got none");
}

void JsonLogger::on_train_begin(TrainContext& context) {
  begin_ = Clock::now();
  device_ = device_of(*context.network);
  metrics_ = {};
  JsonLog::Fields fields = options_.start;
  const auto given = [&](const char* name) {
    return std::any_of(fields.begin(), fields.end(), [&](const auto& field) { return field.first == name; });
  };
  const auto add = [&](const char* name, const auto& value) {
    if (!given(name)) fields.emplace_back(name, value());
  };
  add("epochs", [&] { return std::int64_t{context.epochs}; });
  add("accumulate", [&] { return context.accumulate; });
  if (context.optimizer) add("lr", [&] { return context.optimizer->lr(); });
  add("device", [&] { return device_.str(); });
  add("scale", [&] { return scale_of(context.scaler); });
  add("step", [&] { return context.state().step; });
  log_->write("start", fields);
}

void JsonLogger::on_values(TrainContext& /*context*/, std::span<const StepRecord> steps) {
  for (const StepRecord& r : steps) {
    JsonLog::Fields fields = {{"epoch", std::int64_t{r.epoch}}, {"step", r.step}, {"loss", r.loss}};
    for (const auto& [name, sum] : r.parts) fields.emplace_back(name, sum / static_cast<double>(r.samples));
    fields.insert(fields.end(),
                  {{"lr", r.lr}, {"scale", r.scale}, {"skipped", r.skipped_steps}, {"samples_per_s", r.samples_per_s}});
    add_memory(fields, device_);
    log_->write("step", fields);
  }
}

void JsonLogger::on_eval_end(TrainContext& context) {
  metrics_ = context.metrics;
  JsonLog::Fields fields = {{"epoch", std::int64_t{context.epoch}}, {"step", context.state().step}};
  add_metrics(fields, context.metrics);
  fields.insert(fields.end(), {{"scale", scale_of(context.scaler)}, {"skipped", context.state().skipped}});
  add_memory(fields, device_of(*context.network));
  log_->write("eval", fields);
}

void JsonLogger::on_train_end(TrainContext& context) {
  if (!options_.end || !context.train_step) return;
  RunReport report{.epochs = context.state().epoch,
                   .steps = context.state().step,
                   .skipped = context.state().skipped,
                   .seconds = std::chrono::duration<double>(Clock::now() - begin_).count(),
                   .peak_rss_mb = peak_rss_mb(),
                   .device_peak_mb = device_peak_mb(device_),
                   .metrics = metrics_};
  report.interrupted = context.interrupted();
  report.fallbacks = fallback_counts();
  report.captured = context.train_step->capture_stats();
  report.why_not_captured = context.train_step->why_not_captured();
  write_end(report, *context.train_step);
}

void JsonLogger::write_end(const RunReport& report, const TrainStep& step) {
  const CaptureStats& c = report.captured;
  if (c.plain + c.recorded + c.replayed > 0) {
    JsonLog::Fields fields = {{"plain", static_cast<std::int64_t>(c.plain)},
                              {"recorded", static_cast<std::int64_t>(c.recorded)},
                              {"replayed", static_cast<std::int64_t>(c.replayed)}};
    if (c.graphs > 0) fields.emplace_back("graphs", static_cast<std::int64_t>(c.graphs));
    if (!report.why_not_captured.empty()) fields.emplace_back("why_not", report.why_not_captured);
    log_->write("capture", fields);
  }
  for (const FallbackCount& f : report.fallbacks) {
    log_->write("fallback", {{"op", f.op},
                             {"calls", static_cast<std::int64_t>(f.calls)},
                             {"bytes_to_host", static_cast<std::int64_t>(f.bytes_to_host)},
                             {"bytes_to_device", static_cast<std::int64_t>(f.bytes_to_device)},
                             {"seconds", f.seconds},
                             {"failures", static_cast<std::int64_t>(f.failures)}});
  }
  if (const auto& parallel = step.options().parallel; parallel && parallel->options().bucket_cap_mb == 0) {
    const dist::DataParallelStats stats = parallel->stats();
    log_->write("buckets",
                {{"mb", stats.bucket_mb}, {"buckets", std::int64_t{stats.buckets}}, {"tuning", stats.tuning}});
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
  log_->write("end", fields);
}

}  // namespace halfstep::training
