// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "halfstep/capture/capture.h"
#include "halfstep/data/dataset.h"
#include "halfstep/runtime/fallback.h"
#include "halfstep/train/callback.h"
#include "halfstep/train/config.h"
#include "halfstep/train/memory_plan.h"
#include "halfstep/train/networks.h"
#include "halfstep/train/registry.h"
#include "halfstep/train/run_folder.h"
#include "halfstep/train/task.h"

namespace halfstep::training {

/// How the run stands after a step whose values were read.
struct StepReport : StepRecord {
  std::int64_t steps_in_epoch = 0;
  Meter step_seconds = {};                       ///< the mean is of the epoch since it was begun or resumed
  Meter step_data_seconds = {};                  ///< of waiting for data
  std::map<std::string, Meter> part_means = {};  ///< of StepRecord::parts, per sample, over the epoch so far
};

/// Result of an evaluation.
struct EvalReport {
  int epoch = 0;
  std::int64_t step = 0;
  MetricResults metrics = {};  ///< loss first, then those of the task; of classification top1 and top5, fractions of 1
  bool best = false;           ///< the best so far in this run
  double train_loss = NAN;     ///< mean over the epoch's training samples; NaN outside of training
  double scale = 1;            ///< loss scale that comes next, 1 without scaling
  std::int64_t skipped = 0;    ///< steps skipped so far
  bool interrupted = false;    ///< EvalOptions::stop was set: there are no numbers
};

/// Options of evaluate for a classifier.
struct EvalOptions {
  std::optional<DType> autocast = {};  ///< of autocast; none: float32
  std::int64_t batch_size = 1000;
  int workers = 1;
  int prefetch = 4;    ///< batches that each worker makes ahead
  int read_every = 1;  ///< batches between two reads of a device's values
  std::function<void(const EvalProgress&)> on_batch = {};
  const std::atomic<bool>* stop = nullptr;  ///< aborts when it becomes true
  std::vector<std::string> classes = {};    ///< names, for the table
  ResultTable* table = nullptr;             ///< becomes Task::result_table()
  /// Ranks that evaluate a part of the samples each, with a part of the batch size; the results are those of all.
  dist::ProcessGroup group = {};
};

/// How a run ended.
struct RunReport {
  int epochs = 0;  ///< finished
  std::int64_t steps = 0;
  std::int64_t skipped = 0;
  double seconds = 0;
  double peak_rss_mb = 0;        ///< of the process, in 10^6 bytes
  double device_peak_mb = 0;     ///< of tensors on the device; 0 on the CPU
  MetricResults metrics = {};    ///< of the last evaluation; empty where none was made
  bool finite = true;            ///< whether the loss of the last evaluation is, also of a run with nothing left
  std::string best_by = "loss";  ///< name of the metric that tells which evaluation was the best
  /// Its value in the last evaluation; NaN where none was made.
  double best_value() const { return metrics.contains(best_by) ? static_cast<double>(metrics[best_by]) : NAN; }
  std::vector<FallbackCount> fallbacks = {};  ///< ops that ran on the CPU in place of the device
  bool nothing_left = false;                  ///< the run that was resumed had all its epochs already
  bool out_of_patience = false;               ///< TrainConfig::patience has ended the run, now or before
  bool interrupted = false;                   ///< stop was set; a checkpoint was written if there is a folder for it
  std::filesystem::path checkpoint = {};      ///< the last one written
  CaptureStats captured = {};                 ///< how the steps ran
  std::string why_not_captured = {};          ///< why steps weren't replayed, where they weren't
};

/// Callbacks of a run to its caller; any may be empty.
struct TrainCallbacks {
  /// Called once, after all checks and with the folder and the log ready, before a file is written or changed; not
  /// called if there is nothing left to do.
  std::function<void()> on_start = {};
  /// Called with what recomputes for the run, before its state is restored; not called where nothing was asked for.
  std::function<void(const MemoryPlan&)> on_memory = {};
  std::function<void(const StepReport&)> on_step;
  std::function<void(const EvalReport&)> on_eval;
  std::function<void(const EvalProgress&)> on_eval_batch;
  std::function<void(const std::filesystem::path&)> on_checkpoint;
  std::function<void(const std::string& report)> on_debug;  ///< what TrainConfig::debug found: lines of text
};

/// Trains as the configuration says, a Model with callbacks: autocast around the task's loss, loss scaling,
/// accumulation (the last, smaller group of an epoch with its own weight), clipping, checkpoints `last.safetensors` and
/// `best.safetensors` in `out`, JSON lines in `log_json`. The network is moved to the configuration's device; batches
/// are copied there ahead of the steps. Evaluates on `test` after each epoch. When `stop` becomes true it finishes the
/// step (or gives up the evaluation, which a resumed run makes again), writes a checkpoint and returns. Throws Error
/// for a loss of a step that isn't finite, with a dynamic loss scale for the 21st in a row (on other devices than the
/// CPU when it is read), and IoError. No checkpoint is written over another one while the losses aren't finite: the
/// last good one stays.
///
/// Checks come first and files last: a run that is refused changes none. `out` is made where it isn't there and locked
/// (train/run_folder.h), unless the caller has done that and gives `folder`; one with a run in it is refused, unless it
/// is the one that is resumed or `overwrite` is set. The log of a resumed run loses the lines that come again.
HS_API RunReport train(const TrainConfig& config, const std::shared_ptr<Task>& task,
                       std::shared_ptr<const data::Dataset> training, std::shared_ptr<const data::Dataset> test,
                       const TrainCallbacks& callbacks = {}, const std::atomic<bool>* stop = nullptr,
                       RunFolder* folder = nullptr);
/// The same for a classifier, with the configuration's label smoothing.
HS_API RunReport train(const TrainConfig& config, const Classifier& classifier,
                       std::shared_ptr<const data::Dataset> training, std::shared_ptr<const data::Dataset> test,
                       const TrainCallbacks& callbacks = {}, const std::atomic<bool>* stop = nullptr,
                       RunFolder* folder = nullptr);

/// Trains what the configuration names: its network, on its data, for its task (train/registry.h). Seeds the default
/// generator.
HS_API RunReport train(TrainConfig config, const TrainCallbacks& callbacks = {},
                       const std::atomic<bool>* stop = nullptr, RunFolder* folder = nullptr);
/// Takes over what a configuration says of its data once they are read: classes, checksums, and what a run that resumes
/// has to have the same of the flags of that kind of data.
HS_API void describe_data(TrainConfig& config, const RunData& data);

/// The task's results over a data set, on the network's device. Leaves the network's mode as it was.
HS_API EvalReport evaluate(Task& task, std::shared_ptr<const data::Dataset> test, const EvalOptions& options = {});
/// Loss, top-1 and top-5 over a data set, on the module's device, under autocast when a dtype is given. Leaves the
/// module's mode as it was.
HS_API EvalReport evaluate(const Classifier& classifier, std::shared_ptr<const data::Dataset> test,
                           std::optional<DType> dtype, std::int64_t batch_size = 1000);
HS_API EvalReport evaluate(const Classifier& classifier, std::shared_ptr<const data::Dataset> test,
                           const EvalOptions& options);

/// The peak memory use of this process, in 10^6 bytes.
HS_API double peak_rss_mb();

}  // namespace halfstep::training
