// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/trainer.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <ctime>
#include <fstream>

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
};

// The effective configuration as text, beside the checkpoints.
std::string describe(const train::TrainConfig& c, const std::string& loss_scale) {
  return fmt::format(
      "model: {}\ndata: {}\nepochs: {}\nbatch-size: {}\nlr: {}\noptimizer: {}\nmomentum: {}\nweight-decay: {}\namp: "
      "{}\nloss-scale: {}\n"
      "accumulate: {}\nclip-norm: {}\nsave-every: {}\nseed: {}\nworkers: {}\nlimit: {}\n",
      c.model, c.data.empty() ? "built-in" : c.data.string(), c.epochs, c.batch_size, c.lr, c.optimizer, c.momentum,
      c.weight_decay, c.amp, loss_scale, c.accumulate, c.clip_norm, c.save_every, c.seed, c.workers, c.limit);
}

std::string scale_text(const amp::GradScalerOptions& o) {
  if (!o.enabled) return "none";
  if (!o.dynamic) return fmt::format("fixed:{}", o.init_scale);
  return fmt::format("dynamic:{},{},{},{}", o.init_scale, o.growth_factor, o.backoff_factor, o.growth_interval);
}

int run(Options& o) {
  train::TrainConfig& c = o.config;
  apply_common(o);
  c.model = o.model;
  if (!o.amp_dtype.empty()) {
    throw UsageError(
        "--amp-dtype: belongs to the levels O0 to auto, which are not there yet; use --amp f16 or --amp bf16");
  }
  as_usage([&] { train::check(c); });
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
  const bool terminal = is_terminal(STDOUT_FILENO) && !o.quiet;
  manual_seed(c.seed);
  if (!o.quiet) {
    fmt::print("training {} on {}, {} with loss scale {}\n", c.model,
               c.data.empty() ? std::string("the built-in digits") : c.data.string(),
               c.amp == "off" ? "float32" : c.amp, scale_text(train::scaler_options(c)));
    std::fflush(stdout);
  }
  auto training = make_dataset(load_pictures(c.data, data::Split::kTrain, c.seed, c.limit));
  auto test = make_dataset(load_pictures(c.data, data::Split::kTest, c.seed));
  std::shared_ptr<const void> holder;
  const train::Classifier classifier = train::make_classifier(c.model, holder);
  if (!c.out.empty()) {
    fs::create_directories(c.out);
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
      bar.update(
          fmt::format("epoch {}/{}", r.epoch, c.epochs), r.step_in_epoch, r.steps_in_epoch,
          fmt::format("loss {:.4f}  {:.0f}/s{}", r.mean_loss, r.samples_per_s,
                      r.scale == 1 ? std::string() : fmt::format("  scale {:g}  skipped {}", r.scale, r.skipped)));
    }
  };
  callbacks.on_eval = [&](const train::EvalReport& r) {
    bar.clear();
    if (o.quiet) return;
    fmt::print("epoch {}/{}: loss {:.4f}, test loss {:.4f}, top1 {:.2f}%, top5 {:.2f}%, {:.0f} samples/s{}\n", r.epoch,
               c.epochs, last.mean_loss, r.loss, 100 * r.top1, 100 * r.top5, last.samples_per_s,
               last.scale == 1 ? std::string() : fmt::format(", scale {:g}, skipped {}", last.scale, last.skipped));
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
                 : fmt::format("interrupted after step {}; go on with: halfstep train {} --resume {}{}", report.steps,
                               c.model, c.out.string(), " and the same flags"));
    return 128 + g_signal.load();
  }
  if (!o.quiet) {
    fmt::print(
        "{} epoch{} completed in {:.3f} hours ({:.1f} s): top1 {:.2f}%, {} steps skipped, peak memory {:.0f} MB\n",
        report.epochs, report.epochs == 1 ? "" : "s", report.seconds / 3600, report.seconds, 100 * report.top1,
        report.skipped, report.peak_rss_mb);
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
  verb->add_option("DIR,--data", c.data, "Folder with the data set in MNIST's format (default: built-in digits)");
  verb->add_option("--epochs", c.epochs, "Passes over the training data")->capture_default_str();
  verb->add_option("--batch-size", c.batch_size, "Samples of a batch")->capture_default_str();
  verb->add_option("--lr", c.lr, "Learning rate")->capture_default_str();
  verb->add_option("--optimizer", c.optimizer, "sgd, adam or adamw")->capture_default_str();
  verb->add_option("--momentum", c.momentum, "Momentum of sgd")->capture_default_str();
  verb->add_option("--weight-decay", c.weight_decay, "Weight decay")->capture_default_str();
  verb->add_option("--amp", c.amp, "Mixed precision: off, bf16 or f16")->capture_default_str();
  verb->add_option("--amp-dtype", o->amp_dtype, "Dtype of a level O0 to auto: f16 or bf16");
  verb->add_option("--loss-scale", c.loss_scale,
                   "none, N, fixed:N, dynamic[:INIT[,GROWTH,BACKOFF,INTERVAL]] or mindspore:INIT,FACTOR,WINDOW "
                   "(default: dynamic for "
                   "f16, none otherwise)");
  verb->add_option("--accumulate", c.accumulate, "Batches whose gradients make one step")->capture_default_str();
  verb->add_option("--clip-norm", c.clip_norm, "Largest norm of all gradients together; 0: no clipping")
      ->capture_default_str();
  verb->add_option("--save-every", c.save_every, "Steps between checkpoints (default: one an epoch)");
  verb->add_option("--resume", c.resume, "Checkpoint, or the folder of a run, to go on from");
  verb->add_option("--out", c.out, "Folder for checkpoints and log (default: runs/MODEL-TIME)");
  verb->add_flag("--no-out", o->no_out, "Write no checkpoints");
  verb->add_option("--seed", c.seed, "Seed of weights, order and built-in data")->capture_default_str();
  verb->add_option("--workers", c.workers, "Threads that load data")->capture_default_str();
  verb->add_option("--limit", c.limit, "At most so many training samples; 0: all");
  verb->add_option("--log-json", c.log_json, "File for one JSON object a step (default: log.jsonl in --out)");
  verb->add_flag("--quiet,-q", o->quiet, "Print errors only");
  verb->callback([o, &status] { status = run(*o); });
}

}  // namespace halfstep::cli
