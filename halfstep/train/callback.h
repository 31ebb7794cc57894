// SPDX-License-Identifier: Apache-2.0
// The callback interface of a Model during training and evaluation. The built-in callbacks are in callbacks.h.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/data/dataset.h"
#include "halfstep/nn/module.h"
#include "halfstep/optim/optimizer.h"
#include "halfstep/train/meters.h"
#include "halfstep/train/metrics.h"

namespace halfstep::training {

class TrainStep;

/// A step whose values the host has read.
struct StepRecord {
  int epoch = 0;                    ///< from 1
  std::int64_t step = 0;            ///< from 1, over the whole run
  std::int64_t step_in_epoch = 0;   ///< from 1
  std::int64_t samples = 0;         ///< of all its batches
  double loss = 0;                  ///< mean over its samples, unscaled
  double mean_loss = 0;             ///< over the epoch's samples so far, batches without a finite loss left out
  std::vector<double> losses = {};  ///< of each batch
  std::map<std::string, double> parts = {};        ///< TaskLoss::parts: sums over its samples
  std::map<std::string, double> epoch_parts = {};  ///< their sums over the epoch so far, infinities and NaN left out
  std::int64_t epoch_samples = 0;                  ///< the samples that those are of
  double lr = 0;                                   ///< learning rate of group 0
  double scale = 1;                                ///< loss scale that it used; 1 without loss scaling
  bool skipped = false;                            ///< gradients overflowed, so that the step was dropped
  std::string overflow = {};                       ///< first parameter whose gradient overflowed, if it was
  std::int64_t skipped_steps = 0;                  ///< of the run so far
  double seconds = 0;                              ///< between the ends of the step before and of this one
  double data_seconds = 0;                         ///< of that, waiting for batches
  double samples_per_s = 0;                        ///< of the epoch so far, evaluation left out
};

/// How an evaluation stands after a batch, as far as its values were read; means are over the samples so far.
struct EvalProgress {
  std::int64_t batch = 0;  ///< from 1
  std::int64_t batches = 0;
  Meter seconds = {};  ///< of a batch
  Meter loss = {};
  std::map<std::string, Meter> parts = {};  ///< TaskLoss::parts, divided by the samples
};

/// Where a run stands, as far as its values were read: what a checkpoint keeps and a run goes on from.
struct HS_API RunState {
  int epoch = 0;                             ///< finished epochs
  std::int64_t batch = 0;                    ///< of the next epoch: batches that were trained on
  std::int64_t step = 0;                     ///< over the whole run
  std::int64_t skipped = 0;                  ///< steps whose gradients overflowed
  double loss_sum = 0;                       ///< over the samples of the epoch so far whose loss is finite
  std::int64_t loss_samples = 0;             ///< how many those are
  std::map<std::string, double> parts = {};  ///< sums over `samples` of the epoch so far
  std::int64_t samples = 0;                  ///< that `parts` are of: of the epoch, since they were counted

  /// Mean loss of the epoch so far; NaN where no loss was finite.
  double mean_loss() const;
};

/// How a run stands, as callbacks see it. Tensors are on the network's device: reading one waits for it.
class HS_API TrainContext {
 public:
  int epoch = 0;                    ///< from 1; 0 in a standalone evaluation
  int epochs = 0;                   ///< of the run
  std::int64_t step = 0;            ///< from 1, over the whole run
  std::int64_t step_in_epoch = 0;   ///< from 1
  std::int64_t steps_in_epoch = 0;  ///< steps of an epoch
  std::int64_t accumulate = 1;      ///< batches of a step, but the last one of an epoch
  std::int64_t batch_size = 0;      ///< samples of the last step

  std::span<const data::Batch> batches;  ///< of the step, from on_step_begin to on_step_end

  Tensor loss;      ///< of the last step, one number
  Tensor overflow;  ///< of the last step, one number: not 0 where gradients overflowed, so that it was dropped
  Tensor scale;     ///< loss scale of the last step; 1 without loss scaling

  const nn::ModuleBase* network = nullptr;  ///< never null in a run
  optim::Optimizer* optimizer = nullptr;    ///< null in an evaluation of a model without one
  const amp::GradScaler* scaler = nullptr;  ///< what scales the loss; null without loss scaling
  const TrainStep* train_step = nullptr;    ///< what makes the steps; null where the optimizer is

  /// At the end of an epoch: the mean loss over its samples, without batches whose loss isn't finite.
  double epoch_loss = 0;
  std::int64_t skipped = 0;  ///< at the end of an epoch: steps of the run so far whose gradients overflowed
  MetricResults metrics;     ///< of the evaluation after this epoch, or of the one that ends; empty if there was none

  /// Where the run stands as far as values were read: all of it at on_epoch_end, on_eval_begin and later.
  const RunState& state() const { return state_; }
  /// Reads the values of the steps so far that were not read yet; on_values sees them before this returns.
  void read_values() {
    if (read_) read_();
  }

  /// What can be watched: `loss` (the epoch's), and with validation `eval_loss` and `eval_NAME` for each metric. All of
  /// them, or those that have a value now.
  const std::vector<std::string>& watchable() const { return watchable_; }
  /// The value of one of them, or nothing if there is none now. `NAME` stands for `eval_NAME` too.
  std::optional<double> watched(const std::string& name) const;
  /// Throws Error naming the choices if `name` can't be monitored in this run; `who` is the caller's name.
  void check_watchable(const std::string& who, const std::string& name) const;

  /// Ends the run after this step; `reason` may be shown to the user.
  void request_stop(std::string reason = "");
  /// Whether this has been requested.
  bool stop_requested() const { return stop_; }
  /// Whether FitOptions::stop has ended the run, on this rank or another one, before its last epoch was over.
  bool interrupted() const { return interrupted_ && state_.epoch < epochs; }
  /// The first reason given.
  const std::string& stop_reason() const { return reason_; }

 private:
  friend class Model;
  friend class Loop;
  RunState state_;
  std::function<void()> read_;
  std::vector<std::string> watchable_;
  bool stop_ = false;
  bool interrupted_ = false;
  std::string reason_;
};

/// The common base of all callbacks; each function does nothing unless overridden. They are called in the order in
/// which the callbacks were given; an exception ends the run.
class HS_API CallbackBase {
 public:
  virtual ~CallbackBase();
  /// Before the first and after the last step of a run.
  virtual void on_train_begin(TrainContext& context);
  virtual void on_train_end(TrainContext& context);
  /// Before the first step of an epoch, and after its last one and the evaluation.
  virtual void on_epoch_begin(TrainContext& context);
  virtual void on_epoch_end(TrainContext& context);
  /// Before and after a step. The context's values are those of this step.
  virtual void on_step_begin(TrainContext& context);
  virtual void on_step_end(TrainContext& context);
  /// Steps whose values were read, oldest first; every step comes once. On the CPU that is after each step, before
  /// on_step_end; on other devices every FitOptions::read_every steps, so that the queue doesn't wait for the host,
  /// and before an evaluation or the epoch ends.
  virtual void on_values(TrainContext& context, std::span<const StepRecord> steps);
  /// Before and after an evaluation, within a run or of its own.
  virtual void on_eval_begin(TrainContext& context);
  virtual void on_eval_end(TrainContext& context);
  /// For each batch of an evaluation once its values are read: on the CPU at once, elsewhere those of
  /// FitOptions::read_every batches together.
  virtual void on_eval_batch(TrainContext& context, const EvalProgress& progress);
};

/// Any callback, by value. Copies share the callback. To inspect one after the run, keep a handle such as History, or a
/// shared_ptr.
class HS_API Callback {
 public:
  template <std::derived_from<CallbackBase> C>
  Callback(C callback) : Callback(std::shared_ptr<CallbackBase>(std::make_shared<C>(std::move(callback)))) {}
  /// One that the caller keeps a handle on.
  Callback(std::shared_ptr<CallbackBase> callback);
  CallbackBase* operator->() const { return callback_.get(); }

 private:
  std::shared_ptr<CallbackBase> callback_;
};

}  // namespace halfstep::training
