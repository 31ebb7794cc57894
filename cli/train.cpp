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

#include "cli/progress.h"
#include "cli/terminal.h"
#include "cli/train_options.h"
#include "cli/verbs.h"
#include "halfstep/core/random.h"
#include "halfstep/io/atomic_file.h"
#include "halfstep/io/weights.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/json_log.h"
#include "halfstep/train/networks.h"

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kDigitClasses = 10;

std::string scale_text(const amp::GradScalerOptions& o) {
  if (!o.enabled) return "none";
  if (!o.dynamic) return fmt::format("fixed:{}", o.init_scale);
  return fmt::format("dynamic:{},{},{},{}", o.init_scale, o.growth_factor, o.backoff_factor, o.growth_interval);
}

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
  // Where the run began is in the checkpoint now.
  const std::string_view begun[] = {"--resume", "--pretrained", "--start-epoch"};
  for (std::size_t i = 0; i < g_arguments.size(); ++i) {
    const std::string& argument = g_arguments[i];
    const std::string_view flag = std::string_view(argument).substr(0, argument.find('='));
    if (std::find(std::begin(begun), std::end(begun), flag) == std::end(begun)) {
      command += " " + quoted(argument);
    } else if (flag == argument) {
      ++i;
    }
  }
  return command + " --resume " + quoted(out.string());
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

// Training and test part, and how many of their pictures could not be read.
struct Data {
  std::shared_ptr<const data::Dataset> training, test;
  std::vector<std::string> classes;  // names; none for digits
  std::vector<std::function<std::int64_t()>> damaged = {};
};

Data load_data(const TrainOptions& o) {
  const train::TrainConfig& c = o.config;
  if (!train::network_input(c.model).images) {
    const auto training =
        o.evaluate ? nullptr : make_dataset(load_pictures(c.data, data::Split::kTrain, c.seed, c.limit));
    return {
        .training = training, .test = make_dataset(load_pictures(c.data, data::Split::kTest, c.seed)), .classes = {}};
  }
  Data data;
  if (!o.evaluate) {
    const train::LoadedImages training = train::load_images(o.images, c.model, data::Split::kTrain);
    data = {.training = training.dataset, .test = nullptr, .classes = training.classes, .damaged = {training.damaged}};
  }
  const train::LoadedImages test = train::load_images(o.images, c.model, data::Split::kTest);
  data.test = test.dataset;
  data.damaged.push_back(test.damaged);
  if (o.evaluate) data.classes = test.classes;
  // Labels are places among the names: other names would be other labels.
  if (data.classes != test.classes) {
    const auto& a = data.classes;
    const auto& b = test.classes;
    const auto [x, y] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
    throw IoError(
        fmt::format("{}: expected the same classes in the training and the test part, got {} and {}; the first that "
                    "differs: {} and "
                    "{}",
                    c.data.string(), a.size(), b.size(), x == a.end() ? "none" : *x, y == b.end() ? "none" : *y));
  }
  return data;
}

void say_damaged(const Data& data) {
  std::int64_t count = 0;
  for (const auto& d : data.damaged) count += d();
  if (count > 0) {
    complain(
        fmt::format("{} picture{} could not be read, and another one stood in for each", count, count == 1 ? "" : "s"));
  }
}

// Values of a file for a network to begin with.
void load_pretrained(const TrainOptions& o, const train::Classifier& classifier) {
  const train::SavedWeights saved = train::load_saved_weights(o.pretrained, o.model);
  const std::string file = o.pretrained.string();
  try {
    const io::PretrainedReport report = io::load_pretrained(*classifier.module, saved.tensors);
    if (o.quiet) return;
    fmt::print("{}: {} tensors loaded\n", file, report.loaded.size());
  } catch (const Error& e) {
    throw IoError(fmt::format("{}: no weights of {}: {}", file, o.model, e.what()));
  }
}

void print_line(const std::string& line) {
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

bool due(std::int64_t place, std::int64_t all, std::int64_t every) {
  return every > 0 && ((place - 1) % every == 0 || place == all);
}

// `--evaluate`: the test part once, as after an epoch.
int evaluate(const TrainOptions& o, const Data& data) {
  const train::TrainConfig& c = o.config;
  const fs::path& weights = c.resume.empty() ? o.pretrained : c.resume;
  const Loaded loaded = load_classifier(c.model, weights);
  check_classes(loaded, data.classes, weights, c.data);
  loaded.classifier.module->to(c.device);
  const train::AmpMode mode = train::amp_mode(c);
  if (mode.level != amp::Level::O0) {
    amp::set_level(*loaded.classifier.module, mode.level, mode.level_dtype);
  }
  train::EvalOptions options{.dtype = mode.region,
                             .batch_size = c.eval_batch_size,
                             .workers = std::max(c.workers, 1),
                             .prefetch = c.prefetch,
                             .stop = &g_stop};
  options.on_batch = [&](const train::EvalProgress& p) {
    if (!o.quiet && due(p.batch, p.batches, o.print_freq)) print_line(eval_line(p));
  };
  const train::EvalReport report = train::evaluate(loaded.classifier, data.test, options);
  if (report.interrupted) {
    complain("interrupted in the evaluation");
    return 128 + g_signal.load();
  }
  print_line(accuracy_line(report));
  if (!c.log_json.empty()) {
    train::JsonLog(c.log_json).write("eval", {{"loss", report.loss}, {"top1", report.top1}, {"top5", report.top5}});
  }
  say_damaged(data);
  return kDone;
}

// What the run tells while it goes on.
class Reporter {
 public:
  Reporter(const TrainOptions& o, bool terminal, bool images)
      : options_(o), terminal_(terminal), images_(images), bar_(terminal) {}

  train::TrainCallbacks callbacks() {
    train::TrainCallbacks result;
    result.on_step = [this](const train::StepReport& r) { step(r); };
    result.on_eval = [this](const train::EvalReport& r) { eval(r); };
    result.on_eval_batch = [this](const train::EvalProgress& p) { eval_batch(p); };
    result.on_debug = [this](const std::string& text) {
      bar_.clear();
      if (options_.quiet) return;
      fmt::print("{}", text);
      std::fflush(stdout);
    };
    return result;
  }
  ProgressBar& bar() { return bar_; }

 private:
  void step(const train::StepReport& r) {
    last_ = r;
    if (!options_.quiet && due(r.step_in_epoch, r.steps_in_epoch, options_.print_freq)) {
      bar_.clear();
      print_line(step_line(r));
    }
    if (!terminal_) return;
    bar_.update(fmt::format("epoch {}/{}", r.epoch, options_.config.epochs), r.step_in_epoch, r.steps_in_epoch,
                fmt::format("loss {:.4f}  {:.0f}/s{}", r.mean_loss, r.samples_per_s,
                            r.scale == 1 ? std::string() : fmt::format("  scale {}  skipped {}", r.scale, r.skipped)));
  }

  void eval_batch(const train::EvalProgress& p) {
    if (options_.quiet || !due(p.batch, p.batches, options_.print_freq)) return;
    bar_.clear();
    print_line(eval_line(p));
  }

  void eval(const train::EvalReport& r) {
    bar_.clear();
    if (options_.quiet) return;
    if (images_) print_line(accuracy_line(r));
    print_line(fmt::format(
        "epoch {}/{}: loss {:.4f}, test loss {:.4f}, top1 {:.2f}%, top5 {:.2f}%, {:.0f} samples/s{}", r.epoch,
        options_.config.epochs, last_.mean_loss, std::isnan(r.loss) ? std::fabs(r.loss) : r.loss, 100 * r.top1,
        100 * r.top5, last_.samples_per_s,
        last_.scale == 1 ? std::string() : fmt::format(", scale {}, skipped {}", last_.scale, last_.skipped)));
  }

  const TrainOptions& options_;
  bool terminal_, images_;
  ProgressBar bar_;
  train::StepReport last_{};
};

int run(TrainOptions& o) {
  resolve(o);
  train::TrainConfig& c = o.config;
  const bool images = train::network_input(c.model).images;
  if (c.out.empty() && !o.no_out && !o.evaluate) {
    // A run that goes on writes where it wrote before.
    c.out = !c.resume.empty()
                ? (fs::is_directory(c.resume) ? c.resume : c.resume.parent_path())
                : fs::path("runs") / fmt::format("{}-{:%Y%m%d-%H%M%S}", c.model, fmt::localtime(std::time(nullptr)));
  }
  catch_signals();
  if (!c.out.empty() && !o.evaluate) make_folder(c.out);
  const bool terminal = is_terminal(STDOUT_FILENO) && !o.quiet;
  manual_seed(c.seed);
  if (!o.quiet) {
    print_line(fmt::format("{} {} on {}{}, {} with loss scale {}", o.evaluate ? "evaluating" : "training", c.model,
                           c.data.empty() ? std::string("the built-in digits") : c.data.string(),
                           c.device.is_cpu() ? "" : " (device " + c.device.str() + ")",
                           c.amp == "off" ? "float32" : train::amp_text(c), scale_text(train::scaler_options(c))));
  }
  const Data data = load_data(o);
  if (o.evaluate) return evaluate(o, data);
  c.classes = data.classes;
  c.num_classes = images ? static_cast<std::int64_t>(data.classes.size()) : kDigitClasses;
  std::shared_ptr<const void> holder;
  const train::Classifier classifier =
      train::make_classifier(c.model, holder, {.classes = c.num_classes, .zero_init_residual = o.zero_init_residual});
  if (!o.pretrained.empty()) load_pretrained(o, classifier);
  if (!c.out.empty()) {
    if (c.log_json.empty()) c.log_json = c.out / "log.jsonl";
    io::AtomicFile file(c.out / "config.yaml");
    const std::string text = describe(o, scale_text(train::scaler_options(c)));
    file.write(text.data(), text.size());
    file.commit();
  }
  Reporter reporter(o, terminal, images);
  train::RunReport report;
  try {
    report = train::train(c, classifier, data.training, data.test, reporter.callbacks(), &g_stop);
  } catch (...) {
    reporter.bar().clear();
    throw;
  }
  reporter.bar().clear();
  say_damaged(data);
  if (report.interrupted) {
    complain(c.out.empty()
                 ? fmt::format("interrupted after step {}; no checkpoint, since there is no --out", report.steps)
                 : fmt::format("interrupted after step {}; go on with: {}", report.steps, command_to_resume(c.out)));
    return 128 + g_signal.load();
  }
  if (report.nothing_left) {
    complain(fmt::format("{}: all {} epochs are done; a larger --epochs goes on", c.resume.string(), report.epochs));
    return kDone;
  }
  if (!o.quiet) {
    fmt::print(
        "{} epoch{} completed in {:.3f} hours ({:.1f} s): top1 {:.2f}%, {} steps skipped, peak memory {:.0f} MB\n",
        report.epochs, report.epochs == 1 ? "" : "s", report.seconds / 3600, report.seconds, 100 * report.top1,
        report.skipped, report.peak_rss_mb);
    print_fallbacks(report.fallbacks, c.device);
    if (!c.out.empty()) fmt::print("checkpoints and log in {}\n", c.out.string());
  }
  return kDone;
}

}  // namespace

void add_train(CLI::App& program, int& status) {
  auto* verb = program.add_subcommand("train", "Train a network");
  auto o = std::make_shared<TrainOptions>();
  add_train_options(*verb, *o);
  verb->callback([o, verb, &status] {
    read_config(*verb, *o);
    status = run(*o);
  });
}

}  // namespace halfstep::cli
