// SPDX-License-Identifier: Apache-2.0
#include "cli/train_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "cli/config_file.h"
#include "cli/suggest.h"
#include "halfstep/core/text.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/networks.h"
#include "halfstep/train/registry.h"
#include "halfstep/train/run_folder.h"

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kNoDownload =
    "--pretrained: expected a file with weights, .pth or .safetensors: nothing is downloaded. Where there is a "
    "network, "
    "`python3 -c \"import torchvision; torchvision.models.resnet50(weights='IMAGENET1K_V1')\"` leaves one in "
    "~/.cache/torch/hub/checkpoints";

// `--cfg yolov5n.yaml` names a network, or describes one in a file, which is read once: what the run keeps is its
// content.
void take_description(TrainOptions& o) {
  training::NetworkDescription& d = o.config.description;
  if (d.file.empty()) {
    // A checkpoint that lies alone says itself what it is of.
    if (!o.config.resume.empty() && !o.run && is_network(o.model) && training::network_kind(o.model).described_by) {
      d.text = training::load_saved_weights(o.config.resume).network;
      if (!d.text.empty()) d.file = o.config.resume;
    }
    return;
  }
  const auto take = [&] {
    // Of another network it is refused as a flag that does nothing.
    if (!is_network(o.model)) return;
    if (const auto& text = training::network_kind(o.model).description) d.text = as_usage([&] { return text(d); });
  };
  if (d.file.native().starts_with('{')) {
    d.text = std::exchange(d.file, {}).native();
    take();
    return;
  }
  const std::string name = d.file.stem().string();
  if (o.model.empty() && is_network(name)) o.model = name;
  if (fs::exists(d.file)) {
    take();
    return;
  }
  if (!is_network(name)) {
    throw UsageError(fmt::format("--cfg: expected a file, or the name of a network such as yolov5n.yaml, got {}",
                                 shown_path(d.file)));
  }
  if (o.model != name) {
    throw UsageError(fmt::format("--cfg: {} names another network than MODEL, {}", shown_path(d.file), o.model));
  }
  d.file.clear();
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
  take_description(o);
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
  training::TrainConfig usual =
      training::default_config(o.model, o.count("--batch-size") > 0 ? c.batch_size : 0, c.device);
  usual.images = training::default_images(o.model, o.count("--image-size") > 0 ? c.images.image_size : 0);
  // Rates, decay and momentum of SGD's recipes are none of Adam's.
  if (adam) {
    const training::TrainConfig plain;
    if (usual.lr != plain.lr) usual.lr = 1e-3;
    usual.momentum = plain.momentum;
    usual.weight_decay = plain.weight_decay;
    usual.nesterov = plain.nesterov;
    usual.norm_decay = plain.norm_decay;
    usual.warmup_momentum = plain.warmup_momentum;
    usual.warmup_bias_lr = plain.warmup_bias_lr;
  }
  if (o.count("--momentum") > 0 && c.momentum == 0) {
    usual.nesterov = false;
    usual.warmup_momentum = 0;
  }
  // A warm-up says that the schedule is the user's; onecycle has no room for it.
  if (c.warmup_epochs > 0 && usual.lr_schedule.starts_with("onecycle")) usual.lr_schedule = "cosine";
  const std::vector<Flag> from = training::flags(usual), to = training::flags(c);
  for (std::size_t i = 0; i < to.size(); ++i) {
    if (to[i].by_network && o.count(to[i].name()) == 0) training::copy_value(from[i], to[i]);
  }
  c.model = o.model;
  c.eval_batch_size = usual.eval_batch_size;
  c.prefetch = usual.prefetch;
  if (o.print_freq < 0) o.print_freq = training::data_of(o.model).lines ? 10 : 0;
}

// A flag that does nothing was meant to do something.
void check_flags(TrainOptions& o) {
  const training::TrainConfig& c = o.config;
  for (const Flag& flag : train_flags(o)) {
    if (o.count(flag.name()) == 0) continue;
    const auto refuse = [&](const std::string& why) {
      const auto file = o.files.find(flag.name());
      throw UsageError(fmt::format("{}{}: {}", file == o.files.end() ? std::string() : shown_path(file->second) + ": ",
                                   flag.name(), why));
    };
    if (flag.needs && !flag.needs->there) {
      refuse(flag.needs->value.empty() ? fmt::format("belongs to {}, which is not given", flag.needs->flag)
                                       : fmt::format("needs a {} {}", flag.needs->flag, flag.needs->value));
    }
    if (o.evaluate && flag.group == "Quantization" && !o.files.contains(flag.name())) {
      refuse("--evaluate quantizes weights as they say that they were trained");
    }
    if (training::takes(o.model, flag)) continue;
    refuse(flag.of_data(training::data_of(o.model).flags)
               ? fmt::format("{} is no network for {}", o.model, alternatives(flag.task))
               : fmt::format("{} is no network of {}", o.model, alternatives(flag.data)));
  }
  if (c.overwrite && training::is_run_in(c.resume, c.out)) {
    throw UsageError(fmt::format("--overwrite: --resume continues the run in {}, which is not to be replaced then",
                                 shown_path(c.out)));
  }
  if (o.no_out && !c.out.empty()) {
    throw UsageError(fmt::format("--no-out: --out {} is given too, and is where checkpoints go", shown_path(c.out)));
  }
  if (c.tensorboard && (o.no_out || o.evaluate)) {
    throw UsageError(fmt::format("--tensorboard: it writes into the folder of a run, and {} has none",
                                 o.no_out ? "--no-out" : "--evaluate"));
  }
  if (o.pretrained_given) {
    if (o.pretrained.empty()) throw UsageError(kNoDownload);
    if (!c.resume.empty()) {
      throw UsageError("--pretrained: --resume is given too, and its checkpoint has all the weights");
    }
    // As those scripts have it, the flag stood alone before the folder with the data.
    if (fs::is_directory(o.pretrained) && c.data.empty() && !fs::exists(o.pretrained / training::kLastCheckpoint) &&
        !fs::exists(o.pretrained / training::kBestCheckpoint)) {
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

std::vector<Flag> train_flags(TrainOptions& o) {
  constexpr const char* kNetwork = "Network and device";
  std::vector<Flag> all = common_flags(o);
  for (Flag& flag : all) flag.group = kNetwork;
  const auto library = training::flags(o.config);
  all.insert(all.end(), library.begin(), library.end());
  // Behind the others of its group.
  const auto add = [&all](const char* group, Flag row) {
    row.group = group;
    const auto last = std::find_if(all.rbegin(), all.rend(), [&](const Flag& f) { return f.group == row.group; });
    all.insert(last.base(), std::move(row));
  };
  add(kNetwork, {.names = "--arch,-a",
                 .field = &o.arch,
                 .help = "Same as MODEL, as in ImageNet scripts",
                 .value = "MODEL",
                 .kept = FlagKept::never});
  add(kNetwork, {.names = "--pretrained",
                 .field = &o.pretrained,
                 .help = "Initial weights, .pth or .safetensors; a last layer of a different size is reinitialised",
                 .value = "FILE",
                 .standard = "",
                 .kept = FlagKept::given,
                 .begins = true,
                 .given = [&o] { o.pretrained_given = true; }});
  add(kNetwork, {.names = "--weights",
                 .field = &o.weights,
                 .help = "Same as --pretrained, as in detection scripts; '' for none",
                 .value = "FILE",
                 .standard = "",
                 .kept = FlagKept::never,
                 .begins = true});
  for (const Flag& row : read_limit_flags()) add(kNetwork, row);
  add("Precision", {.names = "--pyamp", .field = &o.pyamp, .help = "The same as --amp f16", .kept = FlagKept::never});
  add("Several processes",
      {.names = "--reduce",
       .field = &o.reduce,
       .help = "What sums gradients: rank-order (Halfstep, the same bits with every MPI) or library; fast is library",
       .choices = {"rank-order", "library", "fast"}});
  constexpr const char* kRuns = "Runs";
  add(kRuns, {.names = "--config",
              .field = &o.config_file,
              .help = "YAML file with flags, such as `lr: 0.1`; flags given here win. A run's config.yaml is one",
              .kept = FlagKept::never});
  add(kRuns, {.names = "--evaluate,-e",
              .field = &o.evaluate,
              .help = "Evaluate the weights of --resume or --pretrained without training",
              .kept = FlagKept::never});
  add(kRuns, {.names = "--no-out", .field = &o.no_out, .help = "Write no checkpoints", .kept = FlagKept::never});
  add(kRuns, {.names = "--print-freq,-p",
              .field = &o.print_freq,
              .help = "Steps between printed lines; 0: none (default: 10 for networks of images)",
              .range = FlagRange::at_least(0),
              .value = "N"});
  add(kRuns, {.names = "--quiet,-q", .field = &o.quiet, .help = "Print errors only"});
  return all;
}

const Flag* row_of(const std::vector<Flag>& rows, const std::string& argument) {
  const std::string given = argument.substr(0, argument.find('='));
  for (const Flag& row : rows) {
    for (std::string_view rest = row.names; !rest.empty();) {
      const std::size_t end = std::min(rest.find(','), rest.size());
      if (rest.substr(0, end) == given) return &row;
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
  }
  return nullptr;
}

std::vector<std::string> arguments_to_resume(const std::vector<std::string>& arguments,
                                             const std::filesystem::path& out) {
  TrainOptions plain;
  const std::vector<Flag> rows = train_flags(plain);
  std::vector<std::string> result;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const Flag* row = arguments[i].starts_with('-') ? row_of(rows, arguments[i]) : nullptr;
    // Where the run began is in the checkpoint now, and there is nothing to be replaced.
    if (!row || !(row->begins || row->name() == "--overwrite")) {
      result.push_back(arguments[i]);
    } else if (arguments[i].find('=') == std::string::npos && !row->is_switch()) {
      ++i;
    }
  }
  result.insert(result.end(), {"--resume", out.string()});
  return result;
}

void add_train_options(const Verb& verb, TrainOptions& o) {
  for (const Flag& flag : train_flags(o)) add_flag(verb, flag);
  verb.add_action(
          "--markdown",
          [] {
            TrainOptions plain;
            fmt::print("{}", flags_markdown(train_flags(plain)));
          },
          "Print the table of flags for the documentation")
      .group("");
  o.count = [verb](const std::string& flag) { return verb.count(flag); };
}

namespace {

// What a configuration may say of quantization.
std::vector<std::string> quantization_names() {
  training::QuantizationConfig config;
  std::vector<std::string> names;
  for (const Flag& flag : training::flags(config)) names.push_back(flag.key());
  return names;
}

// One of the first takes the place of all of the second.
const std::vector<Displacement> kDisplaced = {
    {{"model", "arch"}, {"model", "arch"}},
    {{"device", "gpu"}, {"device", "gpu"}},
    {{"out", "no-out"}, {"out", "no-out", "overwrite"}},
    {{"resume", "pretrained", "start-epoch"}, {"resume", "pretrained", "start-epoch"}},
    {{"recompute", "memory-budget"}, {"recompute", "memory-budget"}},
    {{"no-out", "evaluate"}, {"tensorboard"}},
    {{"resume"}, {"overwrite"}},
    {{"no-quant"}, quantization_names()}};

// A folder in the place of MODEL is one with data where a file names the network.
void model_for_data(const Verb& verb, TrainOptions& o) {
  if (o.model.empty() || o.model == o.arch || !o.config.data.empty()) return;
  if (o.arch.empty() && (is_network(o.model) || !fs::is_directory(o.model))) return;
  verb.give("--data", o.model);
  verb.take_back("MODEL");
  o.model.clear();
}

void read_file(const Verb& verb, TrainOptions& o) {
  if (o.config_file.empty()) return;
  // `train --config FILE DIR`: the file names the network.
  model_for_data(verb, o);
  auto displaced = kDisplaced;
  displaced.push_back({{"amp", "pyamp"}, {"amp", "pyamp", "amp-dtype"}});
  apply_config_file(verb, o.config_file, displaced);
}

// What the run had, but for what the command says.
void read_run(const Verb& verb, TrainOptions& o) {
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
  const auto differs = [&](const std::string& given, const char* key) {
    return training::canonical_amp(given) != training::canonical_amp(o.run.value(key));
  };
  const bool other_amp = (verb.count("--amp") > 0 || o.pyamp) && differs(o.pyamp ? "f16" : c.amp, "amp");
  const bool other_dtype = verb.count("--amp-dtype") > 0 && differs(c.amp_dtype, "amp-dtype");
  if (other_amp) displaced.push_back({{"amp", "pyamp"}, {"amp", "pyamp", "amp-dtype", "loss-scale"}});
  if (other_dtype) displaced.push_back({{"amp-dtype"}, {"loss-scale"}});
  if (o.pyamp) displaced.push_back({{"pyamp"}, {"amp"}});
  const bool data_given = verb.count("--data") > 0;
  apply_config_file(verb, o.run.file, displaced);
  if (!data_given) o.config.data = o.run.data();
}

}  // namespace

void read_config(const Verb& verb, TrainOptions& o) {
  std::vector<std::string> missing;
  for (const Flag& flag : train_flags(o)) {
    if (verb.count(flag.name()) == 0) missing.push_back(flag.name());
  }
  const auto note = [&](const fs::path& file) {
    std::erase_if(missing, [&](const std::string& flag) {
      if (verb.count(flag) == 0) return false;
      o.files[flag] = file;
      return true;
    });
  };
  read_file(verb, o);
  note(o.config_file);
  read_run(verb, o);
  note(o.run.file);
}

void resolve(TrainOptions& o) {
  training::TrainConfig& c = o.config;
  if (o.count("--weights") > 0 && !o.weights.empty()) {
    if (o.pretrained_given) throw UsageError("--weights: is another word for --pretrained, which is given too");
    o.pretrained = o.weights;
    o.pretrained_given = true;
  }
  name_model(o);
  c.device = apply_common(o);
  if (o.pyamp) {
    if (o.count("--amp") > 0 && as_usage([&] { return training::amp_mode(c).region; }) != f16) {
      throw UsageError(fmt::format("--pyamp: means --amp f16, and --amp {} is given", c.amp));
    }
    c.amp = "f16";
  }
  o.device = c.device.str();
  fill_in(o);
  as_usage([&] { training::check(c); });
  check_flags(o);
  if (const auto& kind = training::data_of(o.model); kind.check) as_usage([&] { kind.check(c); });
  c.train_accuracy = o.print_freq > 0 && !o.quiet;
  constexpr std::int64_t kReadEvery = 100;  // where nothing is printed
  c.read_every = static_cast<int>(o.print_freq > 0 ? std::min(o.print_freq, kReadEvery) : kReadEvery);
}

namespace {

// Every flag that makes the run what it is, by its key.
std::vector<std::pair<std::string, std::string>> effective(const TrainOptions& given) {
  TrainOptions o = given;
  const bool goes_on = training::is_run_in(o.config.resume, o.config.out);
  std::vector<std::pair<std::string, std::string>> result;
  for (const Flag& flag : train_flags(o)) {
    if (flag.kept == FlagKept::never || !training::takes(o.config.model, flag)) continue;
    std::string value = flag.saved();
    if (flag.kept == FlagKept::given) {
      if (flag.needs && !flag.needs->there) continue;
      if (value == "0") value.clear();
      // Where a run began stays part of it.
      if (value.empty() && flag.begins && goes_on) value = o.run.value(flag.key());
      if (value.empty()) continue;
    }
    result.emplace_back(flag.key(), std::move(value));
  }
  return result;
}

}  // namespace

std::string describe(const TrainOptions& o) {
  const training::TrainConfig& c = o.config;
  std::string text =
      fmt::format("# Written by halfstep {} into {}; `halfstep train --config FILE` does the same again.\n",
                  HALFSTEP_VERSION, one_line(c.out.string()));
  if (!c.resume.empty()) text += fmt::format("# Resumed from {}.\n", one_line(c.resume.string()));
  if (c.data.empty()) text += fmt::format("# The data are {}.\n", training::data_label(c.model, c.data));
  for (const auto& [key, value] : effective(o)) text += config_line(key, value);
  return text;
}

std::vector<std::string> changes(const TrainOptions& o) {
  std::vector<std::string> lines;
  if (!o.run) return lines;
  std::map<std::string, std::string> now;
  for (auto& [key, value] : effective(o)) now[key] = value;
  TrainOptions rows;
  for (const Flag& flag : train_flags(rows)) {
    const bool said = flag.resume == FlagResume::reported || flag.resume == FlagResume::at_epoch_end ||
                      flag.resume == FlagResume::of_precision;
    // Bits don't depend on the number of threads.
    if (!said || flag.name() == "--threads") continue;
    const std::string key = flag.key(), had = o.run.value(key);
    const std::string before = key.starts_with("amp") ? training::canonical_amp(had) : had;
    if (now[key] == before) continue;
    lines.push_back(fmt::format("--{} {} in place of {}", key, now[key].empty() ? "none" : now[key],
                                before.empty() ? "none" : before));
  }
  return lines;
}

}  // namespace halfstep::cli
