// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/model.h"

#include <algorithm>
#include <set>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/core/text.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/evaluate.h"
#include "halfstep/train/loop_internal.h"

namespace halfstep::training {
namespace {

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

// The metrics of a Model as the evaluation of a task.
class MetricsTask final : public Task {
 public:
  /// `with_loss`: the loss is among the results also where no metric asks for it.
  MetricsTask(std::shared_ptr<const nn::ModuleBase> network, std::function<Tensor(const Tensor&)> forward,
              LossFunction loss, const std::vector<Metric>& metrics, bool with_loss)
      : network_(std::move(network)), forward_(std::move(forward)), loss_(std::move(loss)), metrics_(metrics) {
    const auto is_loss = [](const Metric& m) { return m.name() == "loss"; };
    if (with_loss && std::none_of(metrics_.begin(), metrics_.end(), is_loss)) {
      metrics_.insert(metrics_.begin(), Loss{});
    }
  }

  const nn::ModuleBase& network() const override { return *network_; }
  TaskLoss loss(const data::Batch& /*batch*/) override { fail<InternalError>("MetricsTask: is only evaluated"); }
  void begin_evaluation() override {
    for (const Metric& m : metrics_) m->clear();
  }
  TaskLoss evaluate(const data::Batch& batch) override {
    const bool needs_loss =
        std::any_of(metrics_.begin(), metrics_.end(), [](const Metric& m) { return m->takes_loss(); });
    const Tensor output = forward_(batch.input);
    const Tensor loss = needs_loss ? loss_(output, batch.target) : Tensor();
    for (const Metric& m : metrics_) m->update(m->takes_loss() ? loss : output, batch.target);
    return {};
  }
  void end_evaluation(MetricResults& results) override {
    for (const Metric& m : metrics_) results.set(m.name(), m->eval());
  }

 private:
  std::shared_ptr<const nn::ModuleBase> network_;
  std::function<Tensor(const Tensor&)> forward_;
  LossFunction loss_;
  std::vector<Metric> metrics_;
};

}  // namespace

struct Model::Impl {
  std::function<Tensor(const Tensor&)> forward = {};  // empty for a task
  std::optional<TrainStep> step = {};
  ModelOptions options = {};
  std::shared_ptr<MetricsTask> metrics = {};    // null for a task
  std::shared_ptr<MetricsTask> with_loss = {};  // the same, and the loss where no metric asks for it

  const nn::ModuleBase& network() const { return metrics ? metrics->network() : step->network(); }
  Task& evaluation(bool in_a_run) const {
    if (!metrics) return step->task();
    return in_a_run && with_loss ? *with_loss : *metrics;
  }
  /// A context of this model; in a run, with an optimizer.
  TrainContext context() const {
    TrainContext c;
    c.network = &network();
    if (step) {
      c.optimizer = &step->optimizer();
      c.train_step = &*step;
    }
    return c;
  }
  History run(int epochs, const Batches& training, const Batches* validation, const std::vector<Callback>& callbacks,
              const FitOptions& fit);
  // `weights`: those of the checkpoint that are wanted.
  void restore(const Checkpoint& c, const NamedTensors& weights, const std::filesystem::path& file, const char* who);
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
    : impl_(std::make_unique<Impl>(Impl{
          .forward = parts.forward,
          .step = parts.step,
          .options = options,
          .metrics = std::make_shared<MetricsTask>(parts.module, parts.forward, options.loss, options.metrics, false),
          .with_loss = options.loss ? std::make_shared<MetricsTask>(parts.module, parts.forward, options.loss,
                                                                    options.metrics, true)
                                    : nullptr})) {}
Model::Model(TrainStep step, bool capture)
    : impl_(std::make_unique<Impl>(Impl{.step = std::move(step), .options = {.capture = capture}})) {}
Model::~Model() = default;
Model::Model(Model&&) noexcept = default;
Model& Model::operator=(Model&&) noexcept = default;

CaptureStats Model::capture_stats() const { return impl_->step ? impl_->step->capture_stats() : CaptureStats(); }

const nn::ModuleBase& Model::network() const { return impl_->network(); }

History Model::train(int epochs, const Batches& training, const std::vector<Callback>& callbacks,
                     const FitOptions& options) {
  return impl_->run(epochs, training, nullptr, callbacks, options);
}

History Model::fit(int epochs, const Batches& training, const Batches& validation,
                   const std::vector<Callback>& callbacks, const FitOptions& options) {
  return impl_->run(epochs, training, &validation, callbacks, options);
}

History Model::Impl::run(int epochs, const Batches& training, const Batches* validation,
                         const std::vector<Callback>& callbacks, const FitOptions& fit) {
  const char* who = validation ? "Model::fit" : "Model::train";
  if (!step) {
    fail<Error>("{}: expected a model with an optimizer, got one without; ModelOptions has a place for it", who);
  }
  if (epochs < 1) fail<Error>("{}: expected at least 1 epoch, got {}", who, epochs);
  if (training.size() < 1) fail<Error>("{}: expected at least one batch an epoch, got none", who);
  const TrainMode mode(network());
  TrainContext running = context();
  running.scaler = step->scaler();
  running.watchable_ = {"loss"};
  if (validation) {
    running.watchable_.push_back("eval_loss");
    for (const Metric& m : options.metrics) {
      if (m.name() != "loss") running.watchable_.push_back("eval_" + m.name());
    }
    if (!metrics && step->task().best_by() != "loss") running.watchable_.push_back("eval_" + step->task().best_by());
  }
  // The history sees the rates that an epoch was trained with, before another callback changes them.
  History history;
  std::vector<Callback> all{history};
  all.insert(all.end(), callbacks.begin(), callbacks.end());
  Loop loop(*step, evaluation(true), running, all, fit, options.capture, who);
  loop.run(epochs, training, validation);
  return history;
}

MetricResults Model::eval(const Batches& data, const std::vector<Callback>& callbacks) {
  if (impl_->metrics && impl_->options.metrics.empty()) {
    fail<Error>("Model::eval: expected a model with metrics, got one without; ModelOptions has a place for them");
  }
  TrainContext context = impl_->context();
  const nn::EvalMode mode(impl_->network());
  for (const Callback& c : callbacks) c->on_eval_begin(context);
  EvaluationOptions options{.who = "Model::eval"};
  if (impl_->step) options.autocast = impl_->step->options().autocast;
  evaluate(impl_->evaluation(false), data, context.metrics, options);
  for (const Callback& c : callbacks) c->on_eval_end(context);
  return context.metrics;
}

Tensor Model::predict(const Tensor& input) const {
  if (!input.defined()) fail<ShapeError>("Model::predict: expected a batch, got an undefined tensor");
  if (!impl_->forward) fail<Error>("Model::predict: expected a model of a network, got one of a task");
  const NoGrad no_grad;
  const nn::EvalMode mode(impl_->network());
  return impl_->forward(input.to(device_of(impl_->network())));
}

void Model::Impl::restore(const Checkpoint& c, const NamedTensors& weights, const std::filesystem::path& file,
                          const char* who) {
  if (step && c.optimizer_kind != step->optimizer().kind()) {
    fail<Error>("{}: expected a checkpoint of a run with {}, got one with {}: {}", who, step->optimizer().kind(),
                c.optimizer_kind.empty() ? "no optimizer" : c.optimizer_kind, shown_path(file));
  }
  network().load_state_dict(weights);
  if (!step) return;
  step->optimizer().load_state_dict(c.optimizer);
  if (step->scaler() && !c.scaler.empty()) step->scaler()->load_state_dict(c.scaler);
}

void Model::restore(const std::filesystem::path& checkpoint) {
  const Checkpoint c = load_checkpoint(checkpoint);
  impl_->restore(c, c.weights, checkpoint, "Model::restore");
}

RunState Model::resume(const std::filesystem::path& checkpoint, data::DataLoader& training) {
  const Checkpoint c = load_checkpoint(checkpoint);
  const data::LoaderState before = training.state();
  try {
    training.seek(c.loader);
  } catch (const Error& e) {
    fail<Error>("Model::resume: {}: expected the loader of the run that wrote it: {}", shown_path(checkpoint),
                e.what());
  }
  try {
    impl_->restore(c, c.training_weights.empty() ? c.weights : c.training_weights, checkpoint, "Model::resume");
  } catch (...) {
    training.seek(before);
    throw;
  }
  default_generator().set_state(c.random);
  return run_state(c);
}

}  // namespace halfstep::training
