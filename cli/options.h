// SPDX-License-Identifier: Apache-2.0
// Flags that several verbs share, and flags whose values are checked as they are read.
#pragma once

#include <CLI/CLI.hpp>
#include <concepts>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/run_config.h"
#include "cli/verbs.h"
#include "halfstep/core/error.h"
#include "halfstep/data/dataset.h"
#include "halfstep/data/mnist.h"
#include "halfstep/train/data.h"
#include "halfstep/train/trainer.h"

namespace halfstep::cli {

/// Device, threads and model: what every verb that computes takes.
struct CommonOptions {
  std::string model;
  std::string device = "cpu";
  int gpu = -1;
  int threads = 0;
  bool tf32 = false;
  bool device_given = false;
};
/// Adds MODEL, --device, --gpu, --threads and --tf32.
void add_common(CLI::App& verb, CommonOptions& options, bool model_required = true);
/// Checks the model (where one is named), sets the threads and the precision of float32, and returns the device. Throws
/// UsageError.
Device apply_common(const CommonOptions& options);

/// A whole number from `least` (at least 0) to `most`. Throws UsageError naming the flag.
std::uint64_t parse_whole(const std::string& flag, const std::string& text, std::uint64_t least, std::uint64_t most);
/// A number, with a point for the decimals whatever the locale says. Throws UsageError naming the flag.
double parse_real(const std::string& flag, const std::string& text);

/// What messages call an option of several names, `--epochs,--epoch` or `DIR,--data`: its first long flag, or its only
/// name.
std::string flag_of(const std::string& names);

/// `--flag N` for a whole number; the default is shown in the help unless it is under `least`.
template <std::integral T>
CLI::Option* add_whole(CLI::App& verb, const std::string& names, T& value, std::uint64_t least, std::uint64_t most,
                       const std::string& help) {
  const std::string flag = flag_of(names);
  auto* option = verb.add_option_function<std::string>(
      names,
      [flag, &value, least, most](const std::string& t) { value = static_cast<T>(parse_whole(flag, t, least, most)); },
      help);
  const bool shown = std::cmp_greater_equal(value, least);
  return option->type_name(shown ? "N=" + std::to_string(value) : "N");
}
/// `--flag X` for a number.
CLI::Option* add_real(CLI::App& verb, const std::string& names, double& value, const std::string& help);
/// `--flag TEXT` for one of some words; an empty one is refused.
CLI::Option* add_word(CLI::App& verb, const std::string& names, std::string& value, const std::string& help);
/// `--flag`, which stands for `--flag STANDARD`, or `--flag TEXT`.
CLI::Option* add_choice(CLI::App& verb, const std::string& flag, std::string& value, const std::string& standard,
                        const std::string& help);
/// `--flag PATH`, or a positional argument; an empty path is refused, since it mostly comes from an unset variable.
CLI::Option* add_path(CLI::App& verb, const std::string& flag, std::filesystem::path& value, const std::string& help);

/// Adds --max-bytes and --max-unpacked, the limits of files of weights (io::ReadLimits), to a verb that reads them.
void add_read_limits(CLI::App& verb);

/// Most threads that --threads and HALFSTEP_THREADS take.
inline constexpr std::uint64_t kMostThreads = 4096;
/// Most samples of a batch, steps, or the like: what makes sense by far, and whose products don't overflow.
inline constexpr std::uint64_t kMostCount = 1'000'000'000;

/// Any 64 bits are a seed.
inline constexpr std::uint64_t kMostSeed = std::numeric_limits<std::uint64_t>::max();

/// Makes a folder with those above it. Throws IoError.
void make_folder(const std::filesystem::path& folder);

/// Whether a network is called so.
bool is_network(const std::string& name);

/// Where MODEL is the first argument and may be left out: a file or folder in its place is returned as what it is, and
/// the model becomes empty.
std::filesystem::path take_model_for_path(std::string& model);

/// A network with weights, and what their file says of them.
struct Loaded {
  training::Classifier classifier;
  std::shared_ptr<const void> holder;  ///< of the network
  std::int64_t num_classes = 0;
  std::vector<std::string> classes;                   ///< names; may be empty
  std::map<std::string, std::string> recipe;          ///< flags of its training; may be empty
  std::string amp = {};                               ///< precision of its training, as `O2 bf16`; may be empty
  std::map<std::string, std::string> data_checksums;  ///< of its training's data; may be empty
  std::filesystem::path file;                         ///< of the weights
  RunConfig run;                                      ///< that they are of, where that is known

  /// `mlp with runs/a/best.safetensors`.
  std::string text(const std::string& model) const;
};
/// The network with the weights of a checkpoint, of a run's folder, or of any .safetensors or .pth file; it has as many
/// classes as they have. An empty `model` becomes that of the checkpoint; a checkpoint of another one is refused.
/// Throws IoError, and UsageError for weights that don't say what they are of.
Loaded load_classifier(std::string& model, const std::filesystem::path& weights);

/// Where a verb takes pictures from.
struct DataPlace {
  std::filesystem::path folder;  ///< empty: the built-in digits
  std::uint64_t seed = 0;        ///< of those
  bool from_run = false;         ///< the run says so, no flag

  /// `data, as runs/a/config.yaml says`.
  std::string text(const Loaded& loaded) const;
};
/// The data of the run that the weights are of, where no flag says others. Throws IoError when they are gone.
DataPlace place_of_data(const Loaded& loaded, const std::filesystem::path& given, std::optional<std::uint64_t> seed);
/// Throws IoError when a part of the run's data has another checksum than it had.
void check_same_data(const Loaded& loaded, const DataPlace& place, const char* part, const std::string& checksum);

/// The flags of the images that eval and predict look at.
struct EvalImageOptions {
  training::ImageDataOptions images;
  std::function<std::size_t(const std::string& flag)> count = {};
};
/// Adds --image-size and --resize.
void add_image_size(CLI::App& verb, EvalImageOptions& options);
/// Where flags don't say it, the sizes that the weights were trained with, or else the network's usual ones. Throws
/// UsageError.
void resolve_images(EvalImageOptions& options, const std::string& model, const Loaded& loaded);

/// Throws IoError when the classes of weights and data can't be the same; warns when they have other names.
void check_classes(const Loaded& loaded, const std::vector<std::string>& classes, const std::filesystem::path& weights,
                   const std::filesystem::path& folder);

/// The pictures of a folder in MNIST's format, or the built-in digits when there is no folder; `limit` at most (0:
/// all).
data::MnistData load_pictures(const std::filesystem::path& folder, data::Split split, std::uint64_t seed,
                              std::int64_t limit = 0);
/// As a data set, flattened and normalised as MNIST customarily is.
std::shared_ptr<const data::Dataset> make_dataset(data::MnistData pictures);

/// Runs `function`; an Error of it becomes a UsageError, since it speaks of arguments.
template <class F>
auto as_usage(F&& function) {
  try {
    return function();
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
}

}  // namespace halfstep::cli
