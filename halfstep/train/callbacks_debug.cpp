// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/callbacks_debug.h"

#include <iostream>
#include <limits>
#include <optional>
#include <utility>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/io/atomic_file.h"
#include "halfstep/runtime/log.h"
#include "halfstep/train/train_step.h"

namespace halfstep::training {
namespace {

namespace fs = std::filesystem;

constexpr StepRange kAllSteps = {.first = 1, .last = std::numeric_limits<std::int64_t>::max()};

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) fail<IoError>("{}: can't be made: {}", shown_path(folder), error.message());
}

void write(const fs::path& path, const std::string& text) {
  io::AtomicFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

void say(const DebugReport& report, const std::string& text) {
  if (report.say) {
    report.say(text);
  } else {
    std::cout << text << std::flush;
  }
}

void leave(const DebugReport& report, const std::string& text) {
  say(report, text);
  if (report.file.empty()) return;
  if (report.file.has_parent_path()) make_folder(report.file.parent_path());
  write(report.file, text);
}

}  // namespace

// --------------------------------------------------------------------------------------------------------- the steps

/// What is done during the steps, and reported at their end.
class detail::StepsWork {
 public:
  virtual ~StepsWork() = default;
  /// Throws Error for a run that it can't be done in.
  virtual void check(const TrainContext& /*context*/) const {}
  virtual void begin(const TrainContext& context) = 0;
  virtual void end() = 0;
};

struct StepsCallback::State {
  State(const StepRange& range, const DebugReport& report, const char* callback,
        std::unique_ptr<detail::StepsWork> what)
      : steps(range), name(report.name.empty() ? callback : report.name), warns(report.warns), work(std::move(what)) {}
  ~State() {
    try {
      end();  // what a run that fails has recorded is what its user wants to see
    } catch (const std::exception& e) {
      log(LogLevel::error, e.what());
    }
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  void end() {
    if (std::exchange(active, false)) work->end();
  }

  StepRange steps;
  std::string name;
  bool warns;
  std::unique_ptr<detail::StepsWork> work;
  bool begun = false, active = false;
  std::int64_t last_step = 0;
};

StepsCallback::StepsCallback(const StepRange& steps, const DebugReport& report, const char* name,
                             std::unique_ptr<detail::StepsWork> work)
    : state_(std::make_shared<State>(steps, report, name, std::move(work))) {
  if (steps.first < 1 || steps.last < steps.first) {
    fail<Error>("{}: expected steps counted from 1, the last not before the first, got {} to {}", state_->name,
                steps.first, steps.last);
  }
}

void StepsCallback::begin(TrainContext& context) {
  if (std::exchange(state_->begun, true)) return;
  state_->work->begin(context);
  state_->active = true;
}

void StepsCallback::on_train_begin(TrainContext& context) {
  state_->end();
  state_->begun = false;
  state_->last_step = 0;
  state_->work->check(context);
}

void StepsCallback::on_step_begin(TrainContext& context) {
  if (state_->steps.contains(context.step)) begin(context);
}

void StepsCallback::on_step_end(TrainContext& context) {
  state_->last_step = context.step;
  if (context.step >= state_->steps.last) state_->end();
}

void StepsCallback::on_train_end(TrainContext& /*context*/) {
  state_->end();
  if (!state_->warns || state_->last_step >= state_->steps.first) return;
  log(LogLevel::warning, fmt::format("{}: the run ended after step {}", state_->name, state_->last_step));
}

// ----------------------------------------------------------------------------------------------------- what they do

namespace {

class Dumping final : public detail::StepsWork {
 public:
  explicit Dumping(DumpTensorsOptions options) : options_(std::move(options)) {}
  void begin(const TrainContext& /*context*/) override { dump_.emplace(options_.dump); }
  void end() override {
    const std::string text = fmt::format("{} calls dumped in {}\n", dump_->calls(), shown_path(dump_->folder()));
    dump_.reset();
    leave(options_.report, text);
  }

 private:
  DumpTensorsOptions options_;
  std::optional<debug::Dump> dump_;
};

class Comparing final : public detail::StepsWork {
 public:
  explicit Comparing(CompareStepsOptions options) : options_(std::move(options)) {}
  void begin(const TrainContext& /*context*/) override { compare_.emplace(options_.compare); }
  void end() override {
    const std::string text = compare_->report();
    compare_.reset();
    leave(options_.report, text);
  }

 private:
  CompareStepsOptions options_;
  std::optional<debug::Compare> compare_;
};

// The batch in float32 and in the run's precision. Leaves weights and buffers as they were, and no gradients, which a
// step drops anyway.
class Twin final : public detail::StepsWork {
 public:
  explicit Twin(CompareTwinOptions options) : options_(std::move(options)) {}
  void check(const TrainContext& context) const override {
    if (context.train_step && context.train_step->options().autocast) return;
    fail<Error>("CompareTwin: expected a step in an autocast region (StepOptions::autocast), got one without");
  }
  void begin(const TrainContext& context) override {
    const TrainStep& step = *context.train_step;
    const data::Batch& batch = context.batches[0];
    const nn::ModuleBase& network = step.network();
    std::vector<Tensor> buffers;
    for (const NamedTensor& b : network.buffers()) buffers.push_back(b.tensor.clone());
    const auto restore = [&] {
      const NoGrad no_grad;
      std::size_t i = 0;
      for (const NamedTensor& b : network.buffers()) Tensor(b.tensor).copy_(buffers[i++]);
      step.optimizer().zero_grad();
    };
    // Passes that train nothing are this rank's own: a hook such as PowerSGD's would keep what they leave out.
    std::optional<dist::DataParallelBase::NoSync> alone;
    if (step.options().parallel) alone.emplace(*step.options().parallel);
    const debug::TwinReport report = debug::twin(
        [&] {
          restore();
          const Tensor loss = step.task().loss(batch).loss;
          (step.scaler() ? step.scaler()->scale(loss) : loss).backward();
        },
        {.dtype = *step.options().autocast});
    leave(options_.report, report.str(options_.rows));
    restore();
  }
  void end() override {}

 private:
  CompareTwinOptions options_;
};

class Checking final : public detail::StepsWork {
 public:
  explicit Checking(NonFiniteMonitorOptions options) : options_(std::move(options)) {}
  void begin(const TrainContext& /*context*/) override { nonfinite_.emplace(options_.check); }
  void end() override {
    const std::uint64_t count = nonfinite_->count();
    std::string text = fmt::format("{} calls made infinities or NaNs out of finite inputs\n", count);
    if (count > 0) text += "the first: " + nonfinite_->findings().at(0).str() + "\n";
    nonfinite_.reset();
    leave(options_.report, text);
  }

 private:
  NonFiniteMonitorOptions options_;
  std::optional<debug::NonFinite> nonfinite_;
};

class Profiling final : public detail::StepsWork {
 public:
  explicit Profiling(ProfileStepsOptions options) : options_(std::move(options)) {}
  void begin(const TrainContext& /*context*/) override { profiler_.emplace(options_.profiler); }
  void end() override {
    profiler_->stop();
    make_folder(options_.folder);
    profiler_->write_trace(options_.folder / "trace.json");
    const std::string text = profiler_->table();
    profiler_.reset();
    write(options_.folder / "profile.txt", text);
    leave(options_.report, text + fmt::format("profile and trace in {}\n", shown_path(options_.folder)));
  }

 private:
  ProfileStepsOptions options_;
  std::optional<debug::Profiler> profiler_;
};

// Of a name that was checked.
debug::DumpLevel dump_level(const std::string& text) {
  if (text == "first") return debug::DumpLevel::first;
  if (text == "whole") return debug::DumpLevel::whole;
  return debug::DumpLevel::statistics;
}

}  // namespace

DumpTensors::DumpTensors(const DumpTensorsOptions& options)
    : StepsCallback(options.steps, options.report, "DumpTensors", std::make_unique<Dumping>(options)) {}

CompareSteps::CompareSteps(const CompareStepsOptions& options)
    : StepsCallback(options.steps, options.report, "CompareSteps", std::make_unique<Comparing>(options)) {}

CompareTwin::CompareTwin(const CompareTwinOptions& options)
    : StepsCallback(options.steps, options.report, "CompareTwin", std::make_unique<Twin>(options)) {}

NonFiniteMonitor::NonFiniteMonitor(const NonFiniteMonitorOptions& options)
    : StepsCallback(kAllSteps, options.report, "NonFiniteMonitor", std::make_unique<Checking>(options)) {}

void NonFiniteMonitor::on_train_begin(TrainContext& context) {
  StepsCallback::on_train_begin(context);
  begin(context);
}

ProfileSteps::ProfileSteps(const ProfileStepsOptions& options)
    : StepsCallback(options.steps, options.report, "ProfileSteps", std::make_unique<Profiling>(options)) {}

std::vector<Callback> debug_callbacks(const DebugConfig& config, const fs::path& out,
                                      const std::function<void(const std::string&)>& say) {
  check(config);
  const auto report = [&](const char* file) {
    return DebugReport{.file = out.empty() || !file ? fs::path() : out / file,
                       .say = say ? say : [](const std::string& /*text*/) {},
                       .name = "--debug-steps " + config.steps};
  };
  const StepRange steps = parse_steps(config.steps, "--debug-steps");
  std::vector<Callback> all;
  if (!config.dump.empty()) {
    all.emplace_back(DumpTensors({.dump = {.folder = config.dump, .level = dump_level(config.level)},
                                  .steps = steps,
                                  .report = report(nullptr)}));
  }
  if (config.compare == "f64" || config.compare == "f32") {
    CompareStepsOptions options{.compare = {.reference = config.compare == "f64" ? DType::f64 : DType::f32},
                                .steps = steps,
                                .report = report("debug-compare.txt")};
    options.report.warns = all.empty();  // one warning for the flag
    all.emplace_back(CompareSteps(options));
  }
  const bool dumps = !all.empty();
  if (!config.profile.empty()) {
    ProfileStepsOptions options{.folder = config.profile,
                                .steps = parse_steps(config.profile_steps, "--profile-steps"),
                                .report = report(nullptr)};
    options.report.name = "--profile-steps " + config.profile_steps;
    all.emplace_back(ProfileSteps(options));
  }
  if (config.compare == "twin") {
    CompareTwinOptions options{.steps = steps, .report = report("debug-twin.txt")};
    options.report.warns = !dumps;
    all.emplace_back(CompareTwin(options));
  }
  if (!config.nonfinite.empty()) {
    const auto action = config.nonfinite == "raise" ? debug::OnNonFinite::raise : debug::OnNonFinite::log;
    NonFiniteMonitorOptions options{.check = {.action = action}, .report = report("debug-nonfinite.txt")};
    options.report.warns = false;
    all.emplace_back(NonFiniteMonitor(options));
  }
  return all;
}

}  // namespace halfstep::training
