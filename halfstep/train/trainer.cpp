// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/trainer.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/models/mlp.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/loss.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/clip.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/log.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/json_log.h"

namespace halfstep::train {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// A forward pass that leaves float16's range gives such a loss once in a while; when lowering the scale doesn't end it,
// nothing will.
constexpr int kMaxBadLosses = 20;

constexpr const char* kLast = "last.safetensors";
constexpr const char* kBest = "best.safetensors";

std::unique_ptr<optim::Optimizer> make_optimizer(const TrainConfig& c, const NamedTensors& parameters) {
  if (c.optimizer == "sgd") {
    return std::make_unique<optim::SGD>(
        parameters, optim::SGDOptions{.lr = c.lr, .momentum = c.momentum, .weight_decay = c.weight_decay});
  }
  if (c.optimizer == "adam") {
    return std::make_unique<optim::Adam>(parameters, optim::AdamOptions{.lr = c.lr, .weight_decay = c.weight_decay});
  }
  return std::make_unique<optim::AdamW>(parameters, optim::AdamWOptions{.lr = c.lr, .weight_decay = c.weight_decay});
}

// Top-1 and top-5 hits of a batch. A logit that isn't a number never hits.
struct Hits {
  std::int64_t top1 = 0;
  std::int64_t top5 = 0;
};
Hits count_hits(const Tensor& logits, const Tensor& labels) {
  const auto scores = logits.to_vector<float>();
  const auto wanted = labels.to_vector<std::int64_t>();
  const auto classes = static_cast<std::size_t>(logits.size(1));
  Hits hits;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const float* row = scores.data() + i * classes;
    const float own = row[wanted[i]];
    if (std::isnan(own)) continue;
    // Ties count against the label, lower classes first, so that a constant network doesn't look right.
    int above = 0;
    for (std::size_t k = 0; k < classes; ++k) {
      above += row[k] > own || (row[k] == own && k < static_cast<std::size_t>(wanted[i])) ? 1 : 0;
    }
    hits.top1 += above < 1 ? 1 : 0;
    hits.top5 += above < 5 ? 1 : 0;
  }
  return hits;
}

NamedTensors parameters_on(const nn::ModuleBase& module, Device device) {
  module.to(device);
  return module.parameters();
}

class Run {
 public:
  Run(const TrainConfig& config, const Classifier& classifier, std::shared_ptr<const data::Dataset> training,
      std::shared_ptr<const data::Dataset> test, const TrainCallbacks& callbacks, const std::atomic<bool>* stop)
      : config_(config),
        classifier_(classifier),
        parameters_(parameters_on(*classifier.module, config.device)),
        test_(std::move(test)),
        callbacks_(callbacks),
        stop_(stop),
        dtype_(amp_dtype(config.amp)),
        optimizer_(make_optimizer(config, parameters_)),
        scaler_(scaler_options(config)),
        samples_(training->size()),
        loader_(std::move(training), {.batch_size = config.batch_size,
                                      .shuffle = true,
                                      .workers = config.workers,
                                      .seed = config.seed,
                                      .device = config.device}),
        debugging_(config.debug, config.out, callbacks.on_debug) {
    reset_fallback_counts();
    if (!config.resume.empty()) resume();
    if (!config.out.empty()) {
      std::error_code error;
      fs::create_directories(config.out, error);
      if (error) fail<IoError>("{}: can't be made: {}", config.out.string(), error.message());
    }
    if (!config.log_json.empty()) log_ = JsonLog(config.log_json, !config.resume.empty());
  }

  RunReport run() {
    const auto start = Clock::now();
    if (loader_.state().epoch >= config_.epochs) {
      report_.nothing_left = true;
      report_.steps = step_;
      report_.skipped = skipped_;
      report_.peak_rss_mb = peak_rss_mb();
      return report_;
    }
    log_.write("start", {{"model", config_.model},
                         {"epochs", std::int64_t{config_.epochs}},
                         {"batch_size", config_.batch_size},
                         {"samples", samples_},
                         {"lr", config_.lr},
                         {"optimizer", config_.optimizer},
                         {"amp", config_.amp},
                         {"device", config_.device.str()},
                         {"scale", scaler_.get_scale()},
                         {"seed", config_.seed},
                         {"step", step_}});
    while (loader_.state().epoch < config_.epochs && !stopped()) epoch();
    debugging_.finish();
    report_.interrupted = stopped() && loader_.state().epoch < config_.epochs;
    if (report_.interrupted) save(kLast, static_cast<int>(loader_.state().epoch) + 1);
    report_.steps = step_;
    report_.skipped = skipped_;
    report_.seconds = seconds_since(start);
    report_.peak_rss_mb = peak_rss_mb();
    report_.fallbacks = fallback_counts();
    for (const FallbackCount& f : report_.fallbacks) {
      log_.write("fallback", {{"op", f.op},
                              {"calls", static_cast<std::int64_t>(f.calls)},
                              {"bytes_to_host", static_cast<std::int64_t>(f.bytes_to_host)},
                              {"bytes_to_device", static_cast<std::int64_t>(f.bytes_to_device)},
                              {"seconds", f.seconds},
                              {"failures", static_cast<std::int64_t>(f.failures)}});
    }
    log_.write("end", {{"epochs", std::int64_t{report_.epochs}},
                       {"step", step_},
                       {"seconds", report_.seconds},
                       {"skipped", skipped_},
                       {"scale", scaler_.get_scale()},
                       {"loss", report_.loss},
                       {"top1", report_.top1},
                       {"top5", report_.top5},
                       {"interrupted", report_.interrupted},
                       {"peak_rss_mb", report_.peak_rss_mb}});
    return report_;
  }

 private:
  bool stopped() const { return stop_ && stop_->load(std::memory_order_relaxed); }

  void epoch() {
    const auto start = Clock::now();
    const std::int64_t first = loader_.state().batch;
    const auto number = static_cast<int>(loader_.state().epoch) + 1;
    if (first == 0) loss_sum_ = 0, loss_samples_ = 0;
    classifier_.module->train();
    const std::int64_t batches = loader_.size(), group = config_.accumulate;
    std::int64_t seen = 0;
    double group_loss = 0;
    for (const auto& [input, target] : loader_) {
      const std::int64_t index = loader_.state().batch - 1;
      const std::int64_t group_begin = index / group * group * config_.batch_size;
      const std::int64_t group_end = std::min((index / group + 1) * group * config_.batch_size, samples_);
      const double weight = static_cast<double>(input.size(0)) / static_cast<double>(group_end - group_begin);
      debugging_.before_step(step_ + 1);
      if (debugging_.wants_twin(step_ + 1)) twin(input, target);
      group_loss += weight * accumulate(input, target, weight, number);
      seen += input.size(0);
      if ((index + 1) % group != 0 && index + 1 != batches) continue;
      step(number, group_loss, group_end - group_begin, static_cast<double>(seen) / seconds_since(start), index,
           batches);
      debugging_.after_step(step_);
      group_loss = 0;
      // An epoch's end is a place of its own to save and to stop at.
      if (index + 1 == batches) break;
      if (config_.save_every > 0 && step_ % config_.save_every == 0) save(kLast, number);
      if (stopped()) return;
    }
    if (loader_.state().batch != 0) loader_.seek({.epoch = number, .batch = 0});
    report_.epochs = number;
    evaluate_and_save(number);
  }

  // Forward and backward pass of one batch; returns its mean loss.
  double accumulate(const Tensor& input, const Tensor& target, double weight, int number) {
    Tensor loss;
    {
      const amp::Autocast autocast{{.dtype = dtype_.value_or(DType::f16), .enabled = dtype_.has_value()}};
      loss = cross_entropy(classifier_.forward(input), target);
    }
    scaler_.scale(weight == 1 ? loss : loss * weight).backward();
    const double value = loss.item<double>();
    bad_losses_ = std::isfinite(value) ? 0 : bad_losses_ + 1;
    if (bad_losses_ > (scaler_.is_enabled() && scaler_.options().dynamic ? kMaxBadLosses : 0)) {
      const std::string last = report_.checkpoint.empty() ? "none was written" : report_.checkpoint.string();
      fail<Error>(
          "train: expected a finite loss, got {} in epoch {}, step {}; last checkpoint: {}; a smaller --lr may help",
          std::isnan(value) ? std::string("nan") : fmt::format("{}", value), number, step_ + 1, last);
    }
    return value;
  }

  // The batch in float32 and in the run's precision. Leaves weights, buffers and gradients as they were: it runs where
  // gradients are clear.
  void twin(const Tensor& input, const Tensor& target) {
    std::vector<Tensor> buffers;
    for (const NamedTensor& b : classifier_.module->buffers()) buffers.push_back(b.tensor.clone());
    const auto restore = [&] {
      const NoGrad no_grad;
      std::size_t i = 0;
      for (const NamedTensor& b : classifier_.module->buffers()) Tensor(b.tensor).copy_(buffers[i++]);
      optimizer_->zero_grad();
    };
    debugging_.twin(
        [&] {
          restore();
          scaler_.scale(cross_entropy(classifier_.forward(input), target)).backward();
        },
        *dtype_);
    restore();
  }

  void step(int number, double loss, std::int64_t samples, double samples_per_s, std::int64_t index,
            std::int64_t batches) {
    const double scale = scaler_.get_scale();
    if (config_.clip_norm > 0) {
      const Tensor norm = scaler_.unscale_(*optimizer_, {.norm = true});
      optim::clip_grad_norm_(parameters_, config_.clip_norm, {.norm = norm});
    }
    const amp::StepResult result = scaler_.step(*optimizer_);
    scaler_.update();
    optimizer_->zero_grad();
    ++step_;
    const bool ran = result.ran();
    if (!ran) ++skipped_;
    // One overflowing batch is not to take the epoch's mean with it.
    if (std::isfinite(loss)) {
      loss_sum_ += loss * static_cast<double>(samples);
      loss_samples_ += samples;
    }
    log_.write("step", {{"epoch", std::int64_t{number}},
                        {"step", step_},
                        {"loss", loss},
                        {"lr", optimizer_->lr()},
                        {"scale", scale},
                        {"skipped", skipped_},
                        {"samples_per_s", samples_per_s},
                        {"peak_rss_mb", peak_rss_mb()}});
    if (!callbacks_.on_step) return;
    const std::int64_t group = config_.accumulate;
    callbacks_.on_step({.epoch = number,
                        .step = step_,
                        .step_in_epoch = index / group + 1,
                        .steps_in_epoch = (batches + group - 1) / group,
                        .loss = loss,
                        .mean_loss = loss_samples_ > 0 ? loss_sum_ / static_cast<double>(loss_samples_) : loss,
                        .lr = optimizer_->lr(),
                        .scale = scale,
                        .skipped = skipped_,
                        .overflow = ran ? "" : result.first_overflow(),
                        .samples_per_s = samples_per_s});
  }

  void evaluate_and_save(int number) {
    EvalReport eval = evaluate(classifier_, test_, dtype_);
    eval.epoch = number;
    eval.step = step_;
    eval.best = eval.top1 > best_top1_;
    best_top1_ = std::max(best_top1_, eval.top1);
    report_.loss = eval.loss;
    report_.top1 = eval.top1;
    report_.top5 = eval.top5;
    log_.write("eval", {{"epoch", std::int64_t{number}},
                        {"step", step_},
                        {"loss", eval.loss},
                        {"top1", eval.top1},
                        {"top5", eval.top5},
                        {"scale", scaler_.get_scale()},
                        {"skipped", skipped_},
                        {"peak_rss_mb", peak_rss_mb()}});
    if (callbacks_.on_eval) callbacks_.on_eval(eval);
    save(kLast, number);
    if (eval.best) save(kBest, number);
  }

  Checkpoint state() const {
    return {.model = config_.model,
            .weights = classifier_.module->state_dict(),
            .optimizer_kind = optimizer_->kind(),
            .optimizer = optimizer_->state_dict(),
            .scaler = scaler_.state_dict(),
            .loader = loader_.state(),
            .loader_seed = config_.seed,
            .batch_size = config_.batch_size,
            .samples = samples_,
            .accumulate = config_.accumulate,
            .random = default_generator().state(),
            .step = step_,
            .skipped = skipped_,
            .loss_sum = loss_sum_,
            .loss_samples = loss_samples_,
            .best_top1 = best_top1_,
            .amp = config_.amp};
  }

  // Only the last one is told to the caller: the best one is a copy of some last one.
  void save(const std::string& name, int number) {
    if (config_.out.empty()) return;
    const fs::path file = config_.out / name;
    // With weights that give no finite loss nobody can go on: they don't replace a checkpoint that may be good.
    if (bad_losses_ > 0 && fs::exists(file)) return;
    save_checkpoint(file, state());
    log_.write("checkpoint", {{"epoch", std::int64_t{number}}, {"step", step_}, {"file", file.string()}});
    if (name != kLast) return;
    report_.checkpoint = file;
    if (callbacks_.on_checkpoint) callbacks_.on_checkpoint(file);
  }

  // The optimizer's numbers come from the checkpoint: flags that say something else would be ignored in silence.
  void check_optimizer(const Checkpoint& c, const std::string& file) const {
    const std::pair<const char*, double> flags[] = {
        {"lr", config_.lr}, {"momentum", config_.momentum}, {"weight_decay", config_.weight_decay}};
    for (const auto& [name, given] : flags) {
      const auto saved = c.optimizer.numbers.find(std::string("group0.") + name);
      if (saved == c.optimizer.numbers.end() || saved->second == given) continue;
      std::string flag = name;
      std::replace(flag.begin(), flag.end(), '_', '-');
      fail<IoError>("{}: the run had --{} {}, got {}; a run goes on with the flags that it began with", file, flag,
                    saved->second, given);
    }
  }

  // As the optimizer's flags; the scale itself has moved since a dynamic one began.
  void check_scaler(const Checkpoint& c, const std::string& file) const {
    if (c.amp != config_.amp) return;  // another precision, another scaler: warned of
    if (c.scaler.empty() != !scaler_.is_enabled()) {
      fail<IoError>(
          "{}: the run was trained {} a loss scale, got --loss-scale {}; a run goes on with the flags that it began "
          "with",
          file, c.scaler.empty() ? "without" : "with", config_.loss_scale);
    }
    if (c.scaler.empty()) return;
    const amp::GradScalerOptions& o = scaler_.options();
    std::vector<std::pair<const char*, double>> flags;
    if (o.dynamic) {
      flags = {{"growth_factor", o.growth_factor},
               {"backoff_factor", o.backoff_factor},
               {"growth_interval", static_cast<double>(o.growth_interval)}};
    } else {
      flags = {{"scale", o.init_scale}};
    }
    for (const auto& [name, given] : flags) {
      const auto saved = c.scaler.find(name);
      if (saved == c.scaler.end() || saved->second == given) continue;
      fail<IoError>("{}: the run's loss scale had {} {}, got {}; pass the --loss-scale of the first run", file, name,
                    saved->second, given);
    }
  }

  void resume() {
    const Checkpoint c = load_checkpoint(config_.resume);
    const std::string file = config_.resume.string();
    if (c.model != config_.model) {
      fail<IoError>("{}: expected a checkpoint of {}, got one of {}", file, config_.model, c.model);
    }
    if (c.optimizer_kind != optimizer_->kind()) {
      fail<IoError>("{}: expected the state of {}, got that of {}; pass the --optimizer of the first run", file,
                    optimizer_->kind(), c.optimizer_kind);
    }
    if (c.batch_size != config_.batch_size || c.loader_seed != config_.seed) {
      fail<IoError>(
          "{}: the run had --batch-size {} --seed {}, got {} and {}; the order of the samples follows from both", file,
          c.batch_size, c.loader_seed, config_.batch_size, config_.seed);
    }
    if (c.samples != samples_) {
      fail<IoError>("{}: the run had {} training samples, got {}; pass the --data and --limit of the first run", file,
                    c.samples, samples_);
    }
    if (c.accumulate != config_.accumulate && c.loader.batch != 0) {
      fail<IoError>("{}: the run had --accumulate {}, got {}; it can change at the end of an epoch only", file,
                    c.accumulate, config_.accumulate);
    }
    check_optimizer(c, file);
    check_scaler(c, file);
    if (c.amp != config_.amp) {
      log(LogLevel::warning, fmt::format("{}: the run had --amp {}, it goes on with {}", file, c.amp, config_.amp));
    }
    try {
      classifier_.module->load_state_dict(c.weights);
      optimizer_->load_state_dict(c.optimizer);
      if (!c.scaler.empty()) scaler_.load_state_dict(c.scaler);
      loader_.seek(c.loader);
    } catch (const Error& e) {
      fail<IoError>("{}: {}", file, e.what());
    }
    default_generator().set_state(c.random);
    step_ = c.step;
    skipped_ = c.skipped;
    loss_sum_ = c.loss_sum;
    loss_samples_ = c.loss_samples;
    best_top1_ = c.best_top1;
    report_.epochs = static_cast<int>(c.loader.epoch);
    report_.checkpoint = config_.resume;
  }

  const TrainConfig& config_;
  const Classifier& classifier_;
  NamedTensors parameters_;
  std::shared_ptr<const data::Dataset> test_;
  const TrainCallbacks& callbacks_;
  const std::atomic<bool>* stop_;
  std::optional<DType> dtype_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  amp::GradScaler scaler_;
  std::int64_t samples_;
  data::DataLoader loader_;
  JsonLog log_;
  StepDebugging debugging_;
  RunReport report_;
  std::int64_t step_ = 0;
  std::int64_t skipped_ = 0;
  double loss_sum_ = 0;
  std::int64_t loss_samples_ = 0;
  double best_top1_ = -1;
  int bad_losses_ = 0;
};

}  // namespace

Classifier make_classifier(const std::string& model, std::shared_ptr<const void>& holder) {
  if (model != "mlp") fail<Error>("model: expected mlp, got '{}'", model);
  auto net = std::make_shared<models::MLP>();
  holder = net;
  return {.module = net.get(), .forward = [net](const Tensor& x) { return (*net)(x); }};
}

RunReport train(const TrainConfig& config, const Classifier& classifier, std::shared_ptr<const data::Dataset> training,
                std::shared_ptr<const data::Dataset> test, const TrainCallbacks& callbacks,
                const std::atomic<bool>* stop) {
  check(config);
  return Run(config, classifier, std::move(training), std::move(test), callbacks, stop).run();
}

EvalReport evaluate(const Classifier& classifier, std::shared_ptr<const data::Dataset> test, std::optional<DType> dtype,
                    std::int64_t batch_size) {
  const NoGrad no_grad;
  const bool was_training = classifier.module->is_training();
  classifier.module->eval();
  struct Restore {
    const Classifier& classifier;
    bool training;
    ~Restore() { classifier.module->train(training); }
  } restore{classifier, was_training};
  const NamedTensors state = classifier.module->state_dict();
  const Device device = state.empty() ? Device{} : state[0].tensor.device();
  data::DataLoader loader(std::move(test), {.batch_size = batch_size, .device = device});
  double loss_sum = 0;
  std::int64_t samples = 0;
  Hits hits;
  for (const auto& [input, target] : loader) {
    const amp::Autocast autocast{{.dtype = dtype.value_or(DType::f16), .enabled = dtype.has_value()}};
    const Tensor logits = classifier.forward(input);
    const std::int64_t n = input.size(0);
    loss_sum += cross_entropy(logits, target).item<double>() * static_cast<double>(n);
    const Hits here = count_hits(logits, target);
    hits.top1 += here.top1;
    hits.top5 += here.top5;
    samples += n;
  }
  const auto total = static_cast<double>(std::max<std::int64_t>(samples, 1));
  return {.epoch = 0,
          .step = 0,
          .loss = loss_sum / total,
          .top1 = static_cast<double>(hits.top1) / total,
          .top5 = static_cast<double>(hits.top5) / total,
          .best = false};
}

double peak_rss_mb() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024 / 1e6;  // Linux counts in KiB
}

}  // namespace halfstep::train
