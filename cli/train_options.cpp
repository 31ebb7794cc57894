// SPDX-License-Identifier: Apache-2.0
#include "cli/train_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "cli/config_file.h"
#include "cli/suggest.h"
#include "halfstep/core/text.h"
#include "halfstep/runtime/parallel.h"
#include "halfstep/train/networks.h"
#include "halfstep/train/run_folder.h"

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kNoDownload =
    "--pretrained: expected a file with weights, .pth or .safetensors: nothing is downloaded. Where there is a "
    "network, "
    "`python3 -c \"import torchvision; torchvision.models.resnet50(weights='IMAGENET1K_V1')\"` leaves one in "
    "~/.cache/torch/hub/checkpoints";

void add_debug_flags(CLI::App& verb, training::DebugConfig& d) {
  add_path(verb, "--debug-dump", d.dump, "Folder for inputs and results of every op call of --debug-steps");
  add_word(verb, "--debug-level", d.level, "Detail of the dump: statistics, first (values too) or whole (tensors too)");
  add_choice(
      verb, "--debug-compare", d.compare, "f64",
      "Run every op of --debug-steps again on the CPU in f64 (or f32) and report the worst errors; twin: run the "
      "first of these steps in float32 too and name the op that departs");
  add_choice(verb, "--debug-nonfinite", d.nonfinite, "log",
             "Find ops that make infinities or NaNs out of finite inputs, and log them or raise an error");
  add_word(verb, "--debug-steps", d.steps, "Steps to dump and compare: N, FIRST-LAST, FIRST- or all");
  add_path(verb, "--profile", d.profile,
           "Folder for a profile of --profile-steps: profile.txt, and trace.json for "
           "chrome://tracing");
  add_word(verb, "--profile-steps", d.profile_steps, "Steps to profile: N, FIRST-LAST, FIRST- or all");
}

// `train resnet50 DIR` and `train --arch resnet50 DIR` are the same.
void name_model(TrainOptions& o) {
  if (!o.arch.empty()) {
    if (!o.model.empty() && o.model != o.arch) {
      if (!o.config.data.empty()) {
        throw UsageError(fmt::format("--arch: {} is the network, so '{}' would be a second folder with data beside {}",
                                     o.arch, o.model, shown_path(o.config.data)));
      }
      o.config.data = o.model;
    }
    o.model = o.arch;
  }
  if (o.model.empty() && !o.config.resume.empty() && !o.run) {
    throw UsageError(
        fmt::format("train: MODEL is required: {} has no config.yaml that names it", shown_path(o.config.resume)));
  }
  if (o.model.empty()) throw UsageError("train: MODEL is required; see `halfstep train --help`");
  const auto names = training::network_names();
  if (std::find(names.begin(), names.end(), o.model) == names.end() && fs::is_directory(o.model)) {
    throw UsageError(fmt::format(
        "MODEL: expected a network, got the folder '{0}'; name the network before it: halfstep train resnet50 {0}",
        o.model));
  }
}

// What the network is customarily trained with, where no flag says something else.
void fill_in(TrainOptions& o) {
  training::TrainConfig& c = o.config;
  const bool adam = c.optimizer != "sgd";
  const training::TrainConfig d =
      training::default_config(o.model, o.count("--batch-size") > 0 ? c.batch_size : 0, c.device);
  const training::TrainConfig plain;
  c.model = o.model;
  c.batch_size = d.batch_size;
  c.eval_batch_size = d.eval_batch_size;
  c.prefetch = d.prefetch;
  if (o.count("--epochs") == 0) c.epochs = d.epochs;
  // Rates, decay and momentum of SGD's recipes are none of Adam's.
  if (o.count("--lr") == 0) c.lr = adam && d.lr != plain.lr ? 1e-3 : d.lr;
  if (o.count("--momentum") == 0 && !adam) c.momentum = d.momentum;
  if (o.count("--weight-decay") == 0 && !adam) c.weight_decay = d.weight_decay;
  // A warm-up says that the schedule is the user's; onecycle has no room for it.
  if (o.count("--lr-schedule") == 0) {
    c.lr_schedule = c.warmup_epochs > 0 && d.lr_schedule.starts_with("onecycle") ? "cosine" : d.lr_schedule;
  }
  const training::NetworkInput input = training::network_input(o.model);
  if (o.print_freq < 0) o.print_freq = input.images ? 10 : 0;
  training::ImageDataOptions& i = o.images;
  i.folder = c.data;
  i.limit = c.limit;
  const training::ImageDataOptions usual =
      training::default_images(o.model, o.count("--image-size") > 0 ? i.image_size : 0);
  i.image_size = usual.image_size;
  if (o.count("--resize") == 0) i.resize = usual.resize;
  if (o.count("--crop") == 0) i.crop = usual.crop;
  if (input.images) c.data_flags = training::data_flags(i);
}

// A flag that does nothing was meant to do something.
void check_flags(const TrainOptions& o) {
  const auto belongs = [&](const char* flag, const char* to, bool there) {
    if (o.count(flag) > 0 && !there) {
      throw UsageError(fmt::format("{}: belongs to {}, which is not given", flag, to));
    }
  };
  const training::TrainConfig& c = o.config;
  const training::DebugConfig& d = c.debug;
  belongs("--debug-level", "--debug-dump", !d.dump.empty());
  belongs("--debug-steps", "--debug-dump or --debug-compare", !d.dump.empty() || !d.compare.empty());
  belongs("--profile-steps", "--profile", !d.profile.empty());
  belongs("--overwrite", "--out", !c.overwrite || o.count("--out") > 0);
  if (c.overwrite && training::is_run_in(c.resume, c.out)) {
    throw UsageError(fmt::format("--overwrite: --resume goes on with the run in {}, which is not to be replaced then",
                                 shown_path(c.out)));
  }
  if (c.tensorboard && (o.no_out || o.evaluate)) {
    throw UsageError(fmt::format("--tensorboard: it writes into the folder of a run, and {} has none",
                                 o.no_out ? "--no-out" : "--evaluate"));
  }
  belongs("--no-norm-decay", "--weight-decay", c.weight_decay > 0);
  if (!training::network_input(o.model).images) {
    for (const char* flag : {"--image-size", "--resize", "--crop", "--min-area", "--color-jitter", "--max-damaged",
                             "--zero-init-residual"}) {
      if (o.count(flag) > 0) throw UsageError(fmt::format("{}: {} is no network of images", flag, o.model));
    }
  }
  if (o.pretrained_given) {
    if (o.pretrained.empty()) throw UsageError(kNoDownload);
    if (!c.resume.empty()) {
      throw UsageError("--pretrained: --resume is given too, and its checkpoint has all the weights");
    }
    // As those scripts have it, the flag stood alone before the folder with the data.
    if (fs::is_directory(o.pretrained) && c.data.empty() && !fs::exists(o.pretrained / "last.safetensors") &&
        !fs::exists(o.pretrained / "best.safetensors")) {
      throw UsageError(fmt::format("{}; got the folder {}", kNoDownload, shown_path(o.pretrained)));
    }
    if (!fs::exists(o.pretrained)) {
      throw UsageError(fmt::format("--pretrained: {} does not exist", shown_path(o.pretrained)));
    }
  }
  const std::string extension = c.resume.extension().string();
  if (!o.evaluate && (extension == ".pth" || extension == ".pt" || extension == ".tar")) {
    throw UsageError(
        fmt::format("--resume: expected a checkpoint of this program, got {}; --pretrained takes the weights of a "
                    "PyTorch file",
                    shown_path(c.resume)));
  }
  if (o.evaluate && c.resume.empty() && o.pretrained.empty()) {
    throw UsageError("--evaluate: expected the weights to evaluate, by --resume or --pretrained");
  }
}

// A path as part of a comment.
std::string one_line(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7F; }, '?');
  return text;
}

}  // namespace

void add_train_options(CLI::App& verb, TrainOptions& o) {
  training::TrainConfig& c = o.config;
  add_common(verb, o, false);
  add_path(verb, "--config", o.config_file,
           "YAML file with flags, as `lr: 0.1`; those given here win. config.yaml of a run is one");
  add_word(verb, "--arch,-a", o.arch, "The same as MODEL, as ImageNet scripts have it")->type_name("MODEL");
  add_path(verb, "DIR,--data", c.data,
           "Folder with the data set: MNIST's format for mlp (default: built-in digits), else train and val with class "
           "folders, list files or archives");
  add_whole(verb, "--epochs,--epoch", c.epochs, 1, kMostCount, "Passes over the training data")->type_name("N");
  add_whole(verb, "--batch-size,-b", c.batch_size, 1, kMostCount, "Samples of a batch")->type_name("N");
  add_real(verb, "--lr,--learning-rate", c.lr, "Learning rate, the highest of the run")->type_name("X");
  add_word(verb, "--lr-schedule", c.lr_schedule,
           "constant, step[:EPOCHS[,FACTOR]], cosine or onecycle[:PART that rises]")
      ->type_name("TEXT");
  add_real(verb, "--warmup-epochs", c.warmup_epochs, "Epochs of a linear rise to the learning rate");
  add_word(verb, "--optimizer", c.optimizer, "sgd, adam or adamw");
  add_real(verb, "--momentum", c.momentum, "Momentum of sgd")->type_name("X");
  verb.add_flag("--nesterov", c.nesterov, "Nesterov's momentum");
  add_real(verb, "--weight-decay,--wd", c.weight_decay, "Weight decay")->type_name("X");
  verb.add_flag("--no-norm-decay", o.no_norm_decay, "No weight decay of biases and of normalisation's weights");
  add_real(verb, "--label-smoothing", c.label_smoothing, "Share of each target that is spread over all classes");
  add_real(verb, "--mixup", c.mixup, "Mix pairs of samples; alpha of the beta distribution, such as 0.2; 0: off");
  add_word(verb, "--amp", c.amp, "Mixed precision: off, bf16, f16, or a level O0, O1, O2, O3 or auto");
  verb.add_flag("--pyamp", o.pyamp, "The same as --amp f16");
  add_word(verb, "--amp-dtype", c.amp_dtype, "Dtype of a level: f16 (default) or bf16");
  add_word(verb, "--loss-scale", c.loss_scale,
           training::loss_scale_forms() + " (default: dynamic for f16, none otherwise)");
  add_whole(verb, "--accumulate", c.accumulate, 1, kMostCount, "Batches whose gradients make one step");
  add_real(verb, "--clip-norm", c.clip_norm, "Largest norm of all gradients together; 0: no clipping");
  verb.add_flag("--no-capture", o.no_capture, "Run every step by itself instead of replaying captured ones");
  auto* pretrained = verb.add_option_function<std::string>(
      "--pretrained",
      [&o](const std::string& text) {
        o.pretrained_given = true;
        o.pretrained = text;
      },
      "Weights to begin with, .pth or .safetensors; a last layer of another size begins anew");
  pretrained->expected(0, 1)->type_name("FILE");
  verb.add_flag("--zero-init-residual", o.zero_init_residual,
                "Begin with the last weight of normalisation in each residual block as 0");
  add_whole(verb, "--image-size", o.images.image_size, 1, 1 << 14, "Pixels of a side that the network sees")
      ->type_name("N");
  add_whole(verb, "--resize", o.images.resize, 0, 1 << 14,
            "Pixels of the shorter side before the middle is cut out, in evaluation; 0: the whole picture")
      ->type_name("N");
  add_word(verb, "--crop", o.images.crop, "Training pictures: random-resized, padded (4 pixels) or none")
      ->type_name("TEXT");
  add_real(verb, "--min-area", o.images.min_area, "Smallest share of the picture that random-resized takes");
  add_real(verb, "--color-jitter", o.images.color_jitter, "Random change of brightness, contrast and saturation");
  add_whole(verb, "--max-damaged", o.images.max_damaged, 0, kMostCount,
            "Pictures that may be damaged before the run ends");
  add_whole(verb, "--save-every", c.save_every, 0, kMostCount, "Steps between checkpoints; 0: one an epoch");
  add_read_limits(verb);
  add_path(verb, "--resume", c.resume,
           "Checkpoint, or the folder of a run, to go on from; the run's config.yaml says what isn't given here");
  verb.add_flag("--evaluate,-e", o.evaluate, "Evaluate the weights of --resume or --pretrained, and train nothing");
  add_whole(verb, "--start-epoch", c.start_epoch, 0, kMostCount, "Epoch, from 0, to begin with");
  add_path(verb, "--out", c.out, "Folder for checkpoints and log (default: runs/MODEL-TIME)");
  verb.add_flag("--overwrite", c.overwrite, "Replace the run that is in --out; other files there stay");
  verb.add_flag("--no-out", o.no_out, "Write no checkpoints");
  add_whole(verb, "--print-freq,-p", o.print_freq, 0, kMostCount,
            "Steps between two lines; 0: none (default: 10 for networks of images)");
  add_whole(verb, "--seed", c.seed, 0, kMostSeed, "Seed of weights, order, augmentation and built-in data");
  add_whole(verb, "--workers,-j", c.workers, 0, 256, "Threads that load data");
  add_whole(verb, "--limit", c.limit, 0, kMostCount, "At most so many training samples; 0: all");
  add_path(verb, "--log-json", c.log_json, "File for one JSON object a step (default: log.jsonl in --out)");
  add_debug_flags(verb, c.debug);
  verb.add_flag("--tensorboard", c.tensorboard, "Write curves for TensorBoard into the folder of the run");
  verb.add_flag("--quiet,-q", o.quiet, "Print errors only");
  o.count = [&verb](const std::string& flag) { return verb.count(flag); };
}

namespace {

// One of the first takes the place of all of the second.
const std::vector<Displacement> kDisplaced = {
    {{"model", "arch"}, {"model", "arch"}},
    {{"device", "gpu"}, {"device", "gpu"}},
    {{"out", "no-out"}, {"out", "no-out", "overwrite"}},
    {{"resume", "pretrained", "start-epoch"}, {"resume", "pretrained", "start-epoch"}},
    {{"no-out"}, {"tensorboard"}},
    {{"resume"}, {"overwrite"}}};

// A folder in the place of MODEL is one with data where a file names the network.
void model_for_data(CLI::App& verb, TrainOptions& o) {
  if (o.model.empty() || o.model == o.arch || !o.config.data.empty()) return;
  if (o.arch.empty() && (is_network(o.model) || !fs::is_directory(o.model))) return;
  verb.get_option("--data")->add_result(o.model);
  verb.get_option("--data")->run_callback();
  verb.get_option("MODEL")->clear();
  o.model.clear();
}

void read_file(CLI::App& verb, TrainOptions& o) {
  if (o.config_file.empty()) return;
  // `train --config FILE DIR`: the file names the network.
  model_for_data(verb, o);
  auto displaced = kDisplaced;
  displaced.push_back({{"amp", "pyamp"}, {"amp", "pyamp", "amp-dtype"}});
  apply_config_file(verb, o.config_file, displaced);
}

// What the run had, but for what the command says.
void read_run(CLI::App& verb, TrainOptions& o) {
  const training::TrainConfig& c = o.config;
  if (c.resume.empty()) return;
  if (!fs::exists(c.resume)) throw UsageError(fmt::format("--resume: {} does not exist", shown_path(c.resume)));
  o.run = read_run_config(c.resume);
  if (!o.run) return;
  model_for_data(verb, o);
  const std::string model = o.arch.empty() ? o.model : o.arch, trained = o.run.value("model");
  if (!model.empty() && !trained.empty() && is_network(model) && model != trained) {
    throw IoError(fmt::format("{}: expected a checkpoint of {}, got one of {}, as {} says", shown_path(c.resume), model,
                              trained, shown_path(o.run.file)));
  }
  auto displaced = kDisplaced;
  // A loss scale belongs to its precision.
  const std::string amp = o.pyamp ? "f16" : c.amp;
  const bool other_amp = (verb.count("--amp") > 0 || o.pyamp) && amp != o.run.value("amp");
  const bool other_dtype = verb.count("--amp-dtype") > 0 && c.amp_dtype != o.run.value("amp-dtype");
  if (other_amp) displaced.push_back({{"amp", "pyamp"}, {"amp", "pyamp", "amp-dtype", "loss-scale"}});
  if (other_dtype) displaced.push_back({{"amp-dtype"}, {"loss-scale"}});
  if (o.pyamp) displaced.push_back({{"pyamp"}, {"amp"}});
  const bool data_given = verb.count("--data") > 0;
  apply_config_file(verb, o.run.file, displaced);
  if (!data_given) o.config.data = o.run.data();
}

}  // namespace

void read_config(CLI::App& verb, TrainOptions& o) {
  read_file(verb, o);
  read_run(verb, o);
}

void resolve(TrainOptions& o) {
  training::TrainConfig& c = o.config;
  name_model(o);
  c.device = apply_common(o);
  if (o.pyamp) {
    if (o.count("--amp") > 0 && as_usage([&] { return training::amp_mode(c).region; }) != f16) {
      throw UsageError(fmt::format("--pyamp: means --amp f16, and --amp {} is given", c.amp));
    }
    c.amp = "f16";
  }
  c.norm_decay = !o.no_norm_decay;
  c.capture = !o.no_capture;
  fill_in(o);
  as_usage([&] { training::check(c); });
  check_flags(o);
  if (training::network_input(o.model).images) as_usage([&] { training::check(o.images); });
  c.train_accuracy = o.print_freq > 0 && !o.quiet;
  constexpr std::int64_t kReadEvery = 100;  // where nothing is printed
  c.read_every = static_cast<int>(o.print_freq > 0 ? std::min(o.print_freq, kReadEvery) : kReadEvery);
}

namespace {

// Every flag that makes the run what it is, in the order of the file.
std::vector<std::pair<std::string, std::string>> effective(const TrainOptions& o) {
  const training::TrainConfig& c = o.config;
  std::vector<std::pair<std::string, std::string>> flags;
  const auto put = [&flags](const char* flag, const auto& value) {
    flags.emplace_back(flag, fmt::format("{}", value));
  };
  const auto put_given = [&](const char* flag, const std::string& value) {
    if (!value.empty()) put(flag, value);
  };
  put("model", c.model);
  put_given("data", c.data.string());
  put("epochs", c.epochs);
  put("batch-size", c.batch_size);
  put("lr", c.lr);
  put("lr-schedule", c.lr_schedule);
  put("warmup-epochs", c.warmup_epochs);
  put("optimizer", c.optimizer);
  put("momentum", c.momentum);
  put("nesterov", c.nesterov);
  put("weight-decay", c.weight_decay);
  put("no-norm-decay", !c.norm_decay);
  put("label-smoothing", c.label_smoothing);
  put("mixup", c.mixup);
  put("amp", c.amp);
  const training::AmpMode mode = training::amp_mode(c);
  const bool leveled = mode.level != amp::Level::O0;
  put_given("amp-dtype", c.amp_dtype.empty() && leveled ? name(mode.level_dtype) : c.amp_dtype);
  put("loss-scale", training::loss_scale_text(c));
  put("accumulate", c.accumulate);
  put("clip-norm", c.clip_norm);
  put("no-capture", !c.capture);
  put("save-every", c.save_every);
  put("tensorboard", c.tensorboard);
  put("seed", c.seed);
  put("device", c.device.str());
  if (o.threads > 0) put("threads", o.threads);
  put("tf32", o.tf32);
  put("workers", c.workers);
  put("limit", c.limit);
  for (const auto& [flag, value] : c.data_flags) put(flag.c_str(), value);
  if (training::network_input(c.model).images) {
    put("max-damaged", o.images.max_damaged);
    put("zero-init-residual", o.zero_init_residual);
  }
  put_given("pretrained", o.pretrained.string());
  if (c.start_epoch > 0) put("start-epoch", c.start_epoch);
  // Where a run began stays part of it.
  if (training::is_run_in(c.resume, c.out)) {
    put_given("pretrained", o.run.value("pretrained"));
    put_given("start-epoch", o.run.value("start-epoch"));
  }
  put("print-freq", o.print_freq);
  put("quiet", o.quiet);
  const training::DebugConfig& d = c.debug;
  put_given("debug-dump", d.dump.string());
  if (!d.dump.empty()) put("debug-level", d.level);
  put_given("debug-compare", d.compare);
  if (!d.dump.empty() || !d.compare.empty()) put("debug-steps", d.steps);
  put_given("debug-nonfinite", d.nonfinite);
  put_given("profile", d.profile.string());
  if (!d.profile.empty()) put("profile-steps", d.profile_steps);
  return flags;
}

}  // namespace

std::string describe(const TrainOptions& o) {
  const training::TrainConfig& c = o.config;
  std::string text =
      fmt::format("# Written by halfstep {} into {}; `halfstep train --config FILE` does the same again.\n",
                  HALFSTEP_VERSION, one_line(c.out.string()));
  if (!c.resume.empty()) text += fmt::format("# It went on from {}.\n", one_line(c.resume.string()));
  if (c.data.empty()) text += "# The data are the built-in digits.\n";
  text += fmt::format("# It computed on {} thread{}.\n", num_threads(), num_threads() == 1 ? "" : "s");
  for (const auto& [flag, value] : effective(o)) text += config_line(flag, value);
  return text;
}

std::vector<std::string> changes(const TrainOptions& o) {
  std::vector<std::string> lines;
  if (!o.run) return lines;
  std::map<std::string, std::string> now;
  for (auto& [flag, value] : effective(o)) now[flag] = value;
  for (const char* flag : {"data", "epochs", "amp", "amp-dtype", "loss-scale", "accumulate", "device", "tf32"}) {
    const std::string before = o.run.value(flag);
    if (now[flag] == before) continue;
    lines.push_back(fmt::format("--{} {} in place of {}", flag, now[flag].empty() ? "none" : now[flag],
                                before.empty() ? "none" : before));
  }
  if (o.run.threads > 0 && o.run.threads != num_threads()) {
    lines.push_back(
        fmt::format("{} threads in place of {}: sums may be rounded otherwise", num_threads(), o.run.threads));
  }
  return lines;
}

}  // namespace halfstep::cli
