// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "halfstep/core/error.h"
#include "halfstep/core/text.h"
#include "halfstep/io/atomic_file.h"
#include "halfstep/runtime/caching_allocator.h"
#include "halfstep/runtime/log.h"
#include "halfstep/train/result_files_internal.h"
#include "halfstep/train/run_folder.h"
#include "halfstep/train/trainer.h"

namespace halfstep::training {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTable = "results.csv";
constexpr const char* kCurves = "curves.svg";

std::string title_of(const TrainConfig& c) {
  return fmt::format("{} in {}, batch {}", c.model, c.amp == "off" ? "float32" : amp_text(c),
                     c.batch_size * c.accumulate);
}

}  // namespace

ResultFiles::ResultFiles(const TrainConfig& config, const Task& task, std::shared_ptr<const data::Dataset> evaluated)
    : config_(config), task_(task), evaluated_(std::move(evaluated)) {}

// A figure is worth no run: if one can't be written, the run warns once and continues without it.
template <class F>
void ResultFiles::attempt(const char* file, F&& write) {
  try {
    write();
  } catch (const std::exception& e) {
    if (failed_.insert(file).second) {
      log(LogLevel::warning, fmt::format("{}; the run continues without it", e.what()));
    }
  }
}

void ResultFiles::on_train_begin(TrainContext& context) {
  steps_in_epoch_ = context.steps_in_epoch;
  if (config_.out.empty()) return;
  go_on(context);
  if (!rows_.empty() || !steps_.empty()) write_table();
}

void ResultFiles::go_on(const TrainContext& context) {
  std::error_code error;
  const bool there = fs::exists(fs::symlink_status(config_.out / kTable, error));
  const RunState& state = context.state();
  fs::path from;
  if (!config_.resume.empty()) from = fs::is_directory(config_.resume) ? config_.resume : config_.resume.parent_path();
  const fs::path table = from / kTable;
  if (!config_.resume.empty() && fs::exists(table, error)) {
    attempt(kTable, [&] { rows_ = read_results(table); });
    std::erase_if(rows_, [&](const EpochResult& r) { return r.epoch > state.epoch || r.step > state.step; });
  }
  // Runs of before had none: a file of that name is somebody's own.
  foreign_table_ = there && !config_.resume.empty() && failed_.contains(kTable);
  if (config_.resume.empty() || state.step == 0) return;
  // The log may lie elsewhere, or be of this run only.
  for (const fs::path& log : {config_.log_json, from / "log.jsonl"}) {
    if (!steps_.empty() || log.empty() || !fs::is_regular_file(log, error)) continue;
    attempt("log.jsonl", [&] { read_steps(log, state.step); });
  }
}

void ResultFiles::read_steps(const fs::path& log, std::int64_t most) {
  std::ifstream file(log, std::ios::binary);
  std::int64_t last = 0;
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(R"({"event":"step")")) continue;
    const auto event = nlohmann::json::parse(line, nullptr, false);
    if (!event.is_object()) continue;
    const auto number = [&](const char* name, double missing) {
      const auto it = event.find(name);
      return it != event.end() && it->is_number() ? it->template get<double>() : missing;
    };
    const double step = number("step", 0);
    if (!(step > static_cast<double>(last)) || step > static_cast<double>(most)) continue;
    last = static_cast<std::int64_t>(step);
    steps_.add({.step = last,
                .loss = number("loss", NAN),
                .lr = number("lr", NAN),
                .scale = number("scale", 1),
                .skipped = static_cast<std::int64_t>(std::min(std::max(number("skipped", 0), 0.0), step))});
  }
}

void ResultFiles::on_epoch_begin(TrainContext& /*context*/) {
  start_ = Clock::now();
  seconds_ = 0;
}

void ResultFiles::on_values(TrainContext& /*context*/, std::span<const StepRecord> steps) {
  for (const StepRecord& r : steps) {
    steps_.add({.step = r.step, .loss = r.loss, .lr = r.lr, .scale = r.scale, .skipped = r.skipped_steps});
    last_ = r;
    ++steps_seen_;
  }
}

void ResultFiles::on_eval_begin(TrainContext& /*context*/) {
  // What the figures would be of is gone from here on: one that is stopped has verdicts of a part only.
  figures_due_ = false;
  seconds_ = std::chrono::duration<double>(Clock::now() - start_).count();
}

void ResultFiles::on_epoch_end(TrainContext& context) {
  const RunState& state = context.state();
  // It was stopped, or its evaluation was: the run that goes on makes the row.
  if (config_.out.empty() || state.epoch != context.epoch) return;
  if (seconds_ == 0) seconds_ = std::chrono::duration<double>(Clock::now() - start_).count();
  const bool trained = last_.epoch == context.epoch;  // else only evaluated here
  EpochResult row{.epoch = context.epoch,
                  .step = state.step,
                  .loss = context.epoch_loss,
                  .metrics = {},
                  .lr = trained ? last_.lr : context.optimizer->lr(),
                  .scale = trained          ? last_.scale
                           : context.scaler ? context.scaler->get_scale()
                                            : 1,
                  .skipped = state.skipped,
                  .seconds = trained ? seconds_ : 0,
                  .samples_per_s = trained ? last_.samples_per_s : NAN,
                  .peak_tensor_mb = static_cast<double>(memory_stats(config_.device).allocated_peak) / 1e6,
                  .peak_rss_mb = peak_rss_mb()};
  for (const auto& [name, value] : context.metrics) {
    if (value.is_number()) row.metrics.emplace_back(name, static_cast<double>(value));
  }
  rows_.push_back(std::move(row));
  write_table();
  if (context.metrics.empty()) return;
  figures_due_ = true;
  // Pictures take some hundredths of a second: no more than a twentieth of the time of short epochs.
  if (Clock::now() - drawn_ > 20 * drawing_) draw_task();
}

void ResultFiles::on_train_end(TrainContext& /*context*/) {
  if (figures_due_) draw_task();
}

void ResultFiles::run_failed() {
  // A run that failed at its first step leaves nothing behind; nor do curves stay alone, which would be of no run.
  if (!config_.out.empty() && steps_seen_ > 1 && holds_run(config_.out)) write_table();
}

void ResultFiles::write_table() {
  if (!foreign_table_ && !rows_.empty()) {
    attempt(kTable, [&] {
      const std::string text = results_csv(rows_);
      io::AtomicFile file(config_.out / kTable, false);
      file.write(text.data(), text.size());
      file.commit();
    });
  }
  attempt(kCurves, [&] {
    draw_curves({.title = title_of(config_),
                 .epochs = config_.epochs,
                 .steps_in_epoch = steps_in_epoch_,
                 .rows = rows_,
                 .steps = steps_.points()})
        .save(config_.out / kCurves);
  });
}

void ResultFiles::draw_task() {
  figures_due_ = false;
  drawn_ = Clock::now();
  const int epoch = rows_.empty() ? 0 : rows_.back().epoch;
  attempt("figures", [&] {
    task_.write_results({.folder = config_.out,
                         .title = fmt::format("{}: epoch {} of {}", title_of(config_), epoch, config_.epochs),
                         .samples = evaluated_});
  });
  drawing_ = Clock::now() - drawn_;
}

}  // namespace halfstep::training
