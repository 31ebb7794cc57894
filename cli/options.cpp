// SPDX-License-Identifier: Apache-2.0
#include "cli/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "cli/suggest.h"
#include "halfstep/core/device.h"
#include "halfstep/data/digits.h"
#include "halfstep/runtime/parallel.h"
#include "halfstep/train/checkpoint.h"

namespace halfstep::cli {
namespace {

// `DIR,--data` is called --data in messages, MODEL is called MODEL.
std::string flag_of(const std::string& names) {
  const std::size_t dashes = names.find("--");
  return dashes == std::string::npos ? names : names.substr(dashes);
}

}  // namespace

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

CLI::Option* add_real(CLI::App& verb, const std::string& flag, double& value, const std::string& help) {
  auto* option = verb.add_option_function<std::string>(
      flag, [flag, &value](const std::string& text) { value = parse_real(flag, text); }, help);
  return option->type_name(fmt::format("X={}", value));
}

CLI::Option* add_word(CLI::App& verb, const std::string& flag, std::string& value, const std::string& help) {
  auto* option = verb.add_option_function<std::string>(
      flag,
      [flag, &value](const std::string& text) {
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

void add_common(CLI::App& verb, CommonOptions& o) {
  verb.add_option("MODEL", o.model, "Network: mlp (784-512-512-10 with ReLU)")->required()->type_name("");
  add_word(verb, "--device", o.device, "Device, as NAME or NAME:INDEX (see `halfstep devices`)");
  add_whole(verb, "--gpu", o.gpu, 0, 1023, "The same as --device cuda:N")->type_name("N");
  add_whole(verb, "--threads", o.threads, 1, kMostThreads, "Threads that compute (default: all processors)");
}

Device apply_common(const CommonOptions& o) {
  if (o.model != "mlp") {
    throw UsageError(fmt::format("MODEL: expected mlp, got '{}'{}", o.model, did_you_mean(o.model, {"mlp"})));
  }
  const std::string name = o.gpu >= 0 ? fmt::format("cuda:{}", o.gpu) : o.device;
  const Device device = as_usage([&] { return Device(name); });
  if (o.threads > 0) set_num_threads(o.threads);
  return device;
}

void make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (!error && !std::filesystem::is_directory(folder)) error = std::make_error_code(std::errc::not_a_directory);
  if (error) throw IoError(fmt::format("{}: can't be made: {}", folder.string(), error.message()));
}

train::Classifier load_classifier(const std::string& model, const std::filesystem::path& weights,
                                  std::shared_ptr<const void>& holder) {
  const NamedTensors state = train::load_weights(weights, model);
  const train::Classifier classifier = train::make_classifier(model, holder);
  try {
    classifier.module->load_state_dict(state);
  } catch (const Error& e) {
    throw IoError(fmt::format("{}: no weights of {}: {}", weights.string(), model, e.what()));
  }
  return classifier;
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
