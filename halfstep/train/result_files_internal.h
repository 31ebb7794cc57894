// SPDX-License-Identifier: Apache-2.0
// The files of a run that people look at.
#pragma once

#include <chrono>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "halfstep/data/dataset.h"
#include "halfstep/train/callback.h"
#include "halfstep/train/config.h"
#include "halfstep/train/results.h"
#include "halfstep/train/task.h"

namespace halfstep::training {

/// Keeps results.csv and curves.svg of the run's folder, and has the task draw its own figures. They are no part of the
/// run's state: one that can't be written costs a warning. It comes before what writes checkpoints: of a process that
/// was killed between the two, the row that comes again is dropped when the run goes on.
class ResultFiles final : public CallbackBase {
 public:
  ResultFiles(const TrainConfig& config, const Task& task, std::shared_ptr<const data::Dataset> evaluated);
  void on_train_begin(TrainContext& context) override;
  void on_epoch_begin(TrainContext& context) override;
  void on_values(TrainContext& context, std::span<const StepRecord> steps) override;
  void on_eval_begin(TrainContext& context) override;
  void on_epoch_end(TrainContext& context) override;
  void on_train_end(TrainContext& context) override;
  /// The run failed: the curves show how.
  void run_failed();

 private:
  using Clock = std::chrono::steady_clock;

  void go_on(const TrainContext& context);
  void read_steps(const std::filesystem::path& log, std::int64_t most);
  void write_table();
  void draw_task();
  template <class F>
  void attempt(const char* file, F&& write);

  const TrainConfig& config_;
  const Task& task_;
  std::shared_ptr<const data::Dataset> evaluated_;
  std::vector<EpochResult> rows_;
  StepCurve steps_;
  std::int64_t steps_in_epoch_ = 1, steps_seen_ = 0;
  StepRecord last_ = {};
  Clock::time_point start_ = {};
  double seconds_ = 0;
  bool foreign_table_ = false;  // results.csv is no table of a run: it stays
  bool figures_due_ = false;    // the task's are of an earlier evaluation
  Clock::time_point drawn_ = {};
  Clock::duration drawing_ = {};
  std::set<std::string> failed_;
};

}  // namespace halfstep::training
