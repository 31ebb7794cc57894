// SPDX-License-Identifier: Apache-2.0
#include "cli/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <utility>

#include "cli/chosen_device.h"
#include "cli/suggest.h"
#include "halfstep/core/device.h"
#include "halfstep/core/text.h"
#include "halfstep/runtime/float32_precision.h"
#include "halfstep/runtime/log.h"
#include "halfstep/runtime/parallel.h"
#include "halfstep/runtime/tuning.h"
#include "halfstep/runtime/winograd.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/quantize.h"
#include "halfstep/train/registry.h"
#include "halfstep/train/weight_only.h"

namespace halfstep::cli {
namespace fs = std::filesystem;

namespace {
constexpr const char* kTf32 =
    "Allow less precise float32 matrix products and convolutions: TF32 on devices with such units (NVIDIA since "
    "Ampere), two parts of bf16 on CPUs with AMX; no effect elsewhere (default: full float32, unless HALFSTEP_TF32=1)";
}  // namespace

std::vector<Flag> common_flags(CommonOptions& o) {
  return {
      {.names = "MODEL",
       .field = &o.model,
       .help = fmt::format("Network: {}", fmt::join(training::network_names(), ", ")),
       .value = "",
       .resume = FlagResume::same},
      {.names = "--device",
       .field = &o.device,
       .help = "Device, as NAME or NAME:INDEX (see `halfstep devices`)",
       .resume = FlagResume::reported,
       .given = [&o] { o.device_given = true; }},
      {.names = "--gpu",
       .field = &o.gpu,
       .help = "Index of the accelerator, if there is only one kind",
       .range = FlagRange::from_to(0, 1023),
       .value = "N",
       .kept = FlagKept::never},
      {.names = "--threads",
       .field = &o.threads,
       .help = "Threads that compute (default: all processors)",
       .range = FlagRange::from_to(1, static_cast<double>(kMostThreads)),
       .kept = FlagKept::given,
       .resume = FlagResume::reported},
      {.names = "--tf32", .field = &o.tf32, .help = kTf32, .resume = FlagResume::reported},
      {.names = "--winograd",
       .field = &o.winograd,
       .help = "3x3 convolutions on the CPU in tiles of 2x2 or 4x4 results, or off (the default): fewer "
               "multiplications, other rounding errors",
       .choices = {"off", "2x2", "4x4"},
       .kept = FlagKept::given,
       .resume = FlagResume::reported},
      {.names = "--tune",
       .field = &o.tune,
       .help = "Choose how the CPU computes each convolution by timing it once on this machine, and keep the choices "
               "(default: by a model, unless HALFSTEP_TUNE=1)",
       .resume = FlagResume::reported}};
}

void add_common(const Verb& verb, CommonOptions& o, bool model_required) {
  for (const Flag& flag : common_flags(o)) {
    Argument argument = add_flag(verb, flag);
    if (flag.names == "MODEL") argument.required(model_required);
  }
}

Device apply_common(const CommonOptions& o) {
  const auto names = training::network_names();
  if (!o.model.empty() && !is_network(o.model)) {
    throw UsageError(
        fmt::format("MODEL: expected {}, got '{}'{}", fmt::join(names, ", "), o.model, did_you_mean(o.model, names)));
  }
  const Device device = chosen_device(o.device, o.device_given, o.gpu);
  if (o.threads > 0) set_num_threads(o.threads);
  if (o.tf32) set_float32_precision(Float32Precision::high);
  if (!o.winograd.empty()) set_winograd(winograd_from_string(o.winograd));
  if (o.tune) set_tuning(true);
  return device;
}

bool is_network(const std::string& name) {
  const auto names = training::network_names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

fs::path take_model_for_path(std::string& model) {
  std::error_code error;
  if (model.empty() || is_network(model) || !fs::exists(model, error)) return {};
  return std::exchange(model, {});
}

void make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (!error && !std::filesystem::is_directory(folder)) error = std::make_error_code(std::errc::not_a_directory);
  if (error) throw IoError(fmt::format("{}: can't be made: {}", shown_path(folder), error.message()));
}

namespace {

// What a network is built from, if not from its name.
training::NetworkDescription description_of(const training::NetworkKind& network, const training::SavedWeights& saved,
                                            const RunConfig& run, const training::NetworkDescription& given) {
  training::NetworkDescription own;
  if (saved.network.empty()) {  // of a file of before
    if (!given.empty()) return given;
    const std::string said = run ? run.value("cfg") : std::string();
    if (said.starts_with('{')) {
      own.text = said;
    } else {
      own.file = said;
    }
    return own;
  }
  own.file = saved.file;
  own.text = saved.network;
  if (given.empty() || !network.difference) return own;
  if (const std::string differs = network.difference(own, given); !differs.empty()) {
    throw IoError(fmt::format("{}: its weights are of another network than --cfg {}: {}", shown_path(saved.file),
                              given.file.empty() ? "describes" : shown_path(given.file), differs));
  }
  return own;
}

}  // namespace

namespace {

// A number of the recipe that weights were trained by; -1: it isn't there.
std::int64_t trained(const std::map<std::string, std::string>& recipe, const char* flag) {
  const auto it = recipe.find(flag);
  std::int64_t value = -1;
  if (it != recipe.end()) std::from_chars(it->second.data(), it->second.data() + it->second.size(), value);
  return value;
}
// Of the pictures; 0: the network's own.
std::int64_t trained_size(const std::map<std::string, std::string>& recipe) {
  const std::int64_t size = trained(recipe, "image-size");
  return size > 0 && size <= data::kLargestInputSide ? size : 0;
}

}  // namespace

Loaded load_classifier(std::string& model, const fs::path& weights, const training::NetworkDescription& given) {
  training::SavedWeights saved = training::load_saved_weights(weights, model);
  // A configuration beside weights says nothing of them unless they are the run's.
  RunConfig run;
  if (!saved.model.empty()) run = read_run_config(weights);
  if (run && run.value("model") != saved.model) run = {};
  if (model.empty()) model = saved.model;
  if (model.empty()) {
    throw UsageError(
        fmt::format("MODEL: {} doesn't say which network its weights are of; name it", shown_path(saved.file)));
  }
  if (!is_network(model)) {
    throw IoError(
        fmt::format("{}: expected weights of a network that is known, got '{}'", shown_path(saved.file), model));
  }
  Loaded loaded{.classifier = {},
                .network = {},
                .num_classes = training::classes_of(model, saved.tensors),
                .classes = std::move(saved.classes),
                .recipe = std::move(saved.recipe),
                .amp = std::move(saved.amp),
                .data_checksums = std::move(saved.data_checksums),
                .file = saved.file,
                .run = std::move(run)};
  training::TrainConfig config;
  config.model = model;
  loaded.described = description_of(training::network_kind(model), saved, loaded.run, given);
  loaded.apply(config);
  training::RunData data;
  data.num_classes = loaded.num_classes;
  loaded.network = training::network_kind(model).make(config, data);
  loaded.network.name = model;
  loaded.classifier = {.module = loaded.network.module.get(), .forward = loaded.network.forward};
  try {
    config.quantization = training::saved_quantization(loaded.recipe);
    if (config.quantization.is_on()) {
      config.images.image_size = trained_size(loaded.recipe);
      training::prepare_quantization(config, *training::make_task(config, data, loaded.network));
    }
    if (const auto weight_only = training::saved_weight_only(loaded.recipe)) {
      quant::quantize_weights(*loaded.classifier.module, *weight_only);
    }
    loaded.classifier.module->load_state_dict(saved.tensors);
    training::check_ranges(*loaded.classifier.module);
  } catch (const Error& e) {
    throw IoError(fmt::format("{}: no weights of {}: {}", shown_path(weights), model, e.what()));
  }
  if (static_cast<std::int64_t>(loaded.classes.size()) != loaded.num_classes) loaded.classes.clear();
  return loaded;
}

// One name a line; a carriage return before the end of the line belongs to the line's end.
training::Checkpoint rewritten(const std::string& model, const Loaded& loaded, const training::Task& task,
                               const training::ImageDataOptions* images, NamedTensors weights) {
  training::Checkpoint made;
  made.model = model;
  made.weights = std::move(weights);
  made.network = task.network_description();
  made.classes = loaded.classes;
  made.recipe = loaded.recipe;
  made.data_checksums = loaded.data_checksums;
  if (images) {
    made.recipe.emplace("image-size", fmt::format("{}", images->image_size));
    made.recipe.emplace("resize", fmt::format("{}", images->resize));
  }
  return made;
}

std::vector<std::string> read_class_names(const fs::path& path, std::int64_t expected) {
  std::ifstream file(path);
  if (!file || fs::is_directory(path)) {
    throw IoError(fmt::format("{}: expected a file with one class name a line, it can't be read", shown_path(path)));
  }
  std::vector<std::string> names;
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    names.push_back(line);
    if (static_cast<std::int64_t>(names.size()) > expected) break;
  }
  while (!names.empty() && names.back().empty()) names.pop_back();
  if (static_cast<std::int64_t>(names.size()) != expected) {
    throw IoError(fmt::format(
        "{}: expected {} class names, one a line, as many as the network has classes, got {}", shown_path(path),
        expected, static_cast<std::int64_t>(names.size()) > expected ? "more" : std::to_string(names.size())));
  }
  return names;
}

std::string Loaded::text(const std::string& model) const {
  std::string said = fmt::format("{} with {}", model, shown_path(file));
  if (const auto integers = quant::weight_only_layers(*network.module); !integers.empty()) {
    said += fmt::format(" ({} linear layer{} with {}-bit weights)", integers.size(), integers.size() == 1 ? "" : "s",
                        integers[0].bits);
  }
  return said;
}

void Loaded::apply(training::TrainConfig& config) const { config.description = described; }

std::string DataPlace::text(const Loaded& loaded) const {
  std::string what = training::data_label(loaded.network.name, folder);
  if (from_run) return fmt::format("{}, as {} says", what, shown_path(loaded.run.file));
  return what;
}

DataPlace place_of_data(const Loaded& loaded, const fs::path& given, std::optional<std::uint64_t> seed) {
  DataPlace place{.folder = given, .seed = seed.value_or(0)};
  if (!given.empty() || !loaded.run) return place;
  place.folder = loaded.run.data();
  place.from_run = true;
  const std::string said = loaded.run.value("seed");
  if (!seed && !said.empty()) place.seed = parse_whole(shown_path(loaded.run.file) + ": seed", said, 0, kMostSeed);
  return place;
}

training::TrainConfig data_config(const std::string& model, const Loaded& loaded, const DataPlace& place,
                                  const training::ImageDataOptions* images, std::int64_t batch_size, Device device) {
  training::TrainConfig config = training::default_config(model, batch_size, device);
  config.data = place.folder;
  config.seed = place.seed;
  if (images) config.images = *images;
  loaded.apply(config);
  return config;
}

void add_data_seed(const Verb& verb, std::uint64_t& seed) {
  add_training_flag(verb, "--seed", &seed, "Seed of the built-in data (default: the run's)");
}

void check_same_data(const Loaded& loaded, const DataPlace& place, const std::string& part,
                     const std::string& checksum) {
  const auto saved = loaded.data_checksums.find(part);
  // Who names data, or another seed, wants to know of them.
  if (!place.from_run || saved == loaded.data_checksums.end() || saved->second == checksum) return;
  if (place.folder.empty() && std::to_string(place.seed) != loaded.run.value("seed")) return;
  throw IoError(
      fmt::format("{}: the {} part is not that of the run {} any more (its checksum was {}, now it is {}); --data {} "
                  "takes it all the same",
                  shown_path(place.folder), part, shown_path(loaded.run.file.parent_path()), saved->second, checksum,
                  shown_path(place.folder)));
}

void add_image_size(const Verb& verb, EvalImageOptions& o) {
  add_training_flag(verb, "--image-size", &o.images.image_size,
                    "Side length of the network's input in pixels (default: as it was trained)")
      .value("N");
  o.count = [verb](const std::string& flag) { return verb.has(flag) ? verb.count(flag) : 0; };
}

void add_image_sizes(const Verb& verb, EvalImageOptions& o) {
  add_image_size(verb, o);
  add_training_flag(verb, "--resize", &o.images.resize,
                    "Shorter side in pixels before the centre crop; 0: use the whole image")
      .value("N");
}

void add_fresh_image_size(const Verb& verb, std::int64_t& image_size) {
  add_training_flag(verb, "--image-size", &image_size, "Pixels of a side (default: the network's own)").value("N");
}

training::NetworkInput checked_input(const std::string& model, std::int64_t image_size) {
  const training::NetworkInput input = as_usage([&] { return training::network_input(model); });
  if (image_size > 0 && !input.images) {
    throw UsageError(fmt::format("--image-size: {} is no network of images", model));
  }
  return input;
}

void add_trained(const Verb& verb, TrainedOptions& o) {
  add_common(verb, o, false);
  add_path(verb, "--weights", o.weights, "Checkpoint, .safetensors or .pth file, or folder of a run").required();
  add_read_limits(verb);
}

void resolve_images(EvalImageOptions& o, const std::string& model, const Loaded& loaded) {
  const bool sized = o.count("--image-size") > 0;
  const std::int64_t size =
      sized ? o.images.image_size : std::max<std::int64_t>(trained(loaded.recipe, "image-size"), 0);
  const training::ImageDataOptions usual = training::default_images(model, size);
  o.images.image_size = usual.image_size;
  if (usual.image_size > data::kLargestInputSide) {
    throw IoError(fmt::format("{}: expected weights for an image size of 1 to {}, got {}", shown_path(loaded.file),
                              data::kLargestInputSide, usual.image_size));
  }
  if (o.count("--resize") == 0) {
    const std::int64_t resize = trained(loaded.recipe, "resize");
    o.images.resize = !sized && resize >= 0 ? resize : usual.resize;
  }
  o.images.crop = usual.crop;
}

void refuse_image_flags(const EvalImageOptions& o, const std::string& model, std::initializer_list<const char*> flags) {
  for (const char* flag : flags) {
    if (o.count(flag) > 0) throw UsageError(fmt::format("{}: {} is no network of images", flag, model));
  }
}

void check_classes(const Loaded& loaded, const std::vector<std::string>& classes, const fs::path& weights,
                   const fs::path& folder) {
  if (static_cast<std::int64_t>(classes.size()) > loaded.num_classes) {
    throw IoError(fmt::format("{}: expected weights for the {} classes in {}, got weights for {}", shown_path(weights),
                              classes.size(), shown_path(folder), loaded.num_classes));
  }
  if (loaded.classes.empty() || loaded.classes == classes) return;
  const auto other = std::mismatch(classes.begin(), classes.end(), loaded.classes.begin());
  log(LogLevel::warning,
      fmt::format("{}: its classes have other names than those in {}, the first is {} there and {} here; the numbers "
                  "below say little",
                  shown_path(weights), shown_path(folder), other.first == classes.end() ? "none" : *other.first,
                  *other.second));
}

}  // namespace halfstep::cli
