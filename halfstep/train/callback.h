// SPDX-License-Identifier: Apache-2.0
// The callback interface of a Model during training and evaluation. The built-in callbacks are in callbacks.h.
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/nn/module.h"
#include "halfstep/optim/optimizer.h"
#include "halfstep/train/metrics.h"

namespace halfstep::training {

/// The state of a run, as callbacks see it. Tensors are on the network's device: reading one waits for it.
class HS_API TrainContext {
 public:
  int epoch = 0;                    ///< from 1; 0 in a standalone evaluation
  int epochs = 0;                   ///< of the run
  std::int64_t step = 0;            ///< from 1, over the whole run
  std::int64_t step_in_epoch = 0;   ///< from 1
  std::int64_t steps_in_epoch = 0;  ///< batches of an epoch
  std::int64_t batch_size = 0;      ///< samples of the last batch

  Tensor loss;      ///< of the last step, one number
  Tensor overflow;  ///< of the last step, bool: whether gradients overflowed, so that it was dropped
  Tensor scale;     ///< loss scale of the last step; 1 without loss scaling

  const nn::ModuleBase* network = nullptr;  ///< never null in a run
  optim::Optimizer* optimizer = nullptr;    ///< null in an evaluation of a model without one
  const amp::GradScaler* scaler = nullptr;  ///< what scales the loss; null without loss scaling

  /// At the end of an epoch: the mean loss over its samples, without batches whose loss isn't finite.
  double epoch_loss = 0;
  std::int64_t skipped = 0;  ///< at the end of an epoch: steps of the run so far whose gradients overflowed
  MetricResults metrics;     ///< of the evaluation after this epoch, or of the one that ends; empty if there was none

  /// The quantities that can be monitored: `loss` (the epoch's), and with validation `eval_loss` and `eval_NAME` for
  /// each metric. All of them, or those that have a value now.
  const std::vector<std::string>& watchable() const { return watchable_; }
  /// The value of one of them, or nothing if there is none now. `NAME` stands for `eval_NAME` too.
  std::optional<double> watched(const std::string& name) const;
  /// Throws Error naming the choices if `name` can't be monitored in this run; `who` is the caller's name.
  void check_watchable(const std::string& who, const std::string& name) const;

  /// Ends the run after this step; `reason` may be shown to the user.
  void request_stop(std::string reason = "");
  /// Whether this has been requested.
  bool stop_requested() const { return stop_; }
  /// The first reason given.
  const std::string& stop_reason() const { return reason_; }

 private:
  friend class Model;
  std::vector<std::string> watchable_;
  bool stop_ = false;
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
  /// Before and after an evaluation, within a run or standalone.
  virtual void on_eval_begin(TrainContext& context);
  virtual void on_eval_end(TrainContext& context);
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
