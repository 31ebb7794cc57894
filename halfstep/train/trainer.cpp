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
#include "halfstep/core/text.h"
#include "halfstep/data/mixup.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/loss.h"
#include "halfstep/optim/clip.h"
#include "halfstep/runtime/log.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/json_log.h"
#include "halfstep/train/optimizer.h"
#include "halfstep/train/resume.h"
#include "halfstep/train/schedule.h"

namespace halfstep::training {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// A forward pass that leaves float16's range gives such a loss once in a while; when lowering the scale doesn't end it,
// nothing will.
constexpr int kMaxBadLosses = 20;

constexpr const char* kLast = "last.safetensors";
constexpr const char* kBest = "best.safetensors";

NamedTensors parameters_on(const nn::ModuleBase& module, Device device) {
  module.to(device);
  return module.parameters();
}

// Batches are mixed by whoever makes them, keyed as their samples are: no state beside the loader's.
std::shared_ptr<const data::Dataset> mixed(const TrainConfig& c, std::shared_ptr<const data::Dataset> training) {
  if (c.mixup == 0) return training;
  const auto classes = c.num_classes > 0 ? c.num_classes : static_cast<std::int64_t>(c.classes.size());
  return std::make_shared<data::MixupDataset>(std::move(training),
                                              data::MixupOptions{.alpha = c.mixup, .classes = classes});
}

// Labels [N], or the likeliest classes of soft targets [N, classes].
std::vector<std::int64_t> labels_of(const Tensor& target) {
  if (target.dim() == 1) return target.to_vector<std::int64_t>();
  const auto shares = target.to_vector<float>();
  const auto classes = static_cast<std::ptrdiff_t>(target.size(1));
  std::vector<std::int64_t> labels;
  for (auto row = shares.begin(); row != shares.end(); row += classes) {
    labels.push_back(std::max_element(row, row + classes) - row);
  }
  return labels;
}

class Run {
 public:
  Run(const TrainConfig& config, const Classifier& classifier, std::shared_ptr<const data::Dataset> training,
      std::shared_ptr<const data::Dataset> test, const TrainCallbacks& callbacks, const std::atomic<bool>* stop,
      RunFolder* folder)
      : config_(config),
        classifier_(classifier),
        parameters_(parameters_on(*classifier.module, config.device)),
        test_(std::move(test)),
        callbacks_(callbacks),
        stop_(stop),
        amp_(amp_mode(config)),
        dtype_(amp_.region),
        optimizer_(make_optimizer(config, parameters_)),
        scaler_(make_scaler(config)),
        samples_(training->size()),
        loader_(mixed(config, std::move(training)), {.batch_size = config.batch_size,
                                                     .shuffle = true,
                                                     .workers = config.workers,
                                                     .prefetch = config.prefetch,
                                                     .seed = config.seed,
                                                     .device = config.device}),
        steps_per_epoch_((loader_.size() + config.accumulate - 1) / config.accumulate),
        schedule_(parse_rate_rule(config.lr_schedule, config.warmup_epochs), *optimizer_, steps_per_epoch_,
                  config.epochs),
        debugging_(config.debug, config.out, callbacks.on_debug) {
    reset_fallback_counts();
    if (amp_.level != amp::Level::O0) {
      amp::set_level(*classifier.module, amp_.level, amp_.level_dtype);
    }
    if (config.start_epoch > 0) {
      loader_.seek({.epoch = config.start_epoch, .batch = 0});
      step_ = config.start_epoch * steps_per_epoch_;
      report_.epochs = config.start_epoch;
    }
    check_log(config.log_json, config.out, {config.resume, config.data});
    const bool claims = !config.out.empty() && !folder;
    const bool goes_on = is_run_in(config.resume, config.out);
    const Occupied occupied = goes_on ? Occupied::go_on : config.overwrite ? Occupied::replace : Occupied::refuse;
    // Nobody may write the checkpoint that is read.
    if (claims && goes_on) own_folder_ = RunFolder(config.out, occupied);
    if (!config.resume.empty()) resume();
    schedule_.set(position());
    if (claims && !goes_on) own_folder_ = RunFolder(config.out, occupied);
    folder_ = folder ? folder : &own_folder_;
    replaces_ = !config.out.empty() && occupied == Occupied::replace;
    // The log of a run that is replaced goes with it.
    std::error_code error;
    const fs::path own = config.out / "log.jsonl";
    appends_ = !config.resume.empty() &&
               !(replaces_ && (config.log_json == own || fs::equivalent(config.log_json, own, error)));
    if (!config.log_json.empty() && !nothing_left()) log_ = JsonLog(config.log_json, appends_, stop_);
  }

  RunReport run() {
    const auto start = Clock::now();
    // Stopped while the log waited for its reader: nothing has begun.
    report_.interrupted = !nothing_left() && !config_.log_json.empty() && !log_;
    if (nothing_left() || report_.interrupted) {
      report_.nothing_left = nothing_left();
      report_.steps = step_;
      report_.skipped = skipped_;
      report_.peak_rss_mb = peak_rss_mb();
      return report_;
    }
    begin_files();
    log_.write("start", {{"model", config_.model},
                         {"epochs", std::int64_t{config_.epochs}},
                         {"batch_size", config_.batch_size},
                         {"samples", samples_},
                         {"lr", config_.lr},
                         {"optimizer", config_.optimizer},
                         {"amp", amp_text(config_)},
                         {"device", config_.device.str()},
                         {"scale", scaler_.get_scale()},
                         {"seed", config_.seed},
                         {"step", step_}});
    while (loader_.state().epoch < config_.epochs && !stopped()) epoch();
    debugging_.finish();
    // A stop while the last evaluation ended came too late.
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
  bool nothing_left() const { return loader_.state().epoch >= config_.epochs; }

  // All checks are done.
  void begin_files() {
    if (callbacks_.on_start) callbacks_.on_start();
    if (replaces_) {
      std::vector<fs::path> keep = {config_.log_json};
      if (callbacks_.on_start) keep.push_back(config_.out / "config.yaml");  // the caller's own
      folder_->remove_run(keep);
    }
    folder_->remove_leftovers();
    if (!appends_ || config_.log_json.empty()) return;
    const LogRepair repair = prepare_log(config_.log_json, step_, report_.epochs);
    const std::string file = shown_path(config_.log_json);
    if (repair.torn > 0) {
      log(LogLevel::warning, fmt::format("{}: {} line{} not whole, the first is line {}; what was left of {} is "
                                         "removed",
                                         file, repair.torn, repair.torn == 1 ? " was" : "s were", repair.first,
                                         repair.torn == 1 ? "it" : "them"));
    }
    if (repair.repeated > 0) {
      log(LogLevel::warning, fmt::format("{}: {} line{} from behind step {}, where the run goes on, {} removed: they "
                                         "come again",
                                         file, repair.repeated, repair.repeated == 1 ? "" : "s", step_,
                                         repair.repeated == 1 ? "is" : "are"));
    }
    // Another file may have taken the log's place.
    if (repair.first > 0) log_ = JsonLog(config_.log_json, true, stop_);
  }

  bool stopped() const { return stop_ && stop_->load(std::memory_order_relaxed); }

  // Steps before the next one, as the schedule counts them: those of whole epochs, skipped or not.
  std::int64_t position() const {
    const data::LoaderState at = loader_.state();
    return at.epoch * steps_per_epoch_ + (at.batch + config_.accumulate - 1) / config_.accumulate;
  }

  void epoch() {
    const auto start = Clock::now();
    const std::int64_t first = loader_.state().batch;
    const auto number = static_cast<int>(loader_.state().epoch) + 1;
    if (first == 0) loss_sum_ = 0, loss_samples_ = 0, hits_ = {};
    seconds_ = {}, data_seconds_ = {};
    classifier_.module->train();
    const std::int64_t batches = loader_.size(), group = config_.accumulate;
    std::int64_t seen = 0;
    Group done;
    auto step_start = start, waiting_since = start;
    for (const auto& [input, target] : loader_) {
      done.data_seconds += seconds_since(waiting_since);
      const std::int64_t index = loader_.state().batch - 1;
      const std::int64_t group_begin = index / group * group * config_.batch_size;
      const std::int64_t group_end = std::min((index / group + 1) * group * config_.batch_size, samples_);
      const double weight = static_cast<double>(input.size(0)) / static_cast<double>(group_end - group_begin);
      debugging_.before_step(step_ + 1);
      if (debugging_.wants_twin(step_ + 1)) twin(input, target);
      done.loss += weight * accumulate(input, target, weight, number, done.hits);
      seen += input.size(0);
      if ((index + 1) % group != 0 && index + 1 != batches) {
        waiting_since = Clock::now();
        continue;
      }
      done.samples = group_end - group_begin;
      data_seconds_.add(done.data_seconds);
      step(
          number, done,
          [&] {
            const auto now = Clock::now();
            seconds_.add(std::chrono::duration<double>(now - step_start).count());
            step_start = now;
            return static_cast<double>(seen) / seconds_since(start);
          },
          index / group + 1);
      debugging_.after_step(step_);
      done = {};
      // An epoch's end is a place of its own to save and to stop at.
      if (index + 1 == batches) break;
      if (config_.save_every > 0 && step_ % config_.save_every == 0) save(kLast, number);
      if (stopped()) return;
      waiting_since = Clock::now();
    }
    // Until it is evaluated the epoch isn't over: who stops here goes on with the evaluation.
    loader_.seek({.epoch = number - 1, .batch = batches});
    if (stopped() || !evaluate_and_save(number)) return;
    report_.epochs = number;
  }

  // Forward and backward pass of one batch; returns its mean loss.
  double accumulate(const Tensor& input, const Tensor& target, double weight, int number, Hits& hits) {
    Tensor loss, scores;
    {
      const amp::Autocast autocast{{.dtype = dtype_.value_or(DType::f16), .enabled = dtype_.has_value()}};
      const Tensor logits = classifier_.forward(input);
      loss = loss_of(logits, target);
      if (config_.train_accuracy) scores = logits.detach();
    }
    // The copies are under way while the backward pass is: reading the loss waits for both.
    Tensor labels;
    if (scores.defined()) {
      scores = scores.to(Device{}, f32, {.non_blocking = true});
      labels = target.to(Device{}, {.non_blocking = true});
    }
    scaler_.scale(weight == 1 ? loss : loss * weight).backward();
    const double value = loss.item<double>();
    if (scores.defined()) hits += count_hits(scores.to_vector<float>(), labels_of(labels));
    bad_losses_ = std::isfinite(value) ? 0 : bad_losses_ + 1;
    if (bad_losses_ > (scaler_.is_enabled() && scaler_.options().dynamic ? kMaxBadLosses : 0)) {
      const std::string last = report_.checkpoint.empty() ? "none was written" : shown_path(report_.checkpoint);
      fail<Error>(
          "train: expected a finite loss, got {} in epoch {}, step {}; last checkpoint: {}; a smaller --lr may help",
          std::isnan(value) ? std::string("nan") : fmt::format("{}", value), number, step_ + 1, last);
    }
    return value;
  }

  Tensor loss_of(const Tensor& logits, const Tensor& target) const {
    return cross_entropy(logits, target, {.label_smoothing = config_.label_smoothing});
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
          scaler_.scale(loss_of(classifier_.forward(input), target)).backward();
        },
        *dtype_);
    restore();
  }

  // What the batches of a step came to.
  struct Group {
    double loss = 0;
    std::int64_t samples = 0;
    Hits hits = {};
    double data_seconds = 0;
  };

  // `timed` ends the step's time and gives the samples a second.
  template <class Timed>
  void step(int number, const Group& done, Timed&& timed, std::int64_t in_epoch) {
    const double scale = scaler_.get_scale(), lr = optimizer_->lr();
    if (config_.clip_norm > 0) {
      const Tensor norm = scaler_.unscale_(*optimizer_, {.norm = true});
      optim::clip_grad_norm_(parameters_, config_.clip_norm, {.norm = norm});
    }
    const amp::StepResult result = scaler_.step(*optimizer_);
    scaler_.update();
    optimizer_->zero_grad();
    ++step_;
    schedule_.set(position());
    const bool ran = result.ran();
    if (!ran) ++skipped_;
    const auto samples = static_cast<double>(done.samples);
    // One overflowing batch is not to take the epoch's mean with it.
    if (std::isfinite(done.loss)) {
      loss_sum_ += done.loss * samples;
      loss_samples_ += done.samples;
    }
    hits_ += done.hits;
    const double samples_per_s = timed();
    log_.write("step", {{"epoch", std::int64_t{number}},
                        {"step", step_},
                        {"loss", done.loss},
                        {"lr", lr},
                        {"scale", scale},
                        {"skipped", skipped_},
                        {"samples_per_s", samples_per_s},
                        {"peak_rss_mb", peak_rss_mb()}});
    if (!callbacks_.on_step) return;
    const auto part = [&](std::int64_t now, std::int64_t all) {
      const auto seen = static_cast<double>(std::min(loader_.state().batch * config_.batch_size, samples_));
      return Meter{.last = static_cast<double>(now) / samples, .sum = static_cast<double>(all), .count = seen};
    };
    callbacks_.on_step({.epoch = number,
                        .step = step_,
                        .step_in_epoch = in_epoch,
                        .steps_in_epoch = steps_per_epoch_,
                        .loss = done.loss,
                        .mean_loss = loss_samples_ > 0 ? loss_sum_ / static_cast<double>(loss_samples_) : done.loss,
                        .lr = lr,
                        .scale = scale,
                        .skipped = skipped_,
                        .overflow = ran ? "" : result.first_overflow(),
                        .samples_per_s = samples_per_s,
                        .seconds = seconds_,
                        .data_seconds = data_seconds_,
                        .top1 = part(done.hits.top1, hits_.top1),
                        .top5 = part(done.hits.top5, hits_.top5)});
  }

  // False when it was interrupted: then the epoch isn't over.
  bool evaluate_and_save(int number) {
    EvalReport eval = evaluate(classifier_, test_,
                               EvalOptions{.dtype = dtype_,
                                           .batch_size = config_.eval_batch_size,
                                           .workers = std::max(config_.workers, 1),
                                           .prefetch = config_.prefetch,
                                           .on_batch = callbacks_.on_eval_batch,
                                           .stop = stop_});
    if (eval.interrupted) return false;
    loader_.seek({.epoch = number, .batch = 0});
    eval.epoch = number;
    eval.step = step_;
    if (loss_samples_ > 0) eval.train_loss = loss_sum_ / static_cast<double>(loss_samples_);
    eval.scale = scaler_.get_scale();
    eval.skipped = skipped_;
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
    // In this order: killed between the two, the run that goes on makes this evaluation again.
    if (eval.best) save(kBest, number);
    save(kLast, number);
    return true;
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
            .amp = amp_text(config_),
            .hits = hits_,
            .classes = config_.classes,
            .recipe = recipe(config_),
            .scale_rules = scaler_.is_enabled() ? loss_scale_rules(scaler_.policy()) : std::map<std::string, double>{},
            .data_checksums = config_.data_checksums};
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

  void resume() {
    const Checkpoint c = load_checkpoint(config_.resume);
    const std::string file = shown_path(config_.resume);
    check_resume(c, config_, *optimizer_, scaler_, samples_, file);
    check_state(c, *classifier_.module, *optimizer_, file);
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
    hits_ = c.hits;
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
  AmpMode amp_;
  std::optional<DType> dtype_;  // of the region around forward passes
  std::unique_ptr<optim::Optimizer> optimizer_;
  amp::GradScaler scaler_;
  std::int64_t samples_;
  data::DataLoader loader_;
  std::int64_t steps_per_epoch_;
  RateSchedule schedule_;
  RunFolder own_folder_;
  RunFolder* folder_ = nullptr;
  bool replaces_ = false;  // the run that is in the folder
  bool appends_ = false;   // to the log
  JsonLog log_;
  StepDebugging debugging_;
  RunReport report_;
  std::int64_t step_ = 0;
  std::int64_t skipped_ = 0;
  double loss_sum_ = 0;
  std::int64_t loss_samples_ = 0;
  Hits hits_;
  Meter seconds_, data_seconds_;
  double best_top1_ = -1;
  int bad_losses_ = 0;
};

}  // namespace

RunReport train(const TrainConfig& config, const Classifier& classifier, std::shared_ptr<const data::Dataset> training,
                std::shared_ptr<const data::Dataset> test, const TrainCallbacks& callbacks,
                const std::atomic<bool>* stop, RunFolder* folder) {
  check(config);
  return Run(config, classifier, std::move(training), std::move(test), callbacks, stop, folder).run();
}

double peak_rss_mb() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024 / 1e6;  // Linux counts in KiB
}

}  // namespace halfstep::training
