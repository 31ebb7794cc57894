// SPDX-License-Identifier: Apache-2.0
// What a run of the program adds to the public callbacks: rates by the schedule, reports, checkpoints.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "halfstep/data/loader.h"
#include "halfstep/dist/power_sgd.h"
#include "halfstep/optim/ema.h"
#include "halfstep/train/callbacks.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/checkpoint_writer_internal.h"
#include "halfstep/train/json_log.h"
#include "halfstep/train/run_folder.h"
#include "halfstep/train/schedule.h"
#include "halfstep/train/train_step.h"
#include "halfstep/train/trainer.h"

namespace halfstep::training {

/// Sets the rate of the next step, by its place in the run: skipped steps count.
class ScheduleCallback final : public CallbackBase {
 public:
  explicit ScheduleCallback(RateSchedule& schedule) : schedule_(schedule) {}
  void on_epoch_begin(TrainContext& context) override { set(context); }
  void on_step_end(TrainContext& context) override { set(context); }

 private:
  void set(const TrainContext& c) { schedule_.set((c.epoch - 1) * c.steps_in_epoch + c.step_in_epoch); }
  RateSchedule& schedule_;
};

/// Keeps the state of the run in files.
class RunSaver {
 public:
  RunSaver(const TrainConfig& config, TrainStep& step, const data::DataLoader& loader)
      : config_(config),
        step_(step),
        loader_(loader),
        best_(step.task().best_by(), step.task().larger_is_better() ? Better::larger : Better::smaller),
        writer_(!config.sync_checkpoints) {}
  /// Takes over what a checkpoint says of the run so far.
  void resume(const Checkpoint& c);
  /// The state that the next checkpoint holds.
  void set_state(const RunState& state) { state_ = state; }
  const RunState& state() const { return state_; }
  /// Whether `value` of the task's best_by() is better than all before; remembers it then.
  bool offer(double value) { return best_.offer(value, state_.epoch + 1); }  // of the epoch that isn't over yet
  /// Whether so many epochs passed without a better value that the run ends (TrainConfig::patience).
  bool out_of_patience() const {
    return config_.patience > 0 && best_.epoch() > 0 && state_.epoch - best_.epoch() >= config_.patience;
  }
  /// Losses in a row that weren't finite.
  int bad_losses = 0;
  /// Whether that of the last evaluation was.
  bool finite = true;
  /// Ranks divide the optimizer's state, and each writes what only it has: files that are shards of rank 0's. Then all
  /// ranks call agree_on(), save(), saved() and wait(). They agree that all shards are written when they call one of
  /// the last two anyway, and not on the writers' threads, since all collectives go by one thread and in one order.
  bool sharded = false;
  /// Throws IoError on all ranks unless all see the folder of rank 0, which is locked. For runs whose state is divided.
  void check_folder() const;

  /// Whether the file may be written: unless it would take the place of a good one, since a run can't be resumed from
  /// weights whose loss isn't finite.
  bool may_write(const std::filesystem::path& file) const;
  /// The files that rank 0 is about to write, on all ranks if these write shards of them.
  std::vector<std::filesystem::path> agree_on(const std::vector<std::filesystem::path>& files);
  /// Begins to write the state as it is now, beside training unless the configuration says otherwise; agree_on() gave
  /// the files. Returns false where wait() has to be called before training goes on.
  bool save(const std::vector<std::filesystem::path>& files);
  /// Whether wait() would return, or throw, at once.
  bool saved();
  /// Returns when what was begun is written. Throws IoError if it can't be.
  void wait();
  /// The average of the network's weights, which checkpoints have in their place. It has to live as long as this.
  void set_average(const optim::EMA* average) { average_ = average; }
  /// What compresses gradients: its state is saved in checkpoints.
  void set_compression(std::optional<dist::PowerSGD> compression) { compression_ = std::move(compression); }
  /// Ahead of save(), on all ranks: collects the state of compression from them.
  void gather_compression();
  std::filesystem::path folder() const { return config_.out; }
  std::int64_t save_every() const { return config_.save_every; }
  int epochs() const { return config_.epochs; }
  /// The last one that was written to go on from, or gone on from.
  const std::filesystem::path& last_file() const { return last_file_; }

 private:
  /// With these tensors.
  Checkpoint checkpoint(NamedTensors weights, optim::OptimizerState optimizer) const;
  bool save_shards();
  void finish_shards();

  const TrainConfig& config_;
  TrainStep& step_;
  const data::DataLoader& loader_;
  RunState state_;
  detail::Best best_;
  const optim::EMA* average_ = nullptr;
  std::filesystem::path last_file_, next_file_;
  CheckpointWriter writer_;
  std::optional<dist::PowerSGD> compression_;
  NamedTensors communication_;                         // its state
  std::vector<std::filesystem::path> files_, shards_;  // that are being written
  bool shards_pending_ = false;                        // on all ranks alike: nobody knows whether they are written
};

/// Ends the run at a loss that lowering the scale doesn't mend.
class FiniteLoss final : public CallbackBase {
 public:
  FiniteLoss(TrainStep& step, RunSaver& saver) : step_(step), saver_(saver) {}
  void on_values(TrainContext& context, std::span<const StepRecord> steps) override;

 private:
  TrainStep& step_;
  RunSaver& saver_;
};

/// Reports the state of the run to the caller of train().
class ReportCallback final : public CallbackBase {
 public:
  ReportCallback(const TrainCallbacks& callbacks, const Task& task) : callbacks_(callbacks), task_(task) {}
  void on_epoch_begin(TrainContext& context) override;
  void on_values(TrainContext& context, std::span<const StepRecord> steps) override;
  void on_eval_batch(TrainContext& context, const EvalProgress& progress) override;
  /// What SaveCallback calls: it knows whether the evaluation was the best.
  void report(TrainContext& context, bool best);
  const MetricResults& last_metrics() const { return last_metrics_; }
  const Task& task() const { return task_; }

 private:
  const TrainCallbacks& callbacks_;
  const Task& task_;
  Meter seconds_ = {}, data_seconds_ = {};
  MetricResults last_metrics_;
};

/// Writes `last.safetensors` and `best.safetensors`. The log has them, and the caller hears of them, when they are in
/// their place.
class SaveCallback final : public CallbackBase {
 public:
  SaveCallback(RunSaver& saver, JsonLog& log, const TrainCallbacks& callbacks, ReportCallback& reports)
      : saver_(saver), log_(log), callbacks_(callbacks), reports_(reports) {}
  void on_train_begin(TrainContext& context) override { saver_.set_state(context.state()); }
  void on_step_end(TrainContext& context) override;
  void on_eval_end(TrainContext& context) override;
  void on_epoch_end(TrainContext& context) override;
  void on_train_end(TrainContext& context) override;

 private:
  void save(const std::vector<const char*>& names, const TrainContext& context);
  /// Waits for what is being written, and says so.
  void settle();
  RunSaver& saver_;
  JsonLog& log_;
  const TrainCallbacks& callbacks_;
  ReportCallback& reports_;
  bool best_ = false;       // the evaluation of this epoch
  bool evaluated_ = false;  // this epoch
  // What is being written, and of when.
  std::vector<std::filesystem::path> pending_;
  std::int64_t pending_epoch_ = 0, pending_step_ = 0;
};

}  // namespace halfstep::training
