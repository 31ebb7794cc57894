// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/trainer.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <ctime>
#include <fstream>
#include <functional>
#include <map>
#include <optional>

#include "cli/progress.h"
#include "cli/ranks.h"
#include "cli/terminal.h"
#include "cli/train_options.h"
#include "cli/verbs.h"
#include "halfstep/core/random.h"
#include "halfstep/core/text.h"
#include "halfstep/dist/control.h"
#include "halfstep/io/atomic_file.h"
#include "halfstep/io/weights.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/device_memory.h"
#include "halfstep/train/evaluate.h"
#include "halfstep/train/json_log.h"
#include "halfstep/train/networks.h"
#include "halfstep/train/quantize.h"
#include "halfstep/train/run_folder.h"
#include "halfstep/train/weight_only.h"

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;

// The command that goes on with this run: what was given, with --resume.
std::string command_to_resume(const fs::path& out) {
  const auto quoted = [](const std::string& text) {
    const bool plain = !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) {
      return std::isalnum(c) || std::string_view("_-./:,=+@%").find(static_cast<char>(c)) != std::string_view::npos;
    });
    if (plain) return text;
    std::string result = "'";
    for (const char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return result + "'";
  };
  std::string command = "halfstep";
  for (const std::string& argument : arguments_to_resume(g_arguments, out)) command += " " + quoted(argument);
  return command;
}

// Which ops the device lacks, and what that cost.
void print_fallbacks(const std::vector<FallbackCount>& list, Device device) {
  if (list.empty()) return;
  fmt::print("ops that ran on the CPU in place of {}:\n", device.str());
  for (const FallbackCount& f : list) {
    fmt::print("  {:<28} {:>8} calls {:>10.1f} MB to the CPU {:>10.1f} MB back {:>8.2f} s{}\n", f.op, f.calls,
               static_cast<double>(f.bytes_to_host) / 1e6, static_cast<double>(f.bytes_to_device) / 1e6, f.seconds,
               f.failures ? fmt::format(" ({} after a failure)", f.failures) : "");
  }
}

void say_damaged(const training::RunData& data) {
  std::int64_t count = 0;
  for (const auto& d : data.damaged) count += d();
  if (count > 0) {
    complain(fmt::format("{} could not be read and {} replaced",
                         count == 1 ? "1 picture" : fmt::format("{} pictures", count), count == 1 ? "was" : "were"));
  }
}

// Values of a file for a network to begin with. Where both are quantized, ranges too.
void load_pretrained(const TrainOptions& o, training::Task& task) {
  training::SavedWeights saved = training::load_saved_weights(o.pretrained, o.model);
  const std::string file = shown_path(o.pretrained);
  const nn::ModuleBase& network = task.network();
  const auto ranges = std::stable_partition(saved.tensors.begin(), saved.tensors.end(), [](const NamedTensor& t) {
    return !t.name.starts_with(training::kQuantizationPrefix);
  });
  NamedTensors quantized(ranges, saved.tensors.end());
  saved.tensors.erase(ranges, saved.tensors.end());
  try {
    training::widen_weights(saved.tensors);
    const training::NetworkKind& kind = training::network_kind(o.model);
    const io::PretrainedReport report = io::load_pretrained(
        network, saved.tensors, {.heads = kind.heads ? kind.heads(network) : std::vector<std::string>()});
    training::prepare_quantization(o.config, task);
    const std::size_t count = training::load_ranges(network, quantized);
    training::check_ranges(network);
    if (o.quiet) return;
    fmt::print("{}: {} tensors loaded{}\n", file, report.loaded.size() + count,
               quantized.empty() || count > 0 ? "" : ", without their quantization: there is no --qat");
  } catch (const Error& e) {
    throw IoError(fmt::format("{}: no weights of {}: {}", file, o.model, e.what()));
  }
}

void print_line(const std::string& line) {
  fmt::print("{}\n", printable_lines(line));
  std::fflush(stdout);
}

constexpr const char* kStoppedEarly = "interrupted before the first step; nothing was written";

bool due(std::int64_t place, std::int64_t all, std::int64_t every) {
  return every > 0 && ((place - 1) % every == 0 || place == all);
}

// A signal to any of the ranks, of which rank 0 says what it ended; they leave together, since a launcher ends those
// that are left when one has failed.
int interrupted(dist::ProcessGroup& group, const std::string& what) {
  const int signal = static_cast<int>(training::max_of(group, g_signal.load()));
  dist::expect_end();
  if (group.rank() == 0) complain(what);
  return 128 + signal;
}

// `--evaluate`: the test part once, as after an epoch.
int evaluate(TrainOptions& o) {
  training::TrainConfig& c = o.config;
  training::RunData data;
  std::shared_ptr<training::Task> task;
  training::JsonLog log;
  const training::AmpMode mode = training::amp_mode(c);
  const auto prepare = [&] {
    const fs::path& weights = c.resume.empty() ? o.pretrained : c.resume;
    std::string model = c.model;
    const Loaded loaded = load_classifier(model, weights, c.description);
    loaded.apply(c);
    data = training::load_data(c, false);
    check_classes(loaded, data.classes, weights, c.data);
    task = training::make_task(c, data, loaded.network);
    task->network().to(c.device);
    if (mode.level != amp::Level::O0) amp::set_level(task->network(), mode.level, mode.level_dtype);
    if (!c.log_json.empty()) log = training::JsonLog(c.log_json, false, &g_stop);
  };
  if (!prepared_on_all(c.group, prepare)) return kFailed;
  constexpr const char* kInterrupted = "interrupted in the evaluation";
  // Also where the log waited for its reader.
  if (training::max_of(c.group, !c.log_json.empty() && !log ? 1 : 0) != 0) return interrupted(c.group, kInterrupted);
  c.data_checksums = data.checksums;
  if (c.group.size() > 1 && !same_on_all(o)) return kFailed;
  training::EvalOptions options{.autocast = mode.region,
                                .batch_size = c.eval_batch_size,
                                .workers = std::max(c.workers, 1),
                                .prefetch = c.prefetch,
                                .read_every = c.read_every,
                                .stop = &g_stop,
                                .group = c.group};
  options.on_batch = [&](const training::EvalProgress& p) {
    if (!o.quiet && due(p.batch, p.batches, o.print_freq)) print_line(eval_line(p));
  };
  const training::EvalReport report = training::evaluate(*task, data.test, options);
  if (report.interrupted) return interrupted(c.group, kInterrupted);
  print_line(accuracy_line(report.metrics));
  training::JsonLog::Fields fields;
  training::add_metrics(fields, report.metrics);
  log.write("eval", fields);
  say_damaged(data);
  return kDone;
}

// What the run tells while it goes on.
class Reporter {
 public:
  Reporter(const TrainOptions& o, bool terminal, std::shared_ptr<const training::Task> task)
      : options_(o),
        terminal_(terminal),
        lines_(training::data_of(o.config.model).lines),
        scaled_(training::loss_scale_policy(o.config).has_value()),
        bar_(terminal),
        task_(std::move(task)) {}

  training::TrainCallbacks callbacks() {
    training::TrainCallbacks result;
    result.on_memory = [this](const training::MemoryPlan& plan) {
      if (!options_.quiet) print_line(plan.text());
    };
    result.on_step = [this](const training::StepReport& r) { step(r); };
    result.on_eval = [this](const training::EvalReport& r) { eval(r); };
    result.on_eval_batch = [this](const training::EvalProgress& p) { eval_batch(p); };
    result.on_debug = [this](const std::string& text) {
      bar_.clear();
      if (options_.quiet) return;
      fmt::print("{}", printable_lines(text));
      std::fflush(stdout);
    };
    return result;
  }
  ProgressBar& bar() { return bar_; }
  bool stepped() const { return stepped_; }

 private:
  void step(const training::StepReport& r) {
    last_ = r;
    stepped_ = true;
    if (!options_.quiet && due(r.step_in_epoch, r.steps_in_epoch, options_.print_freq)) {
      bar_.clear();
      const auto columns = task_ ? task_->progress(progress_state(r)) : std::vector<training::ProgressColumn>();
      if (columns.empty()) {
        print_line(step_line(r));
      } else {
        if (std::exchange(header_epoch_, r.epoch) != r.epoch) print_line(columns_text(columns, true));
        print_line(columns_text(columns, false));
      }
    }
    if (!terminal_) return;
    bar_.update(
        fmt::format("epoch {}/{}", r.epoch, options_.config.epochs), r.step_in_epoch, r.steps_in_epoch,
        fmt::format("loss {:.4f}  {:.0f}/s{}", r.mean_loss, r.samples_per_s,
                    r.scale == 1 ? std::string() : fmt::format("  scale {}  skipped {}", r.scale, r.skipped_steps)));
  }

  training::ProgressState progress_state(const training::StepReport& r) const {
    const Device device = options_.config.device;
    training::ProgressState state{
        .epoch = r.epoch,
        .epochs = options_.config.epochs,
        .samples = r.samples,
        .memory_mb = device.is_cpu() ? training::peak_rss_mb() : training::device_peak_mb(device)};
    for (const auto& [name, meter] : r.part_means) {
      state.last[name] = meter.last;
      state.means[name] = meter.mean();
    }
    return state;
  }

  void eval_batch(const training::EvalProgress& p) {
    if (options_.quiet || !due(p.batch, p.batches, options_.print_freq)) return;
    bar_.clear();
    print_line(eval_line(p));
  }

  void eval(const training::EvalReport& r) {
    bar_.clear();
    if (options_.quiet) return;
    if (lines_) print_line(accuracy_line(r.metrics));
    // Of an epoch that was only evaluated here, after its last step elsewhere, no speed is known.
    print_line(fmt::format(
        "epoch {}/{}: loss {:.4f}, test {}{}{}", r.epoch, options_.config.epochs, r.train_loss, results_text(r.metrics),
        last_.epoch == r.epoch ? fmt::format(", {:.0f} samples/s", last_.samples_per_s) : std::string(),
        scaled_ ? fmt::format(", scale {}, skipped {}", r.scale, r.skipped) : std::string()));
  }

  const TrainOptions& options_;
  bool terminal_, lines_, scaled_;
  ProgressBar bar_;
  bool stepped_ = false;
  int header_epoch_ = 0;  // whose columns have names above them
  std::shared_ptr<const training::Task> task_;
  training::StepReport last_{};
};

// Folder and configuration of a run. Checks come first and files last.
class Place {
 public:
  // What can be said at once. A run that goes on is locked before anybody reads its checkpoint.
  explicit Place(TrainOptions& o) : options_(o) {
    training::TrainConfig& c = o.config;
    if (o.no_out || o.evaluate) return;
    if (c.out.empty() && c.resume.empty()) {
      named_by_time_ = true;
      c.out = fs::path("runs") / fmt::format("{}-{:%Y%m%d-%H%M%S}", c.model, fmt::localtime(std::time(nullptr)));
      return;
    }
    // A run that goes on writes where it wrote before.
    if (c.out.empty()) c.out = fs::is_directory(c.resume) ? c.resume : c.resume.parent_path();
    if (c.out.empty()) c.out = ".";
    goes_on_ = training::is_run_in(c.resume, c.out);
    if (goes_on_) {
      folder_ = training::RunFolder(c.out, training::ExistingRun::resume);
    } else {
      training::RunFolder::check(c.out, existing());
    }
  }

  // After all that may be wrong with data and weights.
  void claim() {
    training::TrainConfig& c = options_.config;
    if (c.out.empty()) return;
    if (!goes_on_ && !named_by_time_ && !training::holds_run(c.out)) there_before_ = training::run_files(c.out);
    if (!folder_) {
      folder_ = named_by_time_ ? training::RunFolder::make(c.out) : training::RunFolder(c.out, existing());
      c.out = folder_.path();
    }
    if (c.log_json.empty()) c.log_json = c.out / "log.jsonl";
  }

  void write_config() {
    if (!folder_) return;
    io::AtomicFile file(config());
    const std::string text = describe(options_);
    file.write(text.data(), text.size());
    file.commit();
    written_ = true;
  }

  // The run came to nothing, not to a single step: no folder shall look as if it held one.
  void start_failed() {
    if (!written_ || goes_on_) return;
    for (const fs::path& file : training::run_files(folder_.path())) {
      std::error_code error;
      const auto& own = there_before_;
      if (std::find(own.begin(), own.end(), file) == own.end()) fs::remove(file, error);
    }
  }

  training::RunFolder* folder() { return folder_ ? &folder_ : nullptr; }

 private:
  training::ExistingRun existing() const {
    return options_.config.overwrite ? training::ExistingRun::replace : training::ExistingRun::refuse;
  }
  fs::path config() const { return folder_.path() / "config.yaml"; }

  TrainOptions& options_;
  training::RunFolder folder_;
  bool named_by_time_ = false, goes_on_ = false, written_ = false;
  std::vector<fs::path> there_before_;  // in a folder without a run: none of this one's
};

// Where the run resumes, and with what else than before.
void print_resumed(const TrainOptions& o) {
  const fs::path& resume = o.config.resume;
  fs::path file = resume;
  if (fs::is_directory(resume)) {
    file = resume / training::kLastCheckpoint;
    if (!fs::exists(file)) file = resume / training::kBestCheckpoint;
  }
  print_line(fmt::format("resuming from {}{}", shown_path(file),
                         o.run ? fmt::format(", with what {} says", shown_path(o.run.file)) : std::string()));
  for (const std::string& line : changes(o)) print_line("  " + line);
}

// Losses that are no numbers end a run in its steps, unless too few are left to tell: a scale that is dynamic bears
// some, and the last step's weights are seen by the evaluation only.
int finished(const training::RunReport& report, dist::ProcessGroup& group) {
  if (report.finite) return kDone;
  dist::expect_end();
  if (group.rank() == 0) {
    // A run with nothing left knows no more of it.
    const double loss = report.metrics.contains("loss") ? static_cast<double>(report.metrics["loss"]) : NAN;
    complain(fmt::format(
        "train: expected a finite loss, got {} in the last evaluation, of epoch {}, step {}; last checkpoint: {}; a "
        "smaller --lr may help",
        std::isnan(loss) ? std::string("nan") : fmt::format("{}", loss), report.epochs, report.steps,
        report.checkpoint.empty() ? std::string("none was written") : shown_path(report.checkpoint)));
  }
  return kFailed;
}

// How many ranks there are and what each has of a step; empty for one.
std::string by_ranks(const TrainOptions& o) {
  const dist::ProcessGroup& group = o.config.group;
  if (group.size() == 1) return {};
  std::string ranks = fmt::format(" by {} ranks ({})", group.size(), group.library());
  if (o.evaluate) return ranks;
  const std::vector<std::int64_t> samples = training::samples_of_ranks(o.config);
  const auto [least, most] = std::minmax_element(samples.begin(), samples.end());
  return *least == *most ? fmt::format("{}, {} samples a rank", ranks, *least)
                         : fmt::format("{}, {} to {} samples a rank", ranks, *least, *most);
}

// What the number of ranks doesn't allow, in the words of the flags and before anything is said or written.
void check_ranks(const TrainOptions& o) {
  const training::TrainConfig& c = o.config;
  const int ranks = c.group.size();
  if (o.evaluate || ranks == 1) return;
  if (c.batch_size < ranks) {
    throw UsageError(
        fmt::format("--batch-size: expected at least the number of ranks, {}, got {}", ranks, c.batch_size));
  }
  if (c.reproducible > 0 && c.reproducible % ranks != 0) {
    throw UsageError(
        fmt::format("--reproducible: expected a number of shards that {} ranks divide, got {}", ranks, c.reproducible));
  }
}

int run(TrainOptions& o) {
  resolve(o);
  training::TrainConfig& c = o.config;
  catch_signals();
  join_ranks(o);
  std::optional<Place> place;
  const auto check_place = [&] {
    check_ranks(o);
    place.emplace(o);
    training::check_log(c.log_json, o.evaluate ? fs::path() : c.out, {c.resume, o.pretrained, o.config_file, c.data});
  };
  if (!prepared_on_all(c.group, check_place)) return kFailed;
  const bool terminal = is_terminal(STDOUT_FILENO) && !o.quiet;
  manual_seed(c.seed);
  if (!o.quiet) {
    print_line(fmt::format("{} {} on {}{}{}, {} with loss scale {}", o.evaluate ? "evaluating" : "training", c.model,
                           training::data_label(c.model, c.data),
                           c.device.is_cpu() ? "" : " (device " + c.device.str() + ")", by_ranks(o),
                           c.amp == "off" ? "float32" : training::amp_text(c), training::loss_scale_text(c)));
  }
  if (o.evaluate) return evaluate(o);
  training::RunData data;
  std::shared_ptr<training::Task> task;
  const auto prepare = [&] {
    data = training::load_data(c);
    if (g_stop) return;
    training::describe_data(c, data);
    task = training::make_task(c, data);
    if (o.pretrained.empty()) {
      training::prepare_quantization(c, *task);
    } else {
      load_pretrained(o, *task);
    }
    if (!g_stop) place->claim();
  };
  if (!prepared_on_all(c.group, prepare)) return kFailed;
  if (training::max_of(c.group, g_stop ? 1 : 0) != 0) {
    return interrupted(c.group, kStoppedEarly);
  }
  if (c.group.size() > 1 && !same_on_all(o)) return kFailed;
  Reporter reporter(o, terminal, task);
  training::TrainCallbacks callbacks = reporter.callbacks();
  bool began = false;
  callbacks.on_start = [&] {
    began = true;
    place->write_config();
    if (!c.resume.empty() && !o.quiet) print_resumed(o);
  };
  training::RunReport report;
  try {
    report = training::train(c, task, data.training, data.test, callbacks, &g_stop, place->folder());
  } catch (...) {
    reporter.bar().clear();
    if (!reporter.stepped()) place->start_failed();
    throw;
  }
  reporter.bar().clear();
  say_damaged(data);
  if (report.interrupted) {
    return interrupted(
        c.group,
        !began ? std::string(kStoppedEarly)
        : c.out.empty()
            ? fmt::format("interrupted after step {}; no checkpoint, since there is no --out", report.steps)
            : fmt::format("interrupted after step {}; resume with: {}", report.steps, command_to_resume(c.out)));
  }
  if (report.nothing_left) {
    if (c.group.rank() > 0) return finished(report, c.group);
    complain(report.epochs < c.epochs
                 ? fmt::format("{}: --patience {} has ended it after {} epochs; a larger one, or 0, continues",
                               shown_path(c.resume), c.patience, report.epochs)
                 : fmt::format("{}: all {} epochs are done{}", c.resume.empty() ? "train" : shown_path(c.resume),
                               report.epochs,
                               // A schedule that ends with them can't be longer.
                               training::recipe(c).contains("epochs") ? "" : "; a larger --epochs continues"));
    return finished(report, c.group);
  }
  if (!o.quiet) {
    if (report.out_of_patience && report.epochs < c.epochs) {
      print_line(fmt::format("no better {} in {} epoch{}: the run ends early, as --patience says", report.best_by,
                             c.patience, c.patience == 1 ? "" : "s"));
    }
    fmt::print(
        "{} epoch{} completed in {:.3f} hours ({:.1f} s): {}, {} steps skipped, peak memory {:.0f} MB{}\n",
        report.epochs, report.epochs == 1 ? "" : "s", report.seconds / 3600, report.seconds,
        result_text(report.best_by, report.best_value()), report.skipped, report.peak_rss_mb,
        report.device_peak_mb > 0 ? fmt::format(", {:.0f} MB on {}", report.device_peak_mb, c.device.str()) : "");
    print_fallbacks(report.fallbacks, c.device);
    if (!c.out.empty()) fmt::print("checkpoints and log in {}\n", shown_path(c.out));
  }
  return finished(report, c.group);
}

}  // namespace

void add_train(CLI::App& program, int& status) {
  const Verb verb = add_verb(program, "train", "Train a network");
  auto o = std::make_shared<TrainOptions>();
  add_train_options(verb, *o);
  verb.run([o, verb, &status] {
    read_config(verb, *o);
    status = run(*o);
  });
}

}  // namespace halfstep::cli
