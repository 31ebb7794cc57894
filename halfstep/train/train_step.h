// SPDX-License-Identifier: Apache-2.0
#pragma once

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
#include "halfstep/amp/level.h"
#include "halfstep/amp/loss_scaler.h"
#include "halfstep/capture/capture.h"
#include "halfstep/dist/data_parallel.h"
#include "halfstep/nn/module.h"
#include "halfstep/optim/optimizer.h"
#include "halfstep/train/task.h"

namespace halfstep::training {

/// The loss of the network's output and the target; one element.
using LossFunction = std::function<Tensor(const Tensor& output, const Tensor& target)>;

/// Options of build_train_network. A level sets the same defaults as MindSpore's; values given here take precedence:
///
/// | level        | cast_model_type | keep_batchnorm_fp32 | loss_scale_manager               |
/// | ------------ | --------------- | ------------------- | -------------------------------- |
/// | O0           | none            |                     | none                             |
/// | O1, auto     | f16             |                     | none                             |
/// | O2           | f16             | true                | DynamicLossScaleManager (f16's)  |
/// | O3           | f16             | false               | none                             |
struct TrainNetworkOptions {
  amp::Level level = amp::Level::O0;             ///< what runs in 16 bits
  std::optional<bool> keep_batchnorm_fp32 = {};  ///< norms stay float32: at O2 and O3, and with a type at O0
  std::optional<DType> cast_model_type = {};     ///< f16 or bf16, instead of the level's; f32: the level O0
  std::optional<amp::LossScaleManager> loss_scale_manager = {};
};

/// The results of a step, all on the network's device.
struct TrainStepResult {
  Tensor loss;      ///< f32 or f64 [], unscaled
  Tensor overflow;  ///< bool []: whether gradients overflowed, so that the step was dropped
  Tensor scale;     ///< f32 []: the loss scale that the step used; 1 without scaling
};
/// For capture().
template <class V>
void visit_tensors(TrainStepResult& result, V&& visit) {
  visit(result.loss);
  visit(result.overflow);
  visit(result.scale);
}

/// What a step on several batches, or of a Task, gives; all tensors are on the network's device, for the host to read
/// or not.
struct HS_API StepValues {
  std::vector<Tensor> losses = {};   ///< f32 or f64 [], unscaled: of each batch; of several ranks that of the step
  std::vector<double> weights = {};  ///< of each batch: its share of the step's samples
  std::int64_t samples = 0;          ///< of all batches, on all ranks
  /// f32 []: not 0 where gradients overflowed, so that the step was dropped. Without scaling all steps hand out one
  /// tensor, as of `scale`.
  Tensor overflow = {};
  Tensor scale = {};           ///< f32 []: the loss scale that the step used; 1 without scaling
  NamedTensors parts = {};     ///< TaskLoss::parts, added up over the batches
  Tensor overflow_flags = {};  ///< f32 [gradients]: not 0 for those that overflowed; undefined without scaling
  std::shared_ptr<const std::vector<std::string>> gradient_names = {};  ///< of overflow_flags
  /// TaskLoss::count_later of the batches.
  std::vector<std::function<void(std::map<std::string, double>&)>> count_later = {};

  /// The step's loss: of its only batch, or the mean over its samples.
  Tensor loss() const;
};
/// For capture().
template <class V>
void visit_tensors(StepValues& values, V&& visit) {
  for (Tensor& t : values.losses) visit(t);
  for (NamedTensor& t : values.parts) visit(t.tensor);
  visit(values.overflow);
  visit(values.scale);
  visit(values.overflow_flags);
}

/// Options of make_train_step for a Task.
struct StepOptions {
  /// Dtype of the autocast region around Task::loss; none: the caller's own region, or none. Networks at a level of
  /// mixed precision need none.
  std::optional<DType> autocast = {};
  double clip_norm = 0;           ///< largest 2-norm of all gradients together; 0: no clipping
  bool sum_over_samples = false;  ///< gradients are those of the loss times the step's samples, not of the mean
  /// Of the task's network: each rank makes the step on its part of the batches, and the gradients are those of the
  /// mean loss over all parts' samples. Ranks have as many batches; their sizes may differ where a loader says what the
  /// whole is (data::LoaderOptions::ranks). Losses and parts are those of all ranks together.
  std::shared_ptr<dist::DataParallelBase> parallel = {};
  /// Above 0, a power of 2: every batch is divided into this many shards, whatever the number of ranks, which has to
  /// divide it. Each shard runs its own forward and backward pass, with its own statistics and random numbers, and
  /// gradients are summed as a tree over the shards: 1, 2, 4, ... ranks give the same bits. Running statistics are
  /// those of the first shard. `parallel`, if there are several ranks, is to have the hook of shard_hook(), no
  /// broadcast of buffers and no synchronised batch norms, and their loaders divide batches into the same shards
  /// (data::LoaderOptions::shards). Steps are not captured, and small shards cost speed.
  int shards = 0;
};

/// How gradients are reduced for StepOptions::shards: the ranks' sums are gathered and added up as a tree, which sends
/// as many times the bytes of a gradient as there are other ranks. Throws Error from a step on a number of ranks that
/// is no power of 2.
HS_API dist::CommunicationHook shard_hook();

/// A training step as one function: forward pass, loss, backward pass, unscaling, check, clipping, optimizer, scale. A
/// handle: copies are the same step. Made by build_train_network() or make_train_step(); `capture(step)` replays it.
class HS_API TrainStep {
 public:
  /// Trains on a batch. Previous gradients are dropped, those of the step stay. Throws what the network, the loss and
  /// the optimizer throw, Error for a loss of more than one element, and AmpError if overflows exceeded the manager's
  /// limit.
  TrainStepResult operator()(const Tensor& input, const Tensor& target);
  /// One step on several batches, whose gradients are added up: each loss counts by its share of the samples. Nothing
  /// is read by the host. Throws as above, and Error without batches.
  StepValues run(std::span<const data::Batch> batches);
  /// The same, replayed from memory where it can be (capture/capture.h): then the loss must be made of ops.
  StepValues run_captured(std::span<const data::Batch> batches);
  /// Frees the memory that replays need, as far as gradients don't lie in it: an evaluation takes its place. The next
  /// run_captured() records the step again.
  void release_captured();
  /// How the calls of run_captured() ran, and why the last one was no replay; empty when it was or may come to be.
  CaptureStats capture_stats() const;
  std::string why_not_captured() const;

  /// The network's output in evaluation mode, without gradient recording; the mode is restored. Throws Error for a step
  /// of a Task, which has no output of an input alone.
  Tensor predict(const Tensor& input) const;
  /// The step's loss for an output of the network. Throws as predict() does.
  Tensor loss(const Tensor& output, const Tensor& target) const;
  Task& task() const;
  const nn::ModuleBase& network() const;
  optim::Optimizer& optimizer() const;
  /// The loss scaler; null without loss scaling. Its state belongs in checkpoints.
  amp::GradScaler* scaler() const;
  const StepOptions& options() const;

 private:
  friend HS_API TrainStep make_train_step(std::shared_ptr<nn::ModuleBase>, std::function<Tensor(const Tensor&)>,
                                          optim::Optimizer&, LossFunction, const TrainNetworkOptions&);
  friend HS_API TrainStep make_train_step(std::shared_ptr<Task>, optim::Optimizer&, std::optional<amp::GradScaler>,
                                          const StepOptions&);
  struct Impl;
  explicit TrainStep(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<Impl> impl_;
};

/// The step of a task. The optimizer, which may hold a part of the network's parameters only, has to live as long as
/// the step. A scaler that is disabled is as none. Throws Error for parameters that are not the network's.
HS_API TrainStep make_train_step(std::shared_ptr<Task> task, optim::Optimizer& optimizer,
                                 std::optional<amp::GradScaler> scaler = {}, const StepOptions& options = {});

/// Type-erased build_train_network().
HS_API TrainStep make_train_step(std::shared_ptr<nn::ModuleBase> network, std::function<Tensor(const Tensor&)> forward,
                                 optim::Optimizer& optimizer, LossFunction loss, const TrainNetworkOptions& options);

/// A network, its loss and its optimizer as one step, at a level of mixed precision. MindSpore's
/// amp.build_train_network. The network is put at the level (amp::auto_mixed_precision) and trained in place;
/// parameters are float32 at every level, the master weights of their 16-bit copies. The loss is computed in float32.
/// The optimizer must outlive the step.
///
///     auto step = training::build_train_network(net, optimizer, nn::CrossEntropyLoss{}, {.level = amp::Level::O2});
///     const auto [loss, overflow, scale] = step(images, labels);
///
/// Throws Error if the optimizer holds parameters that are not the network's, AmpError for inconsistent options.
template <nn::TensorModule M>
TrainStep build_train_network(const M& network, optim::Optimizer& optimizer, LossFunction loss,
                              const TrainNetworkOptions& options = {}) {
  auto held = std::make_shared<M>(network);
  return make_train_step(
      held, [held](const Tensor& x) -> Tensor { return (*held)(x); }, optimizer, std::move(loss), options);
}

}  // namespace halfstep::training
