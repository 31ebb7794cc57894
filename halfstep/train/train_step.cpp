// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/train_step.h"

#include <set>

#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"

namespace halfstep::training {
namespace {

constexpr const char* kName = "build_train_network";

bool low(std::optional<DType> dtype) { return dtype && is_low_precision(*dtype); }

// The level and dtype that the options come to.
struct Precision {
  amp::Level level;
  DType dtype;
};
Precision resolve(const TrainNetworkOptions& o) {
  using amp::Level;
  if (o.cast_model_type && *o.cast_model_type != f32 && !low(o.cast_model_type)) {
    fail<AmpError>("{}: expected a cast_model_type of f16, bf16 or f32, got {}", kName, name(*o.cast_model_type));
  }
  const DType dtype = o.cast_model_type.value_or(f16);
  Level level = o.level;
  if (o.cast_model_type == f32) level = Level::O0;
  // A type without a level: the whole network, as MindSpore casts it then.
  if (o.level == Level::O0 && low(o.cast_model_type)) level = Level::O3;
  if (level == Level::O2 || level == Level::O3) {
    if (o.keep_batchnorm_fp32) level = *o.keep_batchnorm_fp32 ? Level::O2 : Level::O3;
  } else if (o.keep_batchnorm_fp32 == false) {
    fail<AmpError>("{}: at level {} norms are not cast as a whole; keep_batchnorm_fp32 = false is for O2 and O3", kName,
                   amp::name(level));
  }
  return {level, dtype};
}

void check_parameters(const nn::ModuleBase& network, const optim::Optimizer& optimizer) {
  std::set<const TensorImpl*> own;
  for (const auto& p : network.parameters()) own.insert(p.tensor.impl());
  for (const auto& p : optimizer.named_parameters()) {
    if (own.contains(p.tensor.impl())) continue;
    fail<Error>("{}: the optimizer holds {} {}, which is no parameter of this network; was it made of another one?",
                kName, p.name.empty() ? "a parameter" : "'" + p.name + "'", p.tensor.sizes().str());
  }
}

}  // namespace

struct TrainStep::Impl {
  std::shared_ptr<nn::ModuleBase> network;
  std::function<Tensor(const Tensor&)> forward;
  optim::Optimizer& optimizer;
  LossFunction loss;
  std::optional<amp::GradScaler> scaler;
  bool drop = true;
  Tensor never = {}, one = {};  // overflow and scale where there are none

  Tensor take_loss(const Tensor& output, const Tensor& target) const {
    const auto wide = [](const Tensor& t) { return t.defined() && is_low_precision(t.dtype()) ? t.to(f32) : t; };
    Tensor result = loss(wide(output), wide(target));
    check_defined(result, "train_step", "a loss");
    if (result.numel() != 1) {
      fail<ShapeError>("train_step: expected a loss of one element, got {}; take its mean?", result.sizes().str());
    }
    return wide(result);
  }
  void constants(Device device) {
    if (never.defined() && never.device() == device) return;
    never = zeros({}, {.dtype = boolean, .device = device});
    one = ones({}, {.device = device});
  }
};

TrainStepResult TrainStep::operator()(const Tensor& input, const Tensor& target) {
  Impl& s = *impl_;
  s.optimizer.zero_grad();
  Tensor loss;
  {
    const EnableGrad on;
    loss = s.take_loss(s.forward(input), target);
    (s.scaler ? s.scaler->scale(loss) : loss).backward();
  }
  const NoGrad no_grad;
  s.constants(loss.device());
  TrainStepResult result{.loss = loss.detach(), .overflow = s.never.clone(), .scale = s.one.clone()};
  if (!s.scaler) {
    s.optimizer.step();
    return result;
  }
  result.scale = s.scaler->scale_tensor().clone();
  if (s.drop) {
    result.overflow = ne(s.scaler->step(s.optimizer).found_inf(), 0);
    s.scaler->update();
  } else if (s.optimizer.unscales()) {
    s.optimizer.step_unless({}, s.scaler->scale_tensor());
  } else {
    for (const auto& p : s.optimizer.named_parameters()) {
      if (const Tensor g = p.tensor.grad(); g.defined()) p.tensor.set_grad(g.to(f32) / result.scale);
    }
    s.optimizer.step();
  }
  return result;
}

Tensor TrainStep::predict(const Tensor& input) const {
  const NoGrad no_grad;
  const nn::EvalMode mode(*impl_->network);
  return impl_->forward(input);
}

Tensor TrainStep::loss(const Tensor& output, const Tensor& target) const { return impl_->take_loss(output, target); }
const nn::ModuleBase& TrainStep::network() const { return *impl_->network; }
optim::Optimizer& TrainStep::optimizer() const { return impl_->optimizer; }
amp::GradScaler* TrainStep::scaler() const { return impl_->scaler ? &*impl_->scaler : nullptr; }

TrainStep make_train_step(std::shared_ptr<nn::ModuleBase> network, std::function<Tensor(const Tensor&)> forward,
                          optim::Optimizer& optimizer, LossFunction loss, const TrainNetworkOptions& options) {
  if (!loss) fail<Error>("{}: expected a loss function, got none", kName);
  const Precision precision = resolve(options);
  check_parameters(*network, optimizer);
  if (precision.level != amp::Level::O0) {
    amp::set_level(*network, precision.level, precision.dtype);
  }
  auto manager = options.loss_scale_manager;
  // bf16 has float32's range and needs no scale.
  if (!manager && options.level == amp::Level::O2 && precision.level != amp::Level::O0 && precision.dtype == f16) {
    manager = amp::DynamicLossScaleManager();
  }
  auto impl = std::make_shared<TrainStep::Impl>(TrainStep::Impl{.network = std::move(network),
                                                                .forward = std::move(forward),
                                                                .optimizer = optimizer,
                                                                .loss = std::move(loss),
                                                                .scaler = {}});
  if (manager) {
    impl->scaler.emplace(manager->policy());
    impl->drop = manager->drop_overflow_update();
  }
  return TrainStep(std::move(impl));
}

}  // namespace halfstep::training
