// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/trainer.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <ctime>
#include <fstream>
#include <functional>

#include "cli/options.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "halfstep/core/random.h"
#include "halfstep/io/atomic_file.h"
#include "halfstep/runtime/log.h"

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;

struct Options : CommonOptions {
  train::TrainConfig config;
  std::string amp_dtype;
  bool quiet = false;
  bool no_out = false;
  std::function<void()> check_flags;  // which go together
};

// The effective configuration as text, beside the checkpoints.
std::string describe(const train::TrainConfig& c, const std::string& loss_scale) {
  return fmt::format(
      "model: {}\ndata: {}\nepochs: {}\nbatch-size: {}\nlr: {}\noptimizer: {}\nmomentum: {}\nweight-decay: {}\namp: "
      "{}\nloss-scale: {}\n"
      "accumulate: {}\nclip-norm: {}\nsave-every: {}\nseed: {}\ndevice: {}\nworkers: {}\nlimit: {}\n",
      c.model, c.data.empty() ? "built-in" : c.data.string(), c.epochs, c.batch_size, c.lr, c.optimizer, c.momentum,
      c.weight_decay, c.amp, loss_scale, c.accumulate, c.clip_norm, c.save_every, c.seed, c.device.str(), c.workers,
      c.limit);
}

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
  for (std::size_t i = 0; i < g_arguments.size(); ++i) {
    const std::string& argument = g_arguments[i];
    if (argument == "--resume") {
      ++i;
    } else if (!argument.starts_with("--resume=")) {
      command += " " + quoted(argument);
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

int run(Options& o) {
  train::TrainConfig& c = o.config;
  c.device = apply_common(o);
  c.model = o.model;
  if (!o.amp_dtype.empty()) {
    throw UsageError(
        "--amp-dtype: belongs to the levels O0 to auto, which are not there yet; use --amp f16 or --amp bf16");
  }
  as_usage([&] { train::check(c); });
  o.check_flags();
  if (!c.resume.empty() && !fs::exists(c.resume)) {
    throw UsageError(fmt::format("--resume: {} does not exist", c.resume.string()));
  }
  if (c.out.empty() && !o.no_out) {
    // A run that goes on writes where it wrote before.
    c.out = !c.resume.empty()
                ? (fs::is_directory(c.resume) ? c.resume : c.resume.parent_path())
                : fs::path("runs") / fmt::format("{}-{:%Y%m%d-%H%M%S}", c.model, fmt::localtime(std::time(nullptr)));
  }
  catch_signals();
  if (!c.out.empty()) make_folder(c.out);
  const bool terminal = is_terminal(STDOUT_FILENO) && !o.quiet;
  manual_seed(c.seed);
  if (!o.quiet) {
    fmt::print("training {} on {}{}, {} with loss scale {}\n", c.model,
               c.data.empty() ? std::string("the built-in digits") : c.data.string(),
               c.device.is_cpu() ? "" : " (device " + c.device.str() + ")", c.amp == "off" ? "float32" : c.amp,
               scale_text(train::scaler_options(c)));
    std::fflush(stdout);
  }
  auto training = make_dataset(load_pictures(c.data, data::Split::kTrain, c.seed, c.limit));
  auto test = make_dataset(load_pictures(c.data, data::Split::kTest, c.seed));
  std::shared_ptr<const void> holder;
  const train::Classifier classifier = train::make_classifier(c.model, holder);
  if (!c.out.empty()) {
    if (c.log_json.empty()) c.log_json = c.out / "log.jsonl";
    io::AtomicFile file(c.out / "config.yaml");
    const std::string text = describe(c, scale_text(train::scaler_options(c)));
    file.write(text.data(), text.size());
    file.commit();
  }
  ProgressBar bar(terminal);
  train::StepReport last{};
  train::TrainCallbacks callbacks;
  callbacks.on_step = [&](const train::StepReport& r) {
    last = r;
    if (terminal) {
      bar.update(fmt::format("epoch {}/{}", r.epoch, c.epochs), r.step_in_epoch, r.steps_in_epoch,
                 fmt::format("loss {:.4f}  {:.0f}/s{}", r.mean_loss, r.samples_per_s,
                             r.scale == 1 ? std::string() : fmt::format("  scale {}  skipped {}", r.scale, r.skipped)));
    }
  };
  callbacks.on_eval = [&](const train::EvalReport& r) {
    bar.clear();
    if (o.quiet) return;
    fmt::print("epoch {}/{}: loss {:.4f}, test loss {:.4f}, top1 {:.2f}%, top5 {:.2f}%, {:.0f} samples/s{}\n", r.epoch,
               c.epochs, last.mean_loss, std::isnan(r.loss) ? std::fabs(r.loss) : r.loss, 100 * r.top1, 100 * r.top5,
               last.samples_per_s,
               last.scale == 1 ? std::string() : fmt::format(", scale {}, skipped {}", last.scale, last.skipped));
    std::fflush(stdout);
  };
  callbacks.on_debug = [&](const std::string& text) {
    bar.clear();
    if (o.quiet) return;
    fmt::print("{}", text);
    std::fflush(stdout);
  };
  train::RunReport report;
  try {
    report = train::train(c, classifier, training, test, callbacks, &g_stop);
  } catch (...) {
    bar.clear();
    throw;
  }
  bar.clear();
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
  auto o = std::make_shared<Options>();
  train::TrainConfig& c = o->config;
  add_common(*verb, *o);
  add_path(*verb, "DIR,--data", c.data, "Folder with the data set in MNIST's format (default: built-in digits)");
  add_whole(*verb, "--epochs", c.epochs, 1, kMostCount, "Passes over the training data");
  add_whole(*verb, "--batch-size", c.batch_size, 1, kMostCount, "Samples of a batch");
  add_real(*verb, "--lr", c.lr, "Learning rate");
  add_word(*verb, "--optimizer", c.optimizer, "sgd, adam or adamw");
  add_real(*verb, "--momentum", c.momentum, "Momentum of sgd");
  add_real(*verb, "--weight-decay", c.weight_decay, "Weight decay");
  add_word(*verb, "--amp", c.amp, "Mixed precision: off, bf16 or f16");
  add_word(*verb, "--amp-dtype", o->amp_dtype, "Dtype of a level O0 to auto: f16 or bf16");
  add_word(*verb, "--loss-scale", c.loss_scale,
           "none, N, fixed:N, dynamic[:INIT[,GROWTH,BACKOFF,INTERVAL]] or mindspore:INIT,FACTOR,WINDOW "
           "(default: dynamic for f16, none otherwise)");
  add_whole(*verb, "--accumulate", c.accumulate, 1, kMostCount, "Batches whose gradients make one step");
  add_real(*verb, "--clip-norm", c.clip_norm, "Largest norm of all gradients together; 0: no clipping");
  add_whole(*verb, "--save-every", c.save_every, 0, kMostCount, "Steps between checkpoints; 0: one an epoch");
  add_path(*verb, "--resume", c.resume, "Checkpoint, or the folder of a run, to go on from");
  add_path(*verb, "--out", c.out, "Folder for checkpoints and log (default: runs/MODEL-TIME)");
  verb->add_flag("--no-out", o->no_out, "Write no checkpoints");
  add_whole(*verb, "--seed", c.seed, 0, kMostSeed, "Seed of weights, order and built-in data");
  add_whole(*verb, "--workers", c.workers, 0, 256, "Threads that load data");
  add_whole(*verb, "--limit", c.limit, 0, kMostCount, "At most so many training samples; 0: all");
  add_path(*verb, "--log-json", c.log_json, "File for one JSON object a step (default: log.jsonl in --out)");
  train::DebugConfig& d = c.debug;
  add_path(*verb, "--debug-dump", d.dump, "Folder for inputs and results of every op call of --debug-steps");
  add_word(*verb, "--debug-level", d.level,
           "Detail of the dump: statistics, first (values too) or whole (tensors too)");
  add_choice(
      *verb, "--debug-compare", d.compare, "f64",
      "Run every op of --debug-steps again on the CPU in f64 (or f32) and report the worst errors; twin: run the "
      "first of these steps in float32 too and name the op that departs");
  add_choice(*verb, "--debug-nonfinite", d.nonfinite, "log",
             "Find ops that make infinities or NaNs out of finite inputs, and log them or raise an error");
  add_word(*verb, "--debug-steps", d.steps, "Steps to dump and compare: N, FIRST-LAST, FIRST- or all");
  add_path(*verb, "--profile", d.profile,
           "Folder for a profile of --profile-steps: profile.txt, and trace.json for "
           "chrome://tracing");
  add_word(*verb, "--profile-steps", d.profile_steps, "Steps to profile: N, FIRST-LAST, FIRST- or all");
  verb->add_flag("--quiet,-q", o->quiet, "Print errors only");
  // A flag that does nothing was meant to do something.
  o->check_flags = [verb, &d] {
    const auto belongs = [&](const char* flag, const char* to, bool there) {
      if (verb->count(flag) > 0 && !there)
        throw UsageError(fmt::format("{}: belongs to {}, which is not given", flag, to));
    };
    belongs("--debug-level", "--debug-dump", !d.dump.empty());
    belongs("--debug-steps", "--debug-dump or --debug-compare", !d.dump.empty() || !d.compare.empty());
    belongs("--profile-steps", "--profile", !d.profile.empty());
  };
  verb->callback([o, &status] { status = run(*o); });
}

}  // namespace halfstep::cli
