// SPDX-License-Identifier: Apache-2.0
#include "cli/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "cli/suggest.h"
#include "halfstep/core/device.h"
#include "halfstep/data/digits.h"
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

void add_common(CLI::App& verb, CommonOptions& o, bool model_required) {
  verb.add_option("MODEL", o.model, fmt::format("Network: {}", fmt::join(train::network_names(), ", ")))
      ->required(model_required)
      ->type_name("");
  add_word(verb, "--device", o.device, "Device, as NAME or NAME:INDEX (see `halfstep devices`)");
  add_whole(verb, "--gpu", o.gpu, 0, 1023, "The same as --device cuda:N")->type_name("N");
  add_whole(verb, "--threads", o.threads, 1, kMostThreads, "Threads that compute (default: all processors)");
  verb.add_flag("--tf32", o.tf32, "Devices that can may compute float32 products and convolutions in TF32");
}

Device apply_common(const CommonOptions& o) {
  const auto names = train::network_names();
  if (std::find(names.begin(), names.end(), o.model) == names.end()) {
    throw UsageError(
        fmt::format("MODEL: expected {}, got '{}'{}", fmt::join(names, ", "), o.model, did_you_mean(o.model, names)));
  }
  const std::string name = o.gpu >= 0 ? fmt::format("cuda:{}", o.gpu) : o.device;
  const Device device = as_usage([&] { return Device(name); });
  if (o.threads > 0) set_num_threads(o.threads);
  if (o.tf32) set_float32_precision(Float32Precision::high);
  return device;
}

void make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (!error && !std::filesystem::is_directory(folder)) error = std::make_error_code(std::errc::not_a_directory);
  if (error) throw IoError(fmt::format("{}: can't be made: {}", folder.string(), error.message()));
}

Loaded load_classifier(const std::string& model, const fs::path& weights) {
  train::SavedWeights saved = train::load_saved_weights(weights, model);
  Loaded loaded{.classifier = {},
                .holder = {},
                .num_classes = train::classes_of(model, saved.tensors),
                .classes = std::move(saved.classes),
                .recipe = std::move(saved.recipe)};
  loaded.classifier = train::make_classifier(model, loaded.holder, {.classes = loaded.num_classes});
  try {
    loaded.classifier.module->load_state_dict(saved.tensors);
  } catch (const Error& e) {
    throw IoError(fmt::format("{}: no weights of {}: {}", weights.string(), model, e.what()));
  }
  if (static_cast<std::int64_t>(loaded.classes.size()) != loaded.num_classes) loaded.classes.clear();
  return loaded;
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
  const train::ImageDataOptions usual = train::default_images(model, size);
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
    throw IoError(fmt::format("{}: expected weights for the {} classes in {}, got weights for {}", weights.string(),
                              classes.size(), folder.string(), loaded.num_classes));
  }
  if (loaded.classes.empty() || loaded.classes == classes) return;
  const auto other = std::mismatch(classes.begin(), classes.end(), loaded.classes.begin());
  log(LogLevel::warning,
      fmt::format("{}: its classes have other names than those in {}, the first is {} there and {} here; the numbers "
                  "below say little",
                  weights.string(), folder.string(), other.first == classes.end() ? "none" : *other.first,
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
