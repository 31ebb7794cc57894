// SPDX-License-Identifier: Apache-2.0
#include "cli/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "cli/chosen_device.h"
#include "cli/suggest.h"
#include "halfstep/core/device.h"
#include "halfstep/core/text.h"
#include "halfstep/data/digits.h"
#include "halfstep/io/read_limits.h"
#include "halfstep/runtime/float32_precision.h"
#include "halfstep/runtime/log.h"
#include "halfstep/runtime/parallel.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/networks.h"

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;

}  // namespace

std::string flag_of(const std::string& names) {
  const std::size_t dashes = names.find("--");
  if (dashes == std::string::npos) return names;
  return names.substr(dashes, names.find(',', dashes) - dashes);
}

std::uint64_t parse_whole(const std::string& flag, const std::string& text, std::uint64_t least, std::uint64_t most) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < least || value > most) {
    throw UsageError(fmt::format("{}: expected a whole number from {} to {}, got '{}'", flag, least, most, text));
  }
  return value;
}

double parse_real(const std::string& flag, const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) {
    throw UsageError(fmt::format("{}: expected a number, got '{}'{}", flag, text,
                                 text.find(',') == std::string::npos ? "" : "; decimals follow a point"));
  }
  return value;
}

CLI::Option* add_real(CLI::App& verb, const std::string& names, double& value, const std::string& help) {
  auto* option = verb.add_option_function<std::string>(
      names, [flag = flag_of(names), &value](const std::string& text) { value = parse_real(flag, text); }, help);
  return option->type_name(fmt::format("X={}", value));
}

CLI::Option* add_word(CLI::App& verb, const std::string& names, std::string& value, const std::string& help) {
  auto* option = verb.add_option_function<std::string>(
      names,
      [flag = flag_of(names), &value](const std::string& text) {
        if (text.empty()) throw UsageError(fmt::format("{}: expected a value, got an empty one", flag));
        value = text;
      },
      help);
  return option->type_name(value.empty() ? "TEXT" : "TEXT=" + value);
}

CLI::Option* add_choice(CLI::App& verb, const std::string& flag, std::string& value, const std::string& standard,
                        const std::string& help) {
  auto* option = verb.add_option_function<std::string>(
      flag, [&value, standard](const std::string& text) { value = text.empty() ? standard : text; }, help);
  return option->expected(0, 1)->type_name("[TEXT=" + standard + "]");
}

CLI::Option* add_path(CLI::App& verb, const std::string& names, std::filesystem::path& value, const std::string& help) {
  auto* option = verb.add_option_function<std::string>(
      names,
      [flag = flag_of(names), &value](const std::string& text) {
        if (text.empty()) throw UsageError(fmt::format("{}: expected a path, got an empty one", flag));
        value = text;
      },
      help);
  return option->type_name("PATH");
}

void add_read_limits(CLI::App& verb) {
  // 512, 512K, 8G: in powers of 1024.
  const auto parse = [](const std::string& flag, const std::string& text) {
    constexpr std::string_view kUnits = "KMGT";
    const std::size_t unit = text.empty() ? std::string_view::npos : kUnits.find(text.back());
    const bool has_unit = unit != std::string_view::npos;
    const auto shift = has_unit ? 10 * (unit + 1) : 0;
    return parse_whole(flag, has_unit ? text.substr(0, text.size() - 1) : text, 0, kMostSeed >> shift) << shift;
  };
  const auto add = [&](const std::string& flag, std::uint64_t io::ReadLimits::*limit, const std::string& help) {
    verb.add_option_function<std::string>(
            flag,
            [=](const std::string& text) {
              io::ReadLimits limits = io::read_limits();
              limits.*limit = parse(flag, text);
              io::set_read_limits(limits);
            },
            help)
        ->type_name("SIZE");
  };
  add("--max-bytes", &io::ReadLimits::max_bytes,
      "Most bytes of a file's tensors, such as 512M or 8G (default: the memory there is)");
  add("--max-unpacked", &io::ReadLimits::max_unpacked,
      "Most bytes that a file's tensors may take beyond eight times its size (default: 1G)");
}

void add_common(CLI::App& verb, CommonOptions& o, bool model_required) {
  verb.add_option("MODEL", o.model, fmt::format("Network: {}", fmt::join(training::network_names(), ", ")))
      ->required(model_required)
      ->type_name("");
  verb.add_option_function<std::string>(
          "--device",
          [&o](const std::string& text) {
            if (text.empty()) throw UsageError("--device: expected a value, got an empty one");
            o.device = text;
            o.device_given = true;
          },
          "Device, as NAME or NAME:INDEX (see `halfstep devices`)")
      ->type_name("TEXT=" + o.device);
  add_whole(verb, "--gpu", o.gpu, 0, 1023, "Device N of the only accelerator there is")->type_name("N");
  add_whole(verb, "--threads", o.threads, 1, kMostThreads, "Threads that compute (default: all processors)");
  verb.add_flag("--tf32", o.tf32, "Devices that can may compute float32 products and convolutions in TF32");
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

Loaded load_classifier(std::string& model, const fs::path& weights) {
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
                .holder = {},
                .num_classes = training::classes_of(model, saved.tensors),
                .classes = std::move(saved.classes),
                .recipe = std::move(saved.recipe),
                .amp = std::move(saved.amp),
                .data_checksums = std::move(saved.data_checksums),
                .file = saved.file,
                .run = std::move(run)};
  loaded.classifier = training::make_classifier(model, loaded.holder, {.classes = loaded.num_classes});
  try {
    loaded.classifier.module->load_state_dict(saved.tensors);
  } catch (const Error& e) {
    throw IoError(fmt::format("{}: no weights of {}: {}", shown_path(weights), model, e.what()));
  }
  if (static_cast<std::int64_t>(loaded.classes.size()) != loaded.num_classes) loaded.classes.clear();
  return loaded;
}

std::string Loaded::text(const std::string& model) const { return fmt::format("{} with {}", model, shown_path(file)); }

std::string DataPlace::text(const Loaded& loaded) const {
  const std::string what = folder.empty() ? "the built-in digits" : shown_path(folder);
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

void check_same_data(const Loaded& loaded, const DataPlace& place, const char* part, const std::string& checksum) {
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

void add_image_size(CLI::App& verb, EvalImageOptions& o) {
  add_whole(verb, "--image-size", o.images.image_size, 1, 1 << 14,
            "Pixels of a side that the network sees (default: as it was trained)")
      ->type_name("N");
  add_whole(verb, "--resize", o.images.resize, 0, 1 << 14,
            "Pixels of the shorter side before the middle is cut out; 0: the whole picture")
      ->type_name("N");
  o.count = [&verb](const std::string& flag) { return verb.count(flag); };
}

void resolve_images(EvalImageOptions& o, const std::string& model, const Loaded& loaded) {
  const auto trained = [&](const char* flag) -> std::int64_t {
    const auto it = loaded.recipe.find(flag);
    std::int64_t value = -1;
    if (it != loaded.recipe.end()) std::from_chars(it->second.data(), it->second.data() + it->second.size(), value);
    return value;
  };
  const bool sized = o.count("--image-size") > 0;
  const std::int64_t size = sized ? o.images.image_size : std::max<std::int64_t>(trained("image-size"), 0);
  const training::ImageDataOptions usual = training::default_images(model, size);
  o.images.image_size = usual.image_size;
  if (o.count("--resize") == 0) {
    const std::int64_t resize = trained("resize");
    o.images.resize = !sized && resize >= 0 ? resize : usual.resize;
  }
  o.images.crop = usual.crop;
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

data::MnistData load_pictures(const std::filesystem::path& folder, data::Split split, std::uint64_t seed,
                              std::int64_t limit) {
  if (folder.empty()) {
    constexpr std::int64_t kTrainDigits = 60000;
    const bool fewer = split == data::Split::kTrain && limit < kTrainDigits;
    return data::make_digits(split, {.seed = seed, .count = fewer ? limit : 0});
  }
  data::MnistData pictures = data::load_mnist(folder, split);
  if (limit > 0 && limit < pictures.count) {
    pictures.count = limit;
    pictures.images.resize(static_cast<std::size_t>(limit * pictures.rows * pictures.columns));
    pictures.labels.resize(static_cast<std::size_t>(limit));
  }
  return pictures;
}

std::shared_ptr<const data::Dataset> make_dataset(data::MnistData pictures) {
  return std::make_shared<data::MnistDataset>(std::move(pictures),
                                              data::ImageOptions{.flatten = true, .mean = 0.1307, .std = 0.3081});
}

}  // namespace halfstep::cli
