// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "halfstep/data/loader.h"
#include "halfstep/nn/module.h"
#include "halfstep/runtime/fallback.h"
#include "halfstep/train/config.h"
#include "halfstep/train/meters.h"
#include "halfstep/train/networks.h"
#include "halfstep/train/run_folder.h"

namespace halfstep::training {

/// The state of the run after a step.
struct StepReport {
  int epoch;                   ///< from 1
  std::int64_t step;           ///< from 1, over the whole run
  std::int64_t step_in_epoch;  ///< from 1
  std::int64_t steps_in_epoch;
  double loss;       ///< mean over the samples of the step
  double mean_loss;  ///< mean over the epoch so far
  double lr;
  double scale;          ///< loss scale that the step used, 1 without scaling
  std::int64_t skipped;  ///< steps skipped so far
  std::string overflow;  ///< parameter whose gradient overflowed, if the step was skipped
  double samples_per_s;  ///< of the epoch so far, evaluation left out
  Meter seconds = {};  ///< of a step, waiting for data included; the mean is of the epoch since it was begun or resumed
  Meter data_seconds = {};  ///< of waiting for data
  Meter top1 = {};          ///< fractions of 1, over the epoch so far; with TrainConfig::train_accuracy
  Meter top5 = {};
};

/// Result of an evaluation.
struct EvalReport {
  int epoch;
  std::int64_t step;
  double loss;
  double top1;  ///< fractions of 1
  double top5;
  bool best;                 ///< the best so far in this run
  double train_loss = NAN;   ///< mean over the epoch's training samples; NaN outside of training
  double scale = 1;          ///< loss scale that comes next, 1 without scaling
  std::int64_t skipped = 0;  ///< steps skipped so far
  bool interrupted = false;  ///< EvalOptions::stop was set: the numbers are meaningless
};

/// The state of an evaluation after a batch; means are over the samples so far.
struct EvalProgress {
  std::int64_t batch;  ///< from 1
  std::int64_t batches;
  Meter seconds = {};
  Meter loss = {};
  Meter top1 = {};  ///< fractions of 1
  Meter top5 = {};
};
/// Options of evaluate.
struct EvalOptions {
  std::optional<DType> dtype = {};  ///< of autocast; none: float32
  std::int64_t batch_size = 1000;
  int workers = 1;
  int prefetch = 4;  ///< batches that each worker prefetches
  std::function<void(const EvalProgress&)> on_batch = {};
  const std::atomic<bool>* stop = nullptr;  ///< aborts when it becomes true
};

/// How a run ended.
struct RunReport {
  int epochs = 0;  ///< finished
  std::int64_t steps = 0;
  std::int64_t skipped = 0;
  double seconds = 0;
  double peak_rss_mb = 0;  ///< of the process, in 10^6 bytes
  double loss = NAN;       ///< of the last evaluation; NaN where none was made
  double top1 = NAN;
  double top5 = NAN;
  std::vector<FallbackCount> fallbacks = {};  ///< ops that ran on the CPU instead of the device
  bool nothing_left = false;                  ///< the resumed run had already finished all its epochs
  bool interrupted = false;                   ///< stop was set; a checkpoint was written if there is a folder for it
  std::filesystem::path checkpoint = {};      ///< the last one written
};

/// Callbacks of a run to its caller; any may be empty.
struct TrainCallbacks {
  /// Called once, after all checks and with the folder and the log ready, before a file is written or changed; not
  /// called if there is nothing left to do.
  std::function<void()> on_start = {};
  std::function<void(const StepReport&)> on_step;
  std::function<void(const EvalReport&)> on_eval;
  std::function<void(const EvalProgress&)> on_eval_batch;
  std::function<void(const std::filesystem::path&)> on_checkpoint;
  std::function<void(const std::string& report)> on_debug;  ///< what TrainConfig::debug found: lines of text
};

/// Trains according to the configuration: autocast around forward pass and loss, loss scaling, accumulation (the last,
/// smaller group of an epoch with its own weighting), clipping, checkpoints `last.safetensors` and `best.safetensors`
/// in `out`, JSON lines in `log_json`. The module is moved to the configuration's device; batches are copied there
/// ahead of the steps. Evaluates on `test` after each epoch. When `stop` becomes true it finishes the step (or aborts
/// the evaluation, which a resumed run repeats), writes a checkpoint and returns. Throws Error for a loss that isn't
/// finite, and IoError. No checkpoint is written over another one while the losses aren't finite: the last good one
/// stays.
///
/// All checks run before any file is written: a rejected run changes no files. `out` is created if needed and locked
/// (train/run_folder.h), unless the caller has done that and passes `folder`; a folder with a run in it is rejected,
/// unless it is the one being resumed or `overwrite` is set. The log of a resumed run loses the lines that will be
/// repeated.
HS_API RunReport train(const TrainConfig& config, const Classifier& classifier,
                       std::shared_ptr<const data::Dataset> training, std::shared_ptr<const data::Dataset> test,
                       const TrainCallbacks& callbacks = {}, const std::atomic<bool>* stop = nullptr,
                       RunFolder* folder = nullptr);

/// Loss, top-1 and top-5 over a data set, on the module's device, under autocast when a dtype is given. Leaves the
/// module's mode as it was.
HS_API EvalReport evaluate(const Classifier& classifier, std::shared_ptr<const data::Dataset> test,
                           std::optional<DType> dtype, std::int64_t batch_size = 1000);
HS_API EvalReport evaluate(const Classifier& classifier, std::shared_ptr<const data::Dataset> test,
                           const EvalOptions& options);

/// The peak memory use of this process, in 10^6 bytes.
HS_API double peak_rss_mb();

}  // namespace halfstep::training
