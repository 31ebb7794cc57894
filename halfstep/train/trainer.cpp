// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/trainer.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <set>

#include "halfstep/amp/autocast.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/core/text.h"
#include "halfstep/dist/loss_scale.h"
#include "halfstep/dist/power_sgd.h"
#include "halfstep/dist/sync_batch_norm.h"
#include "halfstep/dist/zero.h"
#include "halfstep/optim/ema.h"
#include "halfstep/runtime/float32_precision.h"
#include "halfstep/runtime/log.h"
#include "halfstep/runtime/tuning.h"
#include "halfstep/runtime/winograd.h"
#include "halfstep/train/callbacks.h"
#include "halfstep/train/callbacks_debug.h"
#include "halfstep/train/checkpoint_internal.h"
#include "halfstep/train/classification.h"
#include "halfstep/train/compression_internal.h"
#include "halfstep/train/data.h"
#include "halfstep/train/device_memory.h"
#include "halfstep/train/evaluate.h"
#include "halfstep/train/flags.h"
#include "halfstep/train/json_log.h"
#include "halfstep/train/json_logger.h"
#include "halfstep/train/memory_plan.h"
#include "halfstep/train/model.h"
#include "halfstep/train/optimizer.h"
#include "halfstep/train/quantize.h"
#include "halfstep/train/result_files_internal.h"
#include "halfstep/train/resume.h"
#include "halfstep/train/run_callbacks_internal.h"

namespace halfstep::training {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

NamedTensors parameters_on(const nn::ModuleBase& module, Device device) {
  module.to(device);
  return module.parameters();
}

// The network on several ranks; null on one.
std::shared_ptr<dist::DataParallelBase> parallel_of(const TrainConfig& c, const nn::ModuleBase& network,
                                                    const std::optional<dist::PowerSGD>& power_sgd) {
  if (c.group.size() == 1) return nullptr;
  if (c.batch_size < c.group.size()) {
    fail<Error>("train: expected a batch size of at least the number of ranks, {}, got {}", c.group.size(),
                c.batch_size);
  }
  if (c.sync_batch_norm) dist::convert_sync_batch_norm(network, c.group);
  dist::DataParallelOptions options{.bucket_cap_mb = c.bucket_mb,
                                    .first_bucket_cap_mb = c.bucket_mb > 0 ? std::min(c.bucket_mb, 1.0) : 1,
                                    // Statistics of the whole batch are the same on all ranks; ranges are not.
                                    .broadcast_buffers = !c.sync_batch_norm || quant::quantization_of(network)};
  if (c.reproducible > 0) {
    if (c.reproducible % c.group.size() != 0) {
      fail<Error>("--reproducible: expected a number of shards that {} ranks divide, got {}", c.group.size(),
                  c.reproducible);
    }
    options.hook = shard_hook();
    options.broadcast_buffers = false;  // but before evaluations
  }
  if (const auto dtype = parse_compression(c.compress_gradients).dtype) options.hook = dist::compress_hook(*dtype);
  if (power_sgd) options.hook = power_sgd->hook();
  return std::make_shared<dist::DataParallelBase>(network, c.group, options);
}

std::optional<dist::PowerSGD> power_sgd_of(const TrainConfig& c) {
  const std::optional<dist::PowerSGDOptions> options = parse_compression(c.compress_gradients).power_sgd;
  if (!options || c.group.size() == 1) return std::nullopt;
  return dist::PowerSGD(*options);
}

// A rank's part of the data set of an evaluation: the parts lie one behind the other. With fewer samples than ranks
// some are empty; the first never is, whose samples are drawn.
std::shared_ptr<const data::Dataset> part_of(std::shared_ptr<const data::Dataset> all,
                                             const dist::ProcessGroup& group) {
  if (group.size() == 1) return all;
  const std::int64_t n = all->size(), ranks = group.size();
  const auto begin_of = [=](std::int64_t rank) { return (n * rank + ranks - 1) / ranks; };
  const std::int64_t begin = begin_of(group.rank()), end = begin_of(group.rank() + 1);
  std::vector<std::int64_t> indices(static_cast<std::size_t>(end - begin));
  std::iota(indices.begin(), indices.end(), begin);
  return std::make_shared<data::SubsetDataset>(std::move(all), std::move(indices));
}

WarmupOptions warmup_of(const TrainConfig& c) {
  WarmupOptions options{.least_steps = c.warmup_steps};
  if (c.warmup_momentum > 0) options.momentum = c.warmup_momentum;
  if (c.warmup_bias_lr > 0) options.bias_lr = c.warmup_bias_lr;
  return options;
}

// What an average is of, from a file that has it with the rest.
NamedTensors of_average(const optim::EMA& average, const NamedTensors& all) {
  std::set<std::string_view> names;
  for (const NamedTensor& t : average.averages()) names.insert(t.name);
  NamedTensors result;
  std::copy_if(all.begin(), all.end(), std::back_inserter(result),
               [&](const NamedTensor& t) { return names.contains(t.name); });
  return result;
}

// What rank 0 writes and tells the others leave.
TrainConfig config_of_rank(TrainConfig config) {
  if (config.group.rank() == 0) return config;
  config.out.clear();
  config.log_json.clear();
  config.tensorboard = config.overwrite = false;
  config.debug.dump.clear();
  config.debug.profile.clear();
  return config;
}

class Run {
 public:
  Run(const TrainConfig& config, const std::shared_ptr<Task>& task, std::shared_ptr<const data::Dataset> training,
      std::shared_ptr<const data::Dataset> test, const TrainCallbacks& callbacks, const std::atomic<bool>* stop,
      RunFolder* folder)
      : config_(config),
        callbacks_(callbacks),
        stop_(stop),
        amp_(amp_mode(config)),
        optimizer_(make_optimizer(config, parameters_on(task->network(), config.device))),
        power_sgd_(power_sgd_of(config)),
        step_(make_train_step(task, *optimizer_, make_scaler(config),
                              {.autocast = amp_.region,
                               .clip_norm = config.clip_norm,
                               .sum_over_samples = config.nominal_batch > 0,
                               .parallel = parallel_of(config, task->network(), power_sgd_),
                               .shards = static_cast<int>(config.reproducible)})),
        samples_(training->size()),
        test_(test),
        loader_(task->training_data(std::move(training)), {.batch_size = config.batch_size,
                                                           .shuffle = true,
                                                           .workers = config.workers,
                                                           .prefetch = config.prefetch,
                                                           .seed = config.seed,
                                                           .device = config.device,
                                                           .rank = config.group.rank(),
                                                           .ranks = config.group.size(),
                                                           .shards = static_cast<int>(config.reproducible)}),
        test_loader_(part_of(std::move(test), config.group),
                     {.batch_size = std::max<std::int64_t>(config.eval_batch_size / config.group.size(), 1),
                      .workers = std::max(config.workers, 1),
                      .prefetch = config.prefetch,
                      .device = config.device}),
        steps_per_epoch_((loader_.size() + config.accumulate - 1) / config.accumulate),
        schedule_(parse_rate_rule(config.lr_schedule, config.warmup_epochs), *optimizer_, steps_per_epoch_,
                  config.epochs, warmup_of(config)),
        saver_(config, step_, loader_) {
    reset_fallback_counts();
    plan_memory();
    saver_.set_compression(power_sgd_);
    if (power_sgd_ && step_.scaler()) power_sgd_->follow([this] { return step_.scaler()->get_scale(); });
    if (amp_.level != amp::Level::O0) amp::set_level(task->network(), amp_.level, amp_.level_dtype);
    if (config.start_epoch > 0) {
      loader_.seek({.epoch = config.start_epoch, .batch = 0});
      from_.epoch = config.start_epoch;
      from_.step = config.start_epoch * steps_per_epoch_;
    }
    check_log(config.log_json, config.out, {config.resume, config.data});
    const bool claims = !config.out.empty() && !folder;
    const bool goes_on = is_run_in(config.resume, config.out);
    const ExistingRun existing = goes_on            ? ExistingRun::resume
                                 : config.overwrite ? ExistingRun::replace
                                                    : ExistingRun::refuse;
    // Nobody may write the checkpoint that is read.
    if (claims && goes_on) own_folder_ = RunFolder(config.out, existing);
    if (config.ema > 0) {
      average_.emplace(without_activation_ranges(task->network()),
                       optim::EMAOptions{.decay = config.ema, .warmup = config.ema_warmup});
      saver_.set_average(&*average_);
    }
    divide_state();
    if (!config.resume.empty()) resume();
    if (claims && !goes_on) own_folder_ = RunFolder(config.out, existing);
    folder_ = folder ? folder : &own_folder_;
    // Before the caller writes a configuration, which would make a run of any folder.
    replaces_ = !config.out.empty() && existing == ExistingRun::replace && holds_run(config.out);
    // The log of a run that is replaced goes with it.
    std::error_code error;
    const fs::path own = config.out / "log.jsonl";
    appends_ = !config.resume.empty() &&
               !(replaces_ && (config.log_json == own || fs::equivalent(config.log_json, own, error)));
    // It may wait for its reader.
    if (config.group.size() > 1) dist::ProcessGroup::working("opening its log");
    if (!config.log_json.empty() && !nothing_left()) *log_ = JsonLog(config.log_json, appends_, stop_);
  }

  RunReport run() {
    const auto start = Clock::now();
    RunReport report;
    report.best_by = step_.task().best_by();
    // Stopped while the log waited for its reader: nothing has begun.
    dist::ProcessGroup all_ranks = config_.group;
    report.interrupted = max_of(all_ranks, !nothing_left() && !config_.log_json.empty() && !*log_ ? 1 : 0) != 0;
    if (nothing_left() || report.interrupted) {
      report.nothing_left = nothing_left();
      report.out_of_patience = saver_.out_of_patience();
      report.finite = saver_.finite;
      report.epochs = from_.epoch;
      report.steps = from_.step;
      report.skipped = from_.skipped;
      report.peak_rss_mb = peak_rss_mb();
      report.checkpoint = config_.resume;
      return report;
    }
    begin_files();
    // Without a region of its own the run has none, whatever its caller has.
    // A region that is open around all steps would keep the casts of a network with a level from step to step.
    std::optional<amp::Autocast> outside;
    if (!amp_.region && amp::is_autocast_enabled()) outside.emplace(amp::AutocastOptions{.enabled = false});
    // Ranks that have read different checkpoints don't go on; what else a scale consists of is that of rank 0.
    if (step_.scaler()) {
      dist::check_same_scale(*step_.scaler(), config_.group);
      if (config_.group.size() > 1) dist::broadcast_state(*step_.scaler(), config_.group);
    }
    const auto logger = std::make_shared<JsonLogger>(log_, JsonLoggerOptions{.start = first_line(), .end = false});
    const auto results = std::make_shared<ResultFiles>(config_, step_.task(), test_);
    const auto reports = std::make_shared<ReportCallback>(callbacks_, step_.task());
    // Every evaluation sees the same data set in the same order, and has the memory of the gradients.
    std::vector<Callback> all{Lambda({.on_eval_begin = [this](TrainContext& context) {
      test_loader_.seek({});
      context.optimizer->zero_grad();
    }})};
    // Before anything is saved.
    if (average_) all.emplace_back(WeightAverage(*average_));
    // Each rank's last step has changed its own.
    if (const auto& parallel = step_.options().parallel) {
      all.emplace_back(Lambda({.on_eval_begin = [&parallel](TrainContext&) { parallel->broadcast_buffers(); }}));
    }
    all.insert(all.end(), {Callback(std::make_shared<ScheduleCallback>(schedule_)), Callback(logger), Callback(results),
                           Callback(std::make_shared<FiniteLoss>(step_, saver_)), Callback(reports)});
    for (Callback& c : debug_callbacks(config_.debug, config_.out, callbacks_.on_debug)) all.push_back(std::move(c));
    // Like the table, before the checkpoint that it may not lack.
    if (auto freezes = quantization_schedule(config_.quantization, step_)) all.emplace_back(std::move(freezes));
    if (config_.tensorboard) all.emplace_back(TensorBoard(config_.out / "tensorboard"));
    all.emplace_back(std::make_shared<SaveCallback>(saver_, *log_, callbacks_, *reports));
    Model model(step_, config_.capture);
    try {
      model.fit(config_.epochs, loader_, test_loader_, all,
                {.accumulate = config_.accumulate, .read_every = config_.read_every, .stop = stop_, .from = from_});
    } catch (...) {
      results->run_failed();
      throw;
    }
    const RunState& end = saver_.state();
    // A stop while the last evaluation ended came too late.
    const bool stopped = max_of(all_ranks, stop_ && stop_->load(std::memory_order_relaxed) ? 1 : 0) != 0;
    report.out_of_patience = saver_.out_of_patience();
    report.finite = saver_.finite;
    report.interrupted = stopped && end.epoch < config_.epochs && !report.out_of_patience;
    report.epochs = end.epoch;
    report.steps = end.step;
    report.skipped = end.skipped;
    report.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    report.peak_rss_mb = peak_rss_mb();
    report.device_peak_mb = device_peak_mb(config_.device);
    report.metrics = reports->last_metrics();
    report.checkpoint = saver_.last_file();
    report.fallbacks = fallback_counts();
    report.captured = step_.capture_stats();
    report.why_not_captured = step_.why_not_captured();
    logger->write_end(report, step_);
    return report;
  }

 private:
  void plan_memory() {
    set_recomputed(step_.network(), config_.recompute);
    memory_ = plan_of_run(config_, step_.network());
    if (!memory_) return;
    if (memory_->budget > 0) {
      set_recomputed(step_.network(), memory_->modules());
      limit_cache(memory_->budget);
    }
    if (callbacks_.on_memory) callbacks_.on_memory(*memory_);
  }

  // Of the steps before the first recording: those after it have their memory from one block. What else is in memory,
  // such as a data set, isn't counted by the budget.
  void limit_cache(std::uint64_t budget) {
    if (!config_.capture || !config_.device.is_cpu()) return;
    std::uint64_t counted = 0;
    for (const auto& [name, t] : step_.network().state_dict()) {
      counted += static_cast<std::uint64_t>(t.numel()) * item_size(t.dtype());
    }
    const std::uint64_t held = memory_stats().allocated;
    cache_limit_.emplace(budget + held - std::min(held, counted));
  }

  // ZeRO, before a checkpoint is read, of which a rank then needs its part only.
  void divide_state() {
    const auto& parallel = step_.options().parallel;
    if (config_.zero == 0 || !parallel) return;
    zero_.emplace(*parallel, step_.network(), *optimizer_,
                  dist::ZeroOptions{
                      .stage = config_.zero,
                      .bucket_cap_mb = config_.bucket_mb > 0 ? config_.bucket_mb : dist::ZeroOptions().bucket_cap_mb});
    dist::ProcessGroup group = config_.group;
    saver_.sharded = max_of(group, config_.out.empty() ? 0 : 1) != 0;
  }

  // What the log says of the run before its first step.
  JsonLog::Fields first_line() const {
    JsonLog::Fields fields = {{"model", config_.model},
                              {"epochs", std::int64_t{config_.epochs}},
                              {"batch_size", config_.batch_size},
                              {"accumulate", std::int64_t{config_.accumulate}},
                              {"samples", samples_},
                              {"best_by", step_.task().best_by()},
                              {"lr", config_.lr},
                              {"optimizer", config_.optimizer},
                              {"amp", amp_text(config_)},
                              {"device", config_.device.str()},
                              {"ranks", std::int64_t{config_.group.size()}},
                              {"share", samples_of_ranks(config_)},
                              {"scale", step_.scaler() ? step_.scaler()->get_scale() : 1.0},
                              {"seed", config_.seed}};
    if (winograd() != Winograd::off) fields.emplace_back("winograd", std::string(name(winograd())));
    if (float32_precision() != Float32Precision::highest) {
      fields.emplace_back("float32_precision", std::string(name(float32_precision())));
    }
    if (tuning()) fields.emplace_back("tuning", true);
    if (memory_) {
      fields.emplace_back("recompute", memory_->modules());
      if (memory_->budget > 0) {
        fields.emplace_back("memory_budget_mb", static_cast<double>(memory_->budget) / 1e6);
        fields.emplace_back("predicted_peak_mb", static_cast<double>(memory_->peak) / 1e6);
      }
    }
    return fields;
  }

  bool nothing_left() const { return from_.epoch >= config_.epochs || saver_.out_of_patience(); }

  // All checks are done.
  void begin_files() {
    if (callbacks_.on_start) callbacks_.on_start();
    if (replaces_) {
      std::vector<fs::path> keep = {config_.log_json};
      if (callbacks_.on_start) keep.push_back(config_.out / "config.yaml");  // the caller's own
      folder_->remove_run(keep);
    }
    folder_->remove_leftovers();
    saver_.check_folder();
    if (!appends_ || config_.log_json.empty()) return;
    const LogRepair repair = prepare_log(config_.log_json, from_.step, from_.epoch);
    const std::string file = shown_path(config_.log_json);
    if (repair.torn > 0) {
      log(LogLevel::warning, fmt::format("{}: {} line{} not whole, the first is line {}; what was left of {} is "
                                         "removed",
                                         file, repair.torn, repair.torn == 1 ? " was" : "s were", repair.first,
                                         repair.torn == 1 ? "it" : "them"));
    }
    if (repair.repeated > 0) {
      log(LogLevel::warning, fmt::format("{}: {} line{} from behind step {}, where the run resumes, {} removed: they "
                                         "come again",
                                         file, repair.repeated, repair.repeated == 1 ? "" : "s", from_.step,
                                         repair.repeated == 1 ? "is" : "are"));
    }
    // Another file may have taken the log's place.
    if (repair.first > 0) *log_ = JsonLog(config_.log_json, true, stop_);
  }

  void resume() {
    Checkpoint c = load_checkpoint(config_.resume, needed_tensors(step_.network(), *optimizer_));
    const std::string file = shown_path(config_.resume);
    amp::GradScaler none({.enabled = false});
    amp::GradScaler& scaler = step_.scaler() ? *step_.scaler() : none;
    check_resume(c, config_, *optimizer_, scaler, samples_, file);
    check_network(c, step_.task(), config_, file);
    check_state(c, step_.network(), *optimizer_, file);
    try {
      step_.task().check_saved(c.parts, samples_, c.best);
    } catch (const Error& e) {
      fail<IoError>("{}: damaged checkpoint: {}", file, e.what());
    }
    try {
      if (average_) {
        const NamedTensors averages = of_average(*average_, c.weights);
        average_->load_state_dict({.tensors = averages, .numbers = {{"updates", static_cast<double>(c.ema_updates)}}});
      }
      load_needed(step_.network(), *optimizer_, c.training_weights.empty() ? c.weights : c.training_weights);
      // Copies of what is left come next.
      c.weights.clear();
      c.training_weights.clear();
      optimizer_->load_state_dict(c.optimizer);
      if (!c.scaler.empty()) scaler.load_state_dict(c.scaler);
      if (power_sgd_ && !c.communication.empty()) power_sgd_->load_state_dict(c.communication, config_.group);
      loader_.seek(c.loader);
    } catch (const Error& e) {
      fail<IoError>("{}: {}", file, e.what());
    }
    default_generator().set_state(c.random);
    from_ = run_state(c);
    saver_.resume(c);
  }

  const TrainConfig config_;
  const TrainCallbacks callbacks_;
  const std::atomic<bool>* stop_;
  AmpMode amp_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::optional<dist::PowerSGD> power_sgd_;
  TrainStep step_;
  std::optional<dist::ZeroRedundancy> zero_;
  std::optional<optim::EMA> average_;
  std::int64_t samples_;
  std::shared_ptr<const data::Dataset> test_;
  data::DataLoader loader_, test_loader_;
  std::int64_t steps_per_epoch_;
  RateSchedule schedule_;
  RunSaver saver_;
  RunFolder own_folder_;
  RunFolder* folder_ = nullptr;
  bool replaces_ = false;  // the run that is in the folder
  bool appends_ = false;   // to the log
  std::shared_ptr<JsonLog> log_ = std::make_shared<JsonLog>();
  RunState from_;
  std::optional<MemoryPlan> memory_;
  std::optional<MemoryCacheLimitGuard> cache_limit_;
};

}  // namespace

RunReport train(const TrainConfig& config, const std::shared_ptr<Task>& task,
                std::shared_ptr<const data::Dataset> training, std::shared_ptr<const data::Dataset> test,
                const TrainCallbacks& callbacks, const std::atomic<bool>* stop, RunFolder* folder) {
  check(config);
  if (config.tensorboard && config.out.empty()) {
    fail<Error>("train: expected a folder for the curves that `tensorboard` asks for, got no `out`");
  }
  if (config.group.rank() == 0) {
    return Run(config, task, std::move(training), std::move(test), callbacks, stop, folder).run();
  }
  return Run(config_of_rank(config), task, std::move(training), std::move(test), {}, stop, nullptr).run();
}

RunReport train(const TrainConfig& config, const Classifier& classifier, std::shared_ptr<const data::Dataset> training,
                std::shared_ptr<const data::Dataset> test, const TrainCallbacks& callbacks,
                const std::atomic<bool>* stop, RunFolder* folder) {
  const auto task = std::make_shared<ClassificationTask>(classifier, classification_options(config));
  return train(config, task, std::move(training), std::move(test), callbacks, stop, folder);
}

RunReport train(TrainConfig config, const TrainCallbacks& callbacks, const std::atomic<bool>* stop, RunFolder* folder) {
  check(config);
  manual_seed(config.seed);
  const RunData data = load_data(config);
  describe_data(config, data);
  const std::shared_ptr<Task> task = make_task(config, data);
  prepare_quantization(config, *task);
  return train(config, task, data.training, data.test, callbacks, stop, folder);
}

void describe_data(TrainConfig& config, const RunData& data) {
  config.classes = data.classes;
  config.num_classes = data.num_classes;
  config.data_checksums = data.checksums;
  const DataKind& kind = data_of(config.model);
  std::vector<Flag> rows = flags(config);
  std::erase_if(rows, [&](const Flag& flag) { return flag.data.empty() || !flag.of_data(kind.flags); });
  for (const auto& [key, value] : recipe(rows)) config.data_flags[key] = value;
}

EvalReport evaluate(Task& task, std::shared_ptr<const data::Dataset> test, const EvalOptions& options) {
  data::DataLoader loader(part_of(std::move(test), options.group),
                          {.batch_size = std::max<std::int64_t>(options.batch_size / options.group.size(), 1),
                           .workers = options.workers,
                           .prefetch = options.prefetch,
                           .device = device_of(task.network())});
  EvalReport report;
  std::optional<amp::Autocast> outside;
  if (!options.autocast && amp::is_autocast_enabled()) outside.emplace(amp::AutocastOptions{.enabled = false});
  const auto stopped = [&] { return options.stop && options.stop->load(std::memory_order_relaxed); };
  report.interrupted = !evaluate(task, loader, report.metrics,
                                 {.autocast = options.autocast,
                                  .read_every = options.read_every,
                                  .on_batch = options.on_batch,
                                  .stop = stopped,
                                  .group = options.group});
  if (options.table) *options.table = task.result_table();
  return report;
}

EvalReport evaluate(const Classifier& classifier, std::shared_ptr<const data::Dataset> test,
                    const EvalOptions& options) {
  ClassificationTask task(classifier, {.keep_verdicts = options.table != nullptr, .classes = options.classes});
  return evaluate(task, std::move(test), options);
}

EvalReport evaluate(const Classifier& classifier, std::shared_ptr<const data::Dataset> test, std::optional<DType> dtype,
                    std::int64_t batch_size) {
  return evaluate(classifier, std::move(test), EvalOptions{.autocast = dtype, .batch_size = batch_size});
}

double peak_rss_mb() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024 / 1e6;  // Linux counts in KiB
}

}  // namespace halfstep::training
