// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/amp/level.h"
#include "halfstep/amp/loss_scaler.h"
#include "halfstep/nn/module.h"
#include "halfstep/optim/optimizer.h"

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

/// A training step as one function: forward pass, loss, backward pass, unscaling, check, optimizer, scale. A handle:
/// copies are the same step. Made by build_train_network(); `capture(step)` replays it.
class HS_API TrainStep {
 public:
  /// Trains on a batch. Previous gradients are dropped, those of the step stay. Throws what the network, the loss and
  /// the optimizer throw, Error for a loss of more than one element, and AmpError if overflows exceeded the manager's
  /// limit.
  TrainStepResult operator()(const Tensor& input, const Tensor& target);

  /// The network's output in evaluation mode, without gradient recording; the mode is restored.
  Tensor predict(const Tensor& input) const;
  /// The step's loss for an output of the network.
  Tensor loss(const Tensor& output, const Tensor& target) const;
  const nn::ModuleBase& network() const;
  optim::Optimizer& optimizer() const;
  /// The loss scaler; null without a manager. Its state belongs in checkpoints.
  amp::GradScaler* scaler() const;

 private:
  friend HS_API TrainStep make_train_step(std::shared_ptr<nn::ModuleBase>, std::function<Tensor(const Tensor&)>,
                                          optim::Optimizer&, LossFunction, const TrainNetworkOptions&);
  struct Impl;
  explicit TrainStep(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<Impl> impl_;
};

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
