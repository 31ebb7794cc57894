// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "halfstep/capture/capture.h"
#include "halfstep/train/batches.h"
#include "halfstep/train/callbacks.h"
#include "halfstep/train/train_step.h"

namespace halfstep::training {

/// Options of Model; all may be left out, but then not everything can be done with it.
struct ModelOptions {
  /// Of the network's output (float32) and the target: nn::CrossEntropyLoss{}, or any function. For training, and for
  /// the metric `loss`.
  LossFunction loss = {};
  /// For training; made of the network's parameters, and it must outlive the model.
  std::optional<std::reference_wrapper<optim::Optimizer>> optimizer = {};
  /// The metrics of eval(): objects such as Accuracy{}, or names such as "accuracy".
  std::vector<Metric> metrics = {};
  /// What runs in 16 bits, in training, evaluation and prediction alike.
  amp::Level amp_level = amp::Level::O0;
  /// Loss scaling; by default the level's (TrainNetworkOptions).
  std::optional<amp::LossScaleManager> loss_scale_manager = {};
  std::optional<bool> keep_batchnorm_fp32 = {};  ///< see TrainNetworkOptions
  std::optional<DType> cast_model_type = {};     ///< f16 or bf16, see TrainNetworkOptions
  /// Replays training steps from memory where possible (capture()): then the loss must be composed of ops, and
  /// host-side counters or decisions in it run only when a step is recorded.
  bool capture = false;
};

/// Options of Model::train and Model::fit.
struct FitOptions {
  int every = 1;       ///< epochs between evaluations
  int accumulate = 1;  ///< batches whose gradients make one step; at an epoch's end fewer, with their own weight
  /// Steps between two reads of the values of steps on another device than the CPU, where each read would make the
  /// queue wait for the host; CallbackBase::on_values gets them.
  int read_every = 100;
  /// Ends the run after the step, or gives up the evaluation, when it becomes true.
  const std::atomic<bool>* stop = nullptr;
  /// Called before the first batch of each evaluation, behind on_eval_begin; the result is destroyed after the last
  /// one, before on_eval_end. For what an evaluation alone needs, such as dist::ZeroRedundancy::gather_parameters().
  std::function<std::shared_ptr<void>()> during_evaluation = {};
  /// Where a run resumes: Model::resume() returns it, and TrainContext::state() gives it in a run, whose loader has to
  /// be put there (data::DataLoader::seek).
  RunState from = {};
};

/// A network with its loss, optimizer, metrics and precision, which trains, evaluates and predicts without hand-written
/// loops: MindSpore's Model.
///
///     training::Model model{net, {.loss = nn::CrossEntropyLoss{},
///                              .optimizer = optimizer,
///                              .metrics = {training::Accuracy{}},
///                              .amp_level = amp::Level::O2,
///                              .loss_scale_manager = amp::FixedLossScaleManager{1024}}};
///     model.train(10, loader, {training::LossMonitor{100}, training::TimeMonitor{}});
///     std::cout << model.eval(test)["accuracy"];
///
/// The network is shared, as a copy of a module is; it runs at `amp_level` from then on, also when it is called by
/// itself. Batches may be on any device: they are moved to the network's.
///
/// A network with a loss of more than an output and a target, or with batches of more tensors, is a Task: a Model of
/// the step of one (make_train_step) runs the same loop.
class HS_API Model {
 public:
  /// Throws Error for a loss scale manager or precision options without an optimizer, an optimizer without a loss or of
  /// another network's parameters, and two metrics of one name.
  template <nn::TensorModule M>
  explicit Model(const M& network, const ModelOptions& options = {});
  /// Of a task's step; `capture` as in ModelOptions.
  explicit Model(TrainStep step, bool capture = false);
  ~Model();
  Model(Model&&) noexcept;
  Model& operator=(Model&&) noexcept;

  /// Trains until `epochs` epochs are done and returns their results. Epochs and steps count from 1, or go on from
  /// FitOptions::from. A run ends early if a callback requests it or throws. The network is in training mode during the
  /// run and then returns to its previous mode. Throws Error without an optimizer, for less than one epoch, when there
  /// are no batches, and for a loader that doesn't stand where `from` says.
  History train(int epochs, const Batches& training, const std::vector<Callback>& callbacks = {},
                const FitOptions& options = {});
  /// The same with an evaluation on `validation` at the end of epochs: callbacks can watch `eval_loss` and `eval_NAME`
  /// for each metric; of a Task, `eval_loss` and Task::best_by().
  History fit(int epochs, const Batches& training, const Batches& validation,
              const std::vector<Callback>& callbacks = {}, const FitOptions& options = {});
  /// The metrics over a data set, with the network in evaluation mode and nothing recorded. Throws Error without
  /// metrics or batches, and whatever a metric that doesn't fit the output throws.
  MetricResults eval(const Batches& data, const std::vector<Callback>& callbacks = {});
  /// What the network says to a batch, in evaluation mode and without a gradient, on the network's device. Throws Error
  /// for a Model of a Task.
  Tensor predict(const Tensor& input) const;

  /// Restores weights and the states of the optimizer and the loss scale from a file written by ModelCheckpoint. Throws
  /// Error if it is from another network or kind of optimizer, IoError if it can't be read.
  void restore(const std::filesystem::path& checkpoint);
  /// The same, and puts the default generator and `training` where they stood: a run from FitOptions::from = the result
  /// gives the bits that the run which wrote the file would have given, also from the middle of an epoch. What
  /// callbacks count (EarlyStopping, ReduceLROnPlateau) starts anew. Throws Error as well if the loader has no such
  /// place, and then nothing is changed.
  RunState resume(const std::filesystem::path& checkpoint, data::DataLoader& training);
  /// How the training steps so far ran, with ModelOptions::capture; otherwise all 0.
  CaptureStats capture_stats() const;
  /// The network; it shares its parameters with the one that was given.
  const nn::ModuleBase& network() const;

 private:
  // What is known of the network's type.
  struct Parts {
    std::shared_ptr<const nn::ModuleBase> module;
    std::function<Tensor(const Tensor&)> forward;
    std::optional<TrainStep> step;
  };
  struct Impl;

  explicit Model(const Parts& parts, const ModelOptions& options);
  static amp::Level level_of(const ModelOptions& options);
  static void check(const ModelOptions& options);
  std::unique_ptr<Impl> impl_;

  template <class M>
  static Parts parts(const M& network, const ModelOptions& options);
};

template <nn::TensorModule M>
Model::Model(const M& network, const ModelOptions& options) : Model(parts(network, options), options) {}

template <class M>
Model::Parts Model::parts(const M& network, const ModelOptions& options) {
  check(options);
  auto shared = std::make_shared<const M>(network);
  Parts result{.module = shared, .forward = [shared](const Tensor& x) { return (*shared)(x); }, .step = {}};
  if (options.optimizer) {
    result.step.emplace(build_train_network(*shared, options.optimizer->get(), options.loss,
                                            {.level = options.amp_level,
                                             .keep_batchnorm_fp32 = options.keep_batchnorm_fp32,
                                             .cast_model_type = options.cast_model_type,
                                             .loss_scale_manager = options.loss_scale_manager}));
  } else if (const amp::Level level = level_of(options); level != amp::Level::O0) {
    amp::auto_mixed_precision(*shared, level, options.cast_model_type.value_or(f16));
  }
  return result;
}

}  // namespace halfstep::training
