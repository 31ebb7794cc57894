// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/model.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/ops/join.h"
#include "halfstep/train/checkpoint.h"

namespace halfstep::training {
namespace {

constexpr std::size_t kMostPending = 1000;

// Training mode for as long as something lasts; then every module has the mode that it had.
class TrainMode {
 public:
  explicit TrainMode(const nn::ModuleBase& module) {
    if (module.is_training()) return;  // parts may be frozen
    module.apply([this](const std::string&, const nn::ModuleBase& m) { was_.emplace_back(&m, m.is_training()); });
    module.train();
  }
  ~TrainMode() {
    for (const auto& [module, training] : was_) module->train(training);  // outer ones first
  }
  TrainMode(const TrainMode&) = delete;
  TrainMode& operator=(const TrainMode&) = delete;

 private:
  std::vector<std::pair<const nn::ModuleBase*, bool>> was_;
};

// Losses and overflow flags of an epoch. On the CPU they are read at once, elsewhere many in one go: the queue isn't to
// wait for the host at every step.
class Tally {
 public:
  void add(const TrainStepResult& step, std::int64_t samples) {
    samples_.push_back(samples);
    keep(losses_, step.loss);
    if (step.overflow.defined()) keep(overflows_, step.overflow);
    if (step.loss.device().is_cpu() || samples_.size() >= kMostPending) read();
  }
  // Mean loss since reset(), NaN when no loss was finite.
  double mean() {
    read();
    return weight_ > 0 ? sum_ / weight_ : std::nan("");
  }
  std::int64_t skipped() {
    read();
    return skipped_;
  }
  void next_epoch() {
    read();
    sum_ = weight_ = 0;
  }

 private:
  static void keep(std::vector<Tensor>& list, const Tensor& t) {
    // A step that is replayed writes its results where those of the one before were.
    list.push_back(t.device().is_cpu() ? t : t.detach().clone());
  }

  static std::vector<double> values(std::vector<Tensor>& list) {
    std::vector<double> result;
    if (list.size() == 1) {
      result.push_back(list[0].item<double>());
    } else if (!list.empty()) {
      for (Tensor& t : list) t = t.detach().reshape({});
      result = stack(list).to_vector<double>();
    }
    list.clear();
    return result;
  }

  void read() {
    const NoGrad no_grad;
    const std::vector<double> losses = values(losses_);
    for (std::size_t i = 0; i < losses.size(); ++i) {
      // One overflowing batch is not to take the epoch's mean with it.
      if (!std::isfinite(losses[i])) continue;
      sum_ += losses[i] * static_cast<double>(samples_[i]);
      weight_ += static_cast<double>(samples_[i]);
    }
    for (double found : values(overflows_)) skipped_ += found != 0;
    samples_.clear();
  }

  std::vector<Tensor> losses_, overflows_;
  std::vector<std::int64_t> samples_;

  double sum_ = 0, weight_ = 0;
  std::int64_t skipped_ = 0;
};

Device device_of(const nn::ModuleBase& network) {
  const NamedTensors state = network.state_dict();
  return state.empty() ? Device{} : state[0].tensor.device();
}

std::int64_t rows(const Tensor& t) { return t.dim() > 0 ? t.size(0) : 1; }

}  // namespace

struct Model::Impl {
  Parts parts;
  ModelOptions options;
  std::optional<Captured<TrainStep>> captured = {};

  TrainStepResult step(const Tensor& input, const Tensor& target) {
    return captured ? (*captured)(input, target) : (*parts.step)(input, target);
  }
};

// A low type without a level is the whole network in it, as in build_train_network.
amp::Level Model::level_of(const ModelOptions& options) {
  if (options.cast_model_type == f32) return amp::Level::O0;
  if (options.cast_model_type && options.amp_level == amp::Level::O0) return amp::Level::O3;
  return options.amp_level;
}

void Model::check(const ModelOptions& options) {
  if (!options.optimizer) {
    if (options.loss_scale_manager) {
      fail<AmpError>(
          "Model: expected an optimizer beside the loss scale manager, got none; only training scales losses");
    }
    if (options.keep_batchnorm_fp32) {
      fail<AmpError>("Model: expected an optimizer beside keep_batchnorm_fp32, got none; it is an option of training");
    }
  } else if (!options.loss) {
    fail<Error>("Model: expected a loss beside the optimizer, got none");
  }
  std::set<std::string> names;
  for (const Metric& m : options.metrics) {
    if (!names.insert(m.name()).second) {
      fail<Error>(
          "Model: expected metrics of different names, got \"{}\" twice; training::Metric(\"NAME\", metric) gives "
          "one another name",
          m.name());
    }
    if (m->takes_loss() && !options.loss) {
      fail<Error>("Model: expected a loss for the metric \"{}\", got none", m.name());
    }
  }
}

Model::Model(const Parts& parts, const ModelOptions& options)
    : impl_(std::make_unique<Impl>(Impl{.parts = parts, .options = options})) {
  if (options.capture && parts.step) impl_->captured.emplace(capture(*parts.step));
}
Model::~Model() = default;
Model::Model(Model&&) noexcept = default;
Model& Model::operator=(Model&&) noexcept = default;

CaptureStats Model::capture_stats() const { return impl_->captured ? impl_->captured->stats() : CaptureStats(); }

const nn::ModuleBase& Model::network() const { return *impl_->parts.module; }

History Model::train(int epochs, const Batches& training, const std::vector<Callback>& callbacks) {
  return run(epochs, training, nullptr, callbacks, 1);
}

History Model::fit(int epochs, const Batches& training, const Batches& validation,
                   const std::vector<Callback>& callbacks, const FitOptions& options) {
  if (options.every < 1)
    fail<Error>("Model::fit: expected at least 1 epoch between evaluations, got {}", options.every);
  return run(epochs, training, &validation, callbacks, options.every);
}

History Model::run(int epochs, const Batches& training, const Batches* validation,
                   const std::vector<Callback>& callbacks, int every) {
  const char* who = validation ? "Model::fit" : "Model::train";
  if (!impl_->parts.step) {
    fail<Error>("{}: expected a model with an optimizer, got one without; ModelOptions has a place for it", who);
  }
  if (epochs < 1) fail<Error>("{}: expected at least 1 epoch, got {}", who, epochs);
  if (training.size() < 1) fail<Error>("{}: expected at least one batch an epoch, got none", who);
  const nn::ModuleBase& network = *impl_->parts.module;
  const Device device = device_of(network);
  const TrainMode mode(network);
  TrainContext context;
  context.epochs = epochs;
  context.steps_in_epoch = training.size();
  context.network = &network;
  context.optimizer = &impl_->options.optimizer->get();
  context.scaler = impl_->parts.step->scaler();
  context.watchable_ = {"loss"};
  if (validation) {
    context.watchable_.push_back("eval_loss");
    for (const Metric& m : impl_->options.metrics) {
      if (m.name() != "loss") context.watchable_.push_back("eval_" + m.name());
    }
  }
  // The history sees the rates that an epoch was trained with, before another callback changes them.
  History history;
  std::vector<Callback> all{history};
  all.insert(all.end(), callbacks.begin(), callbacks.end());
  Tally tally;
  for (const Callback& c : all) c->on_train_begin(context);
  while (context.epoch < epochs && !context.stop_requested()) {
    ++context.epoch;
    context.step_in_epoch = 0;
    context.metrics = {};
    tally.next_epoch();
    for (const Callback& c : all) c->on_epoch_begin(context);
    training.each([&](const data::Batch& batch) {
      if (context.stop_requested()) return false;
      ++context.step;
      ++context.step_in_epoch;
      context.batch_size = rows(batch.input);
      for (const Callback& c : all) c->on_step_begin(context);
      const TrainStepResult done = impl_->step(batch.input.to(device), batch.target.to(device));
      context.loss = done.loss;
      context.overflow = done.overflow;
      context.scale = done.scale;
      tally.add(done, context.batch_size);
      for (const Callback& c : all) c->on_step_end(context);
      return !context.stop_requested();
    });
    if (context.step_in_epoch == 0 && !context.stop_requested())
      fail<Error>("{}: expected at least one batch an epoch, got none", who);
    context.epoch_loss = tally.mean();
    context.skipped = tally.skipped();
    if (validation && !context.stop_requested() && (context.epoch % every == 0 || context.epoch == epochs)) {
      evaluate(*validation, true, all, context);
    }
    for (const Callback& c : all) c->on_epoch_end(context);
  }
  for (const Callback& c : all) c->on_train_end(context);
  return history;
}

// Leaves the results in the context.
void Model::evaluate(const Batches& data, bool with_loss, const std::vector<Callback>& callbacks,
                     TrainContext& context) {
  const Parts& parts = impl_->parts;
  std::vector<Metric> metrics = impl_->options.metrics;
  const auto is_loss = [](const Metric& m) { return m.name() == "loss"; };
  if (with_loss && std::none_of(metrics.begin(), metrics.end(), is_loss)) metrics.insert(metrics.begin(), Loss{});
  const bool needs_loss = std::any_of(metrics.begin(), metrics.end(), [](const Metric& m) { return m->takes_loss(); });
  const Device device = device_of(*parts.module);
  const NoGrad no_grad;
  const nn::EvalMode mode(*parts.module);
  context.metrics = {};
  for (const Callback& c : callbacks) c->on_eval_begin(context);
  for (const Metric& m : metrics) m->clear();
  std::int64_t batches = 0;
  data.each([&](const data::Batch& batch) {
    const Tensor output = parts.forward(batch.input.to(device)), target = batch.target.to(device);
    const Tensor loss = needs_loss ? impl_->options.loss(output, target) : Tensor();
    for (const Metric& m : metrics) m->update(m->takes_loss() ? loss : output, target);
    ++batches;
    return true;
  });
  if (batches == 0) fail<Error>("Model::eval: expected at least one batch, got none");
  for (const Metric& m : metrics) context.metrics.set(m.name(), m->eval());
  for (const Callback& c : callbacks) c->on_eval_end(context);
}

MetricResults Model::eval(const Batches& data, const std::vector<Callback>& callbacks) {
  if (impl_->options.metrics.empty()) {
    fail<Error>("Model::eval: expected a model with metrics, got one without; ModelOptions has a place for them");
  }
  TrainContext context;
  context.network = impl_->parts.module.get();
  if (impl_->options.optimizer) context.optimizer = &impl_->options.optimizer->get();
  evaluate(data, false, callbacks, context);
  return context.metrics;
}

Tensor Model::predict(const Tensor& input) const {
  if (!input.defined()) fail<ShapeError>("Model::predict: expected a batch, got an undefined tensor");
  const NoGrad no_grad;
  const nn::EvalMode mode(*impl_->parts.module);
  return impl_->parts.forward(input.to(device_of(*impl_->parts.module)));
}

void Model::restore(const std::filesystem::path& checkpoint) {
  const Checkpoint c = load_checkpoint(checkpoint);
  if (impl_->options.optimizer) {
    optim::Optimizer& optimizer = impl_->options.optimizer->get();
    if (c.optimizer_kind != optimizer.kind()) {
      fail<Error>("Model::restore: expected a checkpoint of a run with {}, got one with {}: {}", optimizer.kind(),
                  c.optimizer_kind.empty() ? "no optimizer" : c.optimizer_kind, shown_path(checkpoint));
    }
  }
  impl_->parts.module->load_state_dict(c.weights);
  if (impl_->options.optimizer) impl_->options.optimizer->get().load_state_dict(c.optimizer);
  if (impl_->parts.step && impl_->parts.step->scaler() && !c.scaler.empty()) {
    impl_->parts.step->scaler()->load_state_dict(c.scaler);
  }
}

}  // namespace halfstep::training
